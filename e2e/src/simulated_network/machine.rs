//! What a host has instead of a machine: random numbers of the seed, no threads, and a clock of its own speed.

use std::sync::{Arc, Mutex, PoisonError};

use baton_placement::rng::Rng;
use baton_system::System;
use baton_system::entropy::{Entropy, NoEntropy};
use baton_system::threads::Threads;
use baton_worker::kv::clock::Clock;
use tokio::time::Instant;

use super::sockets::SimulatedNetwork;

/// The machine of one start of a host.
pub fn system(network: &SimulatedNetwork, seed: u64) -> System {
    System {
        network: Arc::new(network.clone()),
        entropy: Arc::new(Seeded(Mutex::new(Rng::new(seed)))),
        threads: Threads::Absent,
    }
}

#[derive(Debug)]
struct Seeded(Mutex<Rng>);

impl Entropy for Seeded {
    fn fill(&self, bytes: &mut [u8]) -> Result<(), NoEntropy> {
        let mut rng = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for chunk in bytes.chunks_mut(8) {
            let drawn = rng.next_u64().to_le_bytes();
            chunk.copy_from_slice(&drawn[..chunk.len()]);
        }
        Ok(())
    }
}

/// How a host's clock goes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Skew {
    /// What it shows when the host starts, milliseconds.
    pub offset: u64,
    /// Milliseconds that it counts in a thousand.
    pub per_mille: u64,
}

/// A clock that starts anywhere and goes too fast or too slow.
#[derive(Debug)]
pub struct SkewedClock {
    started: Instant,
    skew: Skew,
}

impl SkewedClock {
    /// It is started now.
    pub fn start(skew: Skew) -> Self {
        Self {
            started: Instant::now(),
            skew,
        }
    }
}

impl Clock for SkewedClock {
    fn now(&self) -> u64 {
        let passed = u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.skew.offset + passed * self.skew.per_mille / 1000
    }
}
