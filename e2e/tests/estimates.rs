//! Estimates come true: on workers and a link whose constants the router is not told, after fifty requests.

use anyhow::{Result, ensure};
use baton_e2e::scenario;
use baton_e2e::simulation::{Arrival, HiddenLink, Outcome, Setting, Simulation};
use baton_placement::coefficients::WorkerCoefficients;
use baton_placement::estimate::Path;
use baton_placement::policy::{FirstToken, Mode};
use baton_placement::rng::Rng;

/// Requests before anything is measured.
const LEARNING: usize = 50;
const MEASURED: usize = 240;
const SEEDS: [u64; 3] = [1, 2, 3];
/// Prompt lengths in tokens, in equal numbers.
const STRATA: [(u32, u32); 5] = [(16, 64), (64, 256), (256, 1024), (1024, 3000), (3000, 8000)];

#[test]
fn after_fifty_requests_estimates_are_right_and_bounds_hold_when_the_prefill_worker_samples_first()
{
    for seed in SEEDS {
        scenario(estimates_come_true(seed, FirstToken::Prefill));
    }
}

#[test]
fn after_fifty_requests_estimates_are_right_and_bounds_hold_when_the_first_token_waits_for_the_transfer()
 {
    for seed in SEEDS {
        scenario(estimates_come_true(seed, FirstToken::Decode));
    }
}

async fn estimates_come_true(seed: u64, first_token: FirstToken) -> Result<()> {
    let mut rng = Rng::new(seed);
    let setting = setting(&mut rng, seed, first_token);
    let mut simulation = Simulation::new(&setting).await?;
    simulation.run(&arrivals(&mut rng, LEARNING)).await?;
    let outcomes = simulation.run(&arrivals(&mut rng, MEASURED)).await?;
    for path in [Path::Local, Path::Remote] {
        let of_path: Vec<Outcome> = (outcomes.iter().copied())
            .filter(|outcome| outcome.path == path)
            .collect();
        check(
            path,
            &of_path,
            &format!("seed {seed}, first token by {first_token:?}"),
        )?;
    }
    simulation.check_empty()
}

#[allow(
    clippy::print_stdout,
    reason = "how good the estimates are is worth knowing when they are not"
)]
fn check(path: Path, outcomes: &[Outcome], about: &str) -> Result<()> {
    let mut errors: Vec<f64> = outcomes
        .iter()
        .map(|outcome| (outcome.actual / outcome.mean - 1.0).abs())
        .collect();
    errors.sort_by(f64::total_cmp);
    let covered = outcomes
        .iter()
        .filter(|outcome| outcome.actual <= outcome.upper)
        .count();
    let coverage = covered as f64 / outcomes.len().max(1) as f64;
    let median = errors.get(errors.len() / 2).copied().unwrap_or(f64::NAN);
    let ninth = errors
        .get(errors.len() * 9 / 10)
        .copied()
        .unwrap_or(f64::NAN);
    println!(
        "{about}, {}: {} runs, error median {:.1} %, p90 {:.1} %, coverage {:.1} %",
        path.word(),
        outcomes.len(),
        median * 100.0,
        ninth * 100.0,
        coverage * 100.0
    );
    ensure!(
        outcomes.len() >= MEASURED / 5,
        "{about}: too few runs are {}",
        path.word()
    );
    ensure!(
        median < 0.10,
        "{about}, {}: median error {median:.3}",
        path.word()
    );
    ensure!(
        (0.90..=0.98).contains(&coverage),
        "{about}, {}: {coverage:.3} of the runs are within their bound",
        path.word()
    );
    Ok(())
}

/// Steps like those of an 8 B model on one accelerator, up to a factor of two away from what the router starts from.
fn setting(rng: &mut Rng, seed: u64, first_token: FirstToken) -> Setting {
    let mut away = || 0.5 * 4f64.powf(rng.unit());
    let believed = WorkerCoefficients {
        a: 2.0,
        b: 0.05,
        k: 1.5e-6,
        floor: 6.0,
        d0: 6.0,
        d1: 0.05,
        d2: 5e-5,
        upper: Default::default(),
        samples: 0,
    };
    let hidden = WorkerCoefficients {
        a: believed.a * away(),
        b: believed.b * away(),
        k: believed.k * away(),
        floor: believed.floor * away(),
        d0: believed.d0 * away(),
        d1: believed.d1 * away(),
        d2: believed.d2 * away(),
        ..believed
    };
    let link = HiddenLink {
        alpha: 1.5 * away(),
        per_byte: 1e-4 * away(),
        per_descriptor: 0.02 * away(),
        synchronization: 3.0 * away(),
        noise: 0.05,
    };
    Setting {
        hidden,
        believed,
        link,
        decode_workers: 2,
        first_token,
        seed,
    }
}

/// Every length and every mode in equal numbers, in random order, at random times: most find the fleet busy, few find a queue.
fn arrivals(rng: &mut Rng, count: usize) -> Vec<Arrival> {
    let modes = [Some(Mode::Aggregated), Some(Mode::Disaggregated), None];
    let mut list: Vec<Arrival> = (0..count)
        .map(|index| {
            let (least, most) = STRATA[index % STRATA.len()];
            Arrival {
                at: 0.0,
                prompt_tokens: least + rng.below((most - least) as usize) as u32,
                output_tokens: 16 + rng.below(112) as u32,
                mode: modes[index / STRATA.len() % modes.len()],
            }
        })
        .collect();
    // Fisher and Yates.
    for last in (1..list.len()).rev() {
        list.swap(last, rng.below(last + 1));
    }
    let mut at = 0.0;
    for arrival in &mut list {
        at += -300.0 * (1.0 - rng.unit()).ln();
        arrival.at = at;
    }
    list
}
