//! Ctrl-C and SIGTERM: the first ends all in order, the second at once.

use anyhow::Context;
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

/// Listens from its making on.
#[derive(Debug)]
pub(crate) struct Interrupt {
    first: CancellationToken,
    second: CancellationToken,
    /// Aborted with this.
    _listening: JoinSet<()>,
}

impl Interrupt {
    pub(crate) fn listen() -> anyhow::Result<Self> {
        let (first, second) = (CancellationToken::new(), CancellationToken::new());
        let mut interrupt = signal(SignalKind::interrupt()).context("cannot listen for Ctrl-C")?;
        let mut terminate = signal(SignalKind::terminate()).context("cannot listen for SIGTERM")?;
        let mut hangup = signal(SignalKind::hangup()).context("cannot listen for SIGHUP")?;
        let tokens = [first.clone(), second.clone()];
        let mut listening = JoinSet::new();
        listening.spawn(async move {
            for token in tokens {
                tokio::select! {
                    _ = interrupt.recv() => {}
                    _ = terminate.recv() => {}
                    _ = hangup.recv() => {}
                }
                token.cancel();
            }
        });
        Ok(Self {
            first,
            second,
            _listening: listening,
        })
    }

    pub(crate) async fn first(&self) {
        self.first.cancelled().await;
    }

    pub(crate) async fn second(&self) {
        self.second.cancelled().await;
    }
}
