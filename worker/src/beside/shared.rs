//! What the tasks of a daemon beside a server share.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
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
    /// A process of the server that had a life may still run: nobody has seen its port closed since.
    may_run: AtomicBool,
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
            may_run: AtomicBool::new(false),
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

    pub(crate) fn begins(&self, life: &Arc<Life>) {
        self.may_run.store(true, Ordering::Release);
        self.life.send_replace(Some(Arc::clone(life)));
    }

    /// The life has ended. `gone`: with the process; else it may go on with what it was sent, and answers nobody who looks for it.
    pub(crate) fn ends(&self, why: &str, gone: bool) {
        if gone {
            self.stopped();
        }
        self.absent(why);
        self.life.send_replace(None);
    }

    /// Nothing listens at the server's port.
    pub(crate) fn stopped(&self) {
        self.may_run.store(false, Ordering::Release);
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

    /// Another process of the server was found. What drained was the last one: a kubelet that restarts a container calls its `preStop`
    /// too. Whoever means the worker, and not a process, sees in its load that it does not drain, and says so again.
    pub(crate) fn began_anew(&self) {
        if !self.stop.is_cancelled() {
            self.set_draining(false);
        }
    }

    /// Sequences that run or wait, by the last report.
    pub(crate) fn operations(&self) -> u32 {
        self.current().map_or(0, |life| {
            let load = *life.load.borrow();
            load.running_sequences + load.queued_sequences
        })
    }

    /// What peers have still to read, by the last report.
    pub(crate) fn leases(&self) -> u32 {
        self.current()
            .map_or(0, |life| life.load.borrow().leases_open)
    }

    /// Says that it takes no more, and waits until the server runs nothing and its KV was read, at most so long. The server itself
    /// goes on taking what it is sent: routers send it nothing. One that does not answer, with a long prompt say, is not empty.
    pub(crate) async fn drain(&self, at_most: Duration) -> bool {
        self.set_draining(true);
        let mut draining = self.draining.subscribe();
        let empty = async {
            let mut reports = 0;
            let mut last = None;
            while reports < EMPTY_REPORTS {
                let Some(life) = self.current() else {
                    if !self.may_run.load(Ordering::Acquire) {
                        return;
                    }
                    (reports, last) = (0, None);
                    tokio::time::sleep(LOOK).await;
                    continue;
                };
                let load = *life.load.borrow();
                let left = load.running_sequences + load.queued_sequences + load.leases_open;
                if left > 0 {
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

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use baton_placement::calibration::unknown_worker;
    use baton_protocol::hash::HashKey;
    use baton_protocol::{samples, wire};
    use serde_json::json;

    use super::*;
    use crate::beside::index::{Index, Settings};

    fn life(shared: &Shared, load: wire::Load) -> Arc<Life> {
        let settings = Settings {
            key: HashKey::from_bytes(&[7; 32]),
            kv_identity: "identity".into(),
            block_size: 4,
            blocks: 8,
            adapters: HashMap::new(),
        };
        let draining = shared.draining.subscribe();
        let ended = (None, CancellationToken::new());
        let index = Index::new(settings, 100);
        Life::new(
            samples::card("p0"),
            HashMap::new(),
            index,
            load,
            unknown_worker(),
            draining,
            ended,
        )
        .unwrap()
    }

    fn shared() -> Arc<Shared> {
        let config = json!({
            "name": "p0", "pool": "prefill", "role": "Prefill", "model": {"name": "tiny"},
            "engine": {"type": "VLLM", "url": "http://127.0.0.1:8200"},
        });
        Shared::new(serde_json::from_value(config).unwrap())
    }

    #[tokio::test(start_paused = true)]
    async fn a_server_that_answers_nobody_is_not_empty_until_nothing_listens_at_its_port() {
        let shared = shared();
        let at_most = Duration::from_secs(60);
        assert!(shared.drain(at_most).await, "there was never one");
        let load = wire::Load {
            running_sequences: 1,
            ..wire::Load::default()
        };
        shared.begins(&life(&shared, load));
        shared.ends("it has not answered within 5 s", false);
        assert!(!shared.drain(at_most).await);
        let drained = shared.drain(at_most);
        let gone = async {
            tokio::time::sleep(Duration::from_secs(1)).await;
            shared.stopped();
        };
        assert!(tokio::join!(drained, gone).0);
        shared.begins(&life(&shared, load));
        shared.ends("its process began anew", true);
        assert!(shared.drain(at_most).await);
    }

    /// A drain that was answered while a peer still had KV to fetch would take it away.
    #[tokio::test(start_paused = true)]
    async fn a_drain_waits_for_the_readers_of_kv() {
        let shared = shared();
        let load = wire::Load {
            leases_open: 1,
            ..wire::Load::default()
        };
        let life = life(&shared, load);
        shared.begins(&life);
        let reports = {
            let life = Arc::clone(&life);
            tokio::spawn(async move {
                loop {
                    tokio::time::sleep(Duration::from_secs(1)).await;
                    life.load.send_modify(|load| load.load_sequence += 1);
                }
            })
        };
        assert!(!shared.drain(Duration::from_secs(60)).await);
        assert_eq!(shared.leases(), 1);
        life.load.send_modify(|load| load.leases_open = 0);
        assert!(shared.drain(Duration::from_secs(60)).await);
        reports.abort();
    }
}
