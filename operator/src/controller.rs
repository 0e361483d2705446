//! Looks at objects as they change: observe, plan, apply. The plans are made elsewhere ([`crate::pool`], [`crate::policy`]); here is
//! what reads and writes.
//!
//! | module | subject |
//! |---|---|
//! | [`pools`], [`policies`] | one look at a pool, at a policy |
//! | [`execute`] | carrying out what a plan of a pool says |
//! | [`queue`], [`work`] | which object is looked at when, how many at a time, what follows a failure |
//! | [`watches`], [`caches`], [`triggers`] | what the API server tells, and whom it concerns |
//! | [`reports`], [`routers`] | what workers and routers say when they are asked |
//! | [`views`] | cached objects as the planner of policies sees them |
//! | [`context`] | what looks share |
//! | [`key`], [`fault`] | names of objects, and what can go wrong |
//! | [`writes`], [`events`], [`hash_key`] | the one way out |

pub mod caches;
pub mod context;
pub mod events;
pub mod execute;
pub mod fault;
pub mod hash_key;
#[cfg(test)]
mod imagined;
pub mod key;
pub mod policies;
pub mod pools;
pub mod queue;
pub mod reports;
pub mod routers;
pub mod triggers;
pub mod views;
pub mod watches;
pub mod work;
pub mod writes;
