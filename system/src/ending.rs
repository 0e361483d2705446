//! What tells a process to end: signals, and a parent that is gone.

use std::io;

use tokio::signal::unix::{self, SignalKind, signal};
use tokio::sync::oneshot;

/// How a process is asked to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    /// In good order.
    Terminate,
    /// By somebody who waits for it.
    Interrupt,
}

impl Signal {
    /// `SIGTERM` or `SIGINT`.
    pub fn word(self) -> &'static str {
        match self {
            Self::Terminate => "SIGTERM",
            Self::Interrupt => "SIGINT",
        }
    }
}

/// The signals by which processes are asked to end. They are kept from the moment this is made.
#[derive(Debug)]
pub struct Signals {
    terminate: unix::Signal,
    interrupt: unix::Signal,
}

impl Signals {
    /// From now on these signals end the process no more.
    ///
    /// # Errors
    /// The runtime has no place for them; says what to look at.
    pub fn listen() -> io::Result<Self> {
        let listen = |kind| {
            signal(kind).map_err(|error| {
                let next = "look at the limit on open files (ulimit -n)";
                io::Error::new(error.kind(), format!("{error}: {next}"))
            })
        };
        Ok(Self {
            terminate: listen(SignalKind::terminate())?,
            interrupt: listen(SignalKind::interrupt())?,
        })
    }

    /// Waits for the next one.
    pub async fn next(&mut self) -> Signal {
        tokio::select! {
            _ = self.terminate.recv() => Signal::Terminate,
            _ = self.interrupt.recv() => Signal::Interrupt,
        }
    }
}

/// Resolves when standard input ends: the parent that held it is gone. Never, where that is not `watched`.
pub async fn parent_gone(watched: bool) {
    if !watched {
        return std::future::pending().await;
    }
    let (sender, ended) = oneshot::channel();
    // A thread of its own, because a read of standard input cannot be given up: it ends with the process.
    let reader = std::thread::Builder::new()
        .name("stdin".to_owned())
        .spawn(move || {
            // An error ends it as well: there is no parent to hear from.
            let _ = io::copy(&mut io::stdin().lock(), &mut io::sink());
            let _ = sender.send(());
        });
    if reader.is_err() || ended.await.is_err() {
        std::future::pending::<()>().await;
    }
}
