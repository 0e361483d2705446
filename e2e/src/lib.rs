//! Tests on real processes: what starts them, speaks to them and reads what they say about themselves.
//!
//! Nothing here stands in for the product: programs are those of `make build`, sockets are loopback, models compute. The one
//! thing put between them is the [`interposer`], which changes what a worker says of itself. Of engines there is a stand-in, where no
//! real one can be had.
//!
//! - [`binaries`]: where the programs are. [`process`]: one of them, ended by its id whatever happens.
//! - [`fleet`]: a running `baton up`. [`manifest`]: the resources it is given. [`lone_router`]: a router beside it.
//! - [`disaster`]: killing and freezing its processes. [`gate`]: holding what passes between a router and an engine.
//! - [`http`]: a client that can hang up. [`openai`]: requests and answers. [`prompts`]: texts of known kinds.
//! - [`record`]: decision records. [`metrics`]: what `/metrics` says. [`idle`]: what of it is zero where nothing runs.
//! - [`simulated_network`]: router and workers under partitions, losses and crashes, by seed.
//! - [`simulation`]: production engines and placement in simulated time.
//! - [`cluster`]: a real Kubernetes.
//! - [`collector`]: of traces.
//! - [`vllm`]: real vLLM servers, where this machine has them. [`stand_in`]: what speaks as one and computes nothing.
//! - [`wait`]: for a condition, with a deadline.

pub mod binaries;
pub mod cluster;
pub mod collector;
pub mod disaster;
pub mod fleet;
pub mod gate;
pub mod http;
pub mod idle;
pub mod interposer;
pub mod lone_router;
pub mod manifest;
pub mod metrics;
pub mod openai;
pub mod process;
pub mod prompts;
pub mod record;
pub mod simulated_network;
pub mod simulation;
pub mod stand_in;
pub mod vllm;
pub mod wait;

/// Runs a scenario to its end on a runtime of its own and fails the test with the whole chain of causes.
///
/// # Panics
/// When the scenario fails.
pub fn scenario(run: impl Future<Output = anyhow::Result<()>>) {
    let runtime = match tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
    {
        Ok(runtime) => runtime,
        Err(error) => panic!("no runtime: {error}"),
    };
    // Boxed: a scenario's future holds the state of everything it awaits.
    if let Err(error) = runtime.block_on(Box::pin(run)) {
        panic!("{error:#}");
    }
}

/// Says on a line of its own why a test did nothing.
pub fn skipped(reason: &str) {
    told(&format!("skipped: {reason}"));
}

/// A line for whoever reads a test's output.
#[allow(clippy::print_stdout, reason = "tests say what they skip and meet")]
pub fn told(line: &str) {
    println!("{line}");
}
