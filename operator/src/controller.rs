//! Looks at objects as they change: observe, plan, apply. The plans are made elsewhere ([`crate::pool`], [`crate::policy`]); here is
//! what reads and writes.
//!
//! | module | subject |
//! |---|---|
//! | [`queue`], [`work`] | which object is looked at when, how many at a time, what follows a failure |
//! | [`watches`], [`caches`], [`triggers`] | what the API server tells, and whom it concerns |
//! | [`key`], [`fault`] | names of objects, and what can go wrong |
//! | [`writes`] | the one way out |

pub mod caches;
pub mod fault;
pub mod key;
pub mod queue;
pub mod triggers;
pub mod watches;
pub mod work;
pub mod writes;
