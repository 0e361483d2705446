//! Fuzz targets: what is parsed from outside, each with a check that any bytes must pass.
//!
//! A target is a function from bytes that panics when a property is broken. The properties say more than "no panic": what is
//! written again reads the same, limits hold, an error blames one thing in few words, an index equals a plain model of it.
//!
//! - [`http_body`]: chat and completion requests, from the body to the tokens of the prompt, and as they are
//!   passed on to engines ([`passed_on`]). [`sse`]: event streams, read and written.
//! - [`transport_frames`]: control frames beside KV bytes. [`kv_events`]: a worker's Watch stream into the router's prefix index.
//! - [`engine_events`]: what vLLM and SGLang publish of their caches. [`gguf`]: model files. [`policy_yaml`]: the three resources.
//! - [`seeds`]: inputs that are right, to begin from. [`corpus`]: the kept inputs.
//!
//! `corpus/TARGET/` holds inputs that reach something new, `findings/TARGET/` inputs that once broke a property. `cargo test` runs
//! them all, without a fuzzer. `make fuzz SECONDS=60` looks for new ones (see `fuzz/run`).
//!
//! What is absent: a sanitizer (the code fuzzed here has no `unsafe`), and nightly Rust (`fuzz/instrument` adds the counters).

pub mod corpus;
pub mod engine_events;
pub mod gguf;
pub mod http_body;
pub mod kv_events;
pub mod passed_on;
pub mod policy_yaml;
pub mod seeds;
pub mod sse;
pub mod transport_frames;

/// A target and where its inputs lie.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// Folder under `corpus/` and `findings/`; the binary is `fuzz-NAME`.
    pub name: &'static str,
    /// Panics when a property is broken.
    pub check: fn(&[u8]),
    /// Whether an input is right, as far as whoever reads it can tell.
    pub accepts: fn(&[u8]) -> bool,
    /// Inputs that are right, each with a word for its file.
    pub seeds: fn() -> Vec<(String, Vec<u8>)>,
}

/// Every target.
pub const TARGETS: [Target; 7] = [
    Target {
        name: "http-body",
        check: http_body::check,
        accepts: http_body::accepts,
        seeds: seeds::requests,
    },
    Target {
        name: "sse",
        check: sse::check,
        accepts: sse::accepts,
        seeds: seeds::streams,
    },
    Target {
        name: "transport-frames",
        check: transport_frames::check,
        accepts: transport_frames::accepts,
        seeds: seeds::frames,
    },
    Target {
        name: "kv-events",
        check: kv_events::check,
        accepts: kv_events::accepts,
        seeds: seeds::events::seeds,
    },
    Target {
        name: "engine-events",
        check: engine_events::check,
        accepts: engine_events::accepts,
        seeds: seeds::engine_events::seeds,
    },
    Target {
        name: "gguf",
        check: gguf::check,
        accepts: gguf::accepts,
        seeds: seeds::model_files::seeds,
    },
    Target {
        name: "policy-yaml",
        check: policy_yaml::check,
        accepts: policy_yaml::accepts,
        seeds: seeds::resources,
    },
];
