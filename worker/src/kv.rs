//! KV memory of a worker: who owns which block, what it holds, and how it is handed to another worker.
//!
//! - [`store`]: the bytes. [`pool`]: who owns them, shared by all threads; [`state`] is its pure heart.
//! - [`reservation`]: a request's hold on blocks. [`blocks`]: references, prefix cache, eviction. [`events`]: what the cache
//!   gained and lost.
//! - [`lease`]: the right of another worker to read; [`intake`]: reading, and proving what was read.
//! - [`clock`]: time as an argument.

pub mod blocks;
pub mod clock;
#[cfg(test)]
mod draw;
pub mod events;
pub mod intake;
pub mod lease;
pub mod pool;
pub mod reservation;
pub mod state;
pub mod store;
mod sync;

pub use self::blocks::CacheScope;
pub use self::pool::KvPool;
pub use self::reservation::Reservation;
pub use self::state::{BlockCounts, PoolConfig, PoolFull, Proof, Reserve};
pub use self::store::{BlockId, BlockStore, Geometry};
