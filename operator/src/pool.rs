//! What a pool needs next: a pure planner from what exists to what to do.
//!
//! | module | subject |
//! |---|---|
//! | [`observed`] | what the planner is told: the pool, its pods, their nodes, what their workers say, the time |
//! | [`action`] | what it answers: actions, the pool's status, events |
//! | [`pending`] | own writes that a cache does not show yet, laid over what it shows |
//!
//! [`plan`] is a function of its arguments and of nothing else. It remembers nothing: what it did before it reads from the objects
//! (a draining pod's condition says since when it drains), so an operator that is killed at any line goes on where it was.

pub mod action;
pub mod observed;
pub mod pending;

pub use action::{Action, Note, NoteKind, Plan, Regarding};
pub use observed::{
    Compatibility, Level, Observed, PolicyFacts, PoolObject, Settings, WorkerLoad, WorkerReport,
};
pub use pending::Pending;
