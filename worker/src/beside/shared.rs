//! What the tasks of a daemon beside a server share.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::life::Life;
use super::metrics::Metrics;
use crate::config::WorkerConfig;

/// Between two looks at what still runs.
const LOOK: Duration = Duration::from_millis(250);
/// Reports that must say that nothing runs: a request may have been on its way while the first was made.
const EMPTY_REPORTS: u64 = 2;

#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) config: WorkerConfig,
    /// The server's running life, if it has one.
    pub(crate) life: watch::Sender<Option<Arc<Life>>>,
    /// Why there is none, for whoever asks.
    absence: Mutex<String>,
    pub(crate) draining: watch::Sender<bool>,
    pub(crate) metrics: Metrics,
    pub(crate) stop: CancellationToken,
}

impl Shared {
    pub(crate) fn new(config: WorkerConfig) -> Arc<Self> {
        Arc::new(Self {
            metrics: Metrics::new(&config.pool),
            config,
            life: watch::Sender::new(None),
            absence: Mutex::new("the server was not looked for yet".to_owned()),
            draining: watch::Sender::new(false),
            stop: CancellationToken::new(),
        })
    }

    pub(crate) fn current(&self) -> Option<Arc<Life>> {
        self.life.borrow().clone()
    }

    /// The life, or why there is none.
    pub(crate) fn living(&self) -> Result<Arc<Life>, String> {
        self.current().ok_or_else(|| {
            format!(
                "worker {}: its server is not registered: {}",
                self.config.name,
                self.absence.lock()
            )
        })
    }

    pub(crate) fn absent(&self, why: &str) {
        why.clone_into(&mut self.absence.lock());
    }

    pub(crate) fn set_draining(&self, draining: bool) {
        let changed = self
            .draining
            .send_if_modified(|before| std::mem::replace(before, draining) != draining);
        if changed {
            tracing::info!(worker = %self.config.name, draining, "drain");
        }
    }

    /// Sequences that run or wait, by the last report.
    pub(crate) fn operations(&self) -> u32 {
        self.current().map_or(0, |life| {
            let load = *life.load.borrow();
            load.running_sequences + load.queued_sequences
        })
    }

    /// Says that it takes no more, and waits until the server runs nothing, at most so long. The server itself goes on taking what it
    /// is sent: routers send it nothing.
    pub(crate) async fn drain(&self, at_most: Duration) -> bool {
        self.set_draining(true);
        let mut draining = self.draining.subscribe();
        let empty = async {
            let mut reports = 0;
            let mut last = None;
            while reports < EMPTY_REPORTS {
                let Some(life) = self.current() else {
                    return;
                };
                let load = *life.load.borrow();
                if load.running_sequences + load.queued_sequences > 0 {
                    reports = 0;
                } else if last.is_some_and(|last| last != load.load_sequence) {
                    reports += 1;
                }
                last = Some(load.load_sequence);
                tokio::time::sleep(LOOK).await;
            }
        };
        tokio::select! {
            () = empty => true,
            () = self.stop.cancelled() => false,
            _ = draining.wait_for(|draining| !draining) => false,
            () = tokio::time::sleep(at_most) => false,
        }
    }
}
