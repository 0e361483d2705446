//! `vllm-stand-in serve MODEL FLAG...`: what a pod of the tests runs as `vllm`, where no image of vLLM can be had.

use std::process::ExitCode;

fn main() -> anyhow::Result<ExitCode> {
    baton_e2e::stand_in::server::run()
}
