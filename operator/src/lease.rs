//! Who leads: leader election over one `Lease`, decided by [`evaluate`], carried out by [`hold`].
//!
//! - [`election`]: the rules, pure; expiry is measured by the candidate's own clock from when *it* saw the record change.
//! - [`claim`]: what the rest of the process asks before it writes.
//! - [`hold`]: reads and writes the `Lease`.
//!
//! The holder gives up well before another may take over ([`Timing`]), so that two never lead at once as long as their clocks
//! run at about the same pace; what their clocks say does not matter.

pub mod claim;
pub mod election;
#[cfg(test)]
mod histories;
pub mod hold;

pub use claim::Claim;
pub use election::{Decision, Election, Record, Timing, evaluate};
pub use hold::{LeaseError, Place, hold};
