//! What a process gets from its machine: sockets, random numbers, threads, and the time that timers know.
//!
//! The async shells of router and worker take a [`System`] as an argument instead of reaching for the machine. Production gives
//! them [`System::machine`]; a simulation gives them its own, and then the very code that production runs can be led through
//! partitions, crashes and slow peers by seed.
//!
//! - [`network`]: listening and connecting; gRPC channels and servers over it.
//! - [`entropy`]: random bytes. [`threads`]: work that is too long for a thread that serves.
//! - [`process`]: log, runtime and exit status. [`ending`]: what tells a process to end. [`scrape`]: its metrics, asked for.
//!
//! Time: async code asks [`tokio::time::Instant`], which a paused runtime leads. Anchors of wall time are arguments elsewhere.

pub mod ending;
pub mod entropy;
pub mod network;
pub mod process;
pub mod scrape;
pub mod threads;

use std::sync::Arc;

use entropy::{Entropy, MachineEntropy};
use network::{MachineNetwork, Network};
use threads::Threads;

/// One machine, or what a simulation gives instead.
#[derive(Clone, Debug)]
pub struct System {
    pub network: Arc<dyn Network>,
    pub entropy: Arc<dyn Entropy>,
    pub threads: Threads,
}

impl System {
    /// The machine that this process runs on.
    pub fn machine() -> Self {
        Self {
            network: Arc::new(MachineNetwork),
            entropy: Arc::new(MachineEntropy),
            threads: Threads::Machine,
        }
    }
}
