//! Many seeds of the simulated network. `BATON_SEEDS=N` plays that many, from `BATON_FIRST_SEED` on; `BATON_SEED=N` only one, with
//! its plan and its log (`RUST_LOG`).

use std::env;
use std::path::Path;
use std::time::Instant;

use anyhow::{Result, ensure};
use baton_e2e::simulated_network::hosts::Defect;
use baton_e2e::simulated_network::plan::Plan;
use baton_e2e::simulated_network::seeds::{Seeds, play_if_told};
use baton_protocol::failure::{FailureClass, HandoffFailure};

/// What `make test` plays.
const SEEDS: u64 = 200;
/// A defect is seen within so many seeds.
const FEW: u64 = 100;

fn number(name: &str) -> Option<u64> {
    env::var(name).ok()?.parse().ok()
}

fn seeds() -> Result<Seeds> {
    Seeds::new("one_seed", Path::new(env!("CARGO_TARGET_TMPDIR")))
}

/// What the processes of single seeds run; nothing otherwise.
#[test]
fn one_seed() -> Result<()> {
    play_if_told()
}

#[test]
fn no_seed_gives_a_wrong_token_a_stuck_run_or_a_leak() -> Result<()> {
    if let Some(seed) = number("BATON_SEED") {
        println!("{:#?}", Plan::of(seed));
        let played = seeds()?.play(seed, None)?;
        ensure!(played.problem.is_empty(), "seed {seed}: {}", played.problem);
        println!("{played:#?}");
        return Ok(());
    }
    let count = number("BATON_SEEDS").unwrap_or(SEEDS);
    let first = number("BATON_FIRST_SEED").unwrap_or(1);
    let began = Instant::now();
    let (tally, failed) = seeds()?.play_all(first..first + count)?;
    println!("{count} seeds in {:.0?}: {:#?}", began.elapsed(), tally.0);
    ensure!(
        failed.is_empty(),
        "{} of {count} seeds failed:\n{}",
        failed.len(),
        failed.join("\n")
    );
    if count >= SEEDS {
        for what in [
            "KV moved",
            "plan: remote",
            "plan: local",
            "attempts: 2",
            "client: left",
            "client: failed",
        ] {
            ensure!(tally.of(what) > 0, "it never happened: {what}");
        }
        // A remote plan is given up for what went wrong with its hand-off, and for a worker that was lost before it.
        let fallbacks = |word: &str| tally.of(&format!("fallback: {word}"));
        let handoffs = HandoffFailure::ALL.iter();
        let handoffs: u64 = handoffs.map(|cause| fallbacks(cause.word())).sum();
        ensure!(handoffs > 0, "no hand-off fell back");
        let lost = [FailureClass::PrefillLost, FailureClass::DecodeLost];
        let lost: u64 = lost.iter().map(|class| fallbacks(class.word())).sum();
        ensure!(lost > 0, "no run fell back from a worker that was lost");
    }
    Ok(())
}

#[test]
fn a_seed_is_the_same_to_the_byte_each_time() -> Result<()> {
    if number("BATON_SEED").is_some() {
        return Ok(());
    }
    let seeds = seeds()?;
    for seed in 1..=4 {
        let (one, again) = (seeds.play(seed, None)?, seeds.play(seed, None)?);
        ensure!(one.trace.1 > 1_000, "nearly nothing was sent: {one:?}");
        ensure!(
            one.trace == again.trace,
            "seed {seed}: {one:?} and {again:?}"
        );
    }
    Ok(())
}

/// A lease that nobody ends shows only where router and reader both fail to: some dozens of seeds.
#[test]
fn leases_that_never_expire_do_not_go_unnoticed() -> Result<()> {
    if number("BATON_SEED").is_some() {
        return Ok(());
    }
    let seeds = seeds()?;
    for seed in 50..50 + FEW {
        let played = seeds.play(seed, Some(Defect::LeasesForEver))?;
        if played.problem.contains("holds blocks") {
            return Ok(());
        }
    }
    anyhow::bail!("{FEW} seeds were content with leases that never expire")
}

/// One byte of one block of each prefill worker is wrong, and nobody looks: some seeds read that block.
#[test]
fn bytes_that_nobody_checks_do_not_go_unnoticed() -> Result<()> {
    if number("BATON_SEED").is_some() {
        return Ok(());
    }
    let seeds = seeds()?;
    for seed in 50..50 + FEW {
        let played = seeds.play(seed, Some(Defect::UncheckedBytes))?;
        if played.problem.contains("wrong tokens") || played.problem.contains("wrong answer") {
            return Ok(());
        }
    }
    anyhow::bail!("{FEW} seeds were content with a wrong byte in the KV")
}
