//! Attempts on engines that speak OpenAI's protocol: the request goes to the engine's own port as it came, the answer comes back as
//! the engine sent it.
//!
//! [`engine`]: where an engine is, and what it is told. [`pool`]: connections to it. [`frames`]: the events of a stream, with their
//! bytes. [`answer`]: what an answer says besides. [`lease`]: how long blocks may be fetched. [`verdict`]: what a failure is. These are
//! pure but for `pool`; `drive::engines` runs an attempt with them.
//!
//! Engines report little: states that follow from what was seen are marked `inferred`. A request that was cancelled after its prefill
//! worker has answered leaves that worker's blocks to their lease: engines have no other way to give them back, and the decode leg,
//! which would free them, is sent within a moment of that answer, so that few are left.

pub mod answer;
pub mod engine;
pub mod frames;
pub mod lease;
pub mod pool;
pub mod verdict;
