//! Traces of runs: spans as plain values, the W3C context that ties them together over processes, and their export over OTLP.
//!
//! - [`context`]: trace and span ids, `traceparent`. [`span`]: what a span says. [`sampling`]: which runs are traced.
//! - [`anchor`]: time. [`settings`]: the standard `OTEL_*` variables and Baton's own flag. [`otlp`]: spans as OTLP messages.
//! - [`tracer`]: where finished spans are put; it never waits. [`export`]: the one task that sends them.
//!
//! Spans are made by pure functions of what the lifecycle reported, when an operation has ended, with times that were taken then:
//! nothing is open while a run runs, so nothing of it can leak or disagree with the decision record. Prompts and tokens are never
//! in a span.

pub mod anchor;
pub mod context;
pub mod export;
pub mod otlp;
pub mod sampling;
pub mod settings;
pub mod span;
pub mod tracer;
