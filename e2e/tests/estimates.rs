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
const SEEDS: [u64; 4] = [1, 2, 3, 4];
/// Prompt lengths in tokens, in equal numbers.
const STRATA: [(u32, u32); 5] = [(16, 64), (64, 256), (256, 1024), (1024, 3000), (3000, 8000)];

#[test]
fn after_fifty_requests_estimates_come_true_when_the_prefill_worker_samples_first() {
    scenario(estimates_come_true(FirstToken::Prefill));
}

#[test]
fn after_fifty_requests_estimates_come_true_when_the_first_token_waits_for_the_transfer() {
    scenario(estimates_come_true(FirstToken::Decode));
}

/// The median error is that of each fleet. Coverage is counted over all of them: of the hundred runs of one path in one
/// fleet, two more or fewer within their bound are chance.
async fn estimates_come_true(first_token: FirstToken) -> Result<()> {
    let mut all = Vec::new();
    for seed in SEEDS {
        let outcomes = outcomes(seed, first_token).await?;
        for path in [Path::Local, Path::Remote] {
            let of_path = of(&outcomes, path);
            let median = report(&format!("{first_token:?}, seed {seed}"), path, &of_path);
            ensure!(
                of_path.len() >= MEASURED / 5,
                "seed {seed}: too few runs are {}",
                path.word()
            );
            ensure!(
                median < 0.10,
                "seed {seed}, {}: the median error is {median:.3}",
                path.word()
            );
        }
        all.extend(outcomes);
    }
    for path in [Path::Local, Path::Remote] {
        let of_path = of(&all, path);
        report(&format!("{first_token:?}, all"), path, &of_path);
        let coverage = coverage(&of_path);
        ensure!(
            (0.90..=0.98).contains(&coverage),
            "{}: {coverage:.3} of the runs are within their bound",
            path.word()
        );
    }
    Ok(())
}

async fn outcomes(seed: u64, first_token: FirstToken) -> Result<Vec<Outcome>> {
    let mut rng = Rng::new(seed);
    let setting = setting(&mut rng, seed, first_token);
    let mut simulation = Simulation::new(&setting).await?;
    simulation.run(&arrivals(&mut rng, LEARNING)).await?;
    let outcomes = simulation.run(&arrivals(&mut rng, MEASURED)).await?;
    simulation.check_empty()?;
    Ok(outcomes)
}

fn of(outcomes: &[Outcome], path: Path) -> Vec<Outcome> {
    let of_path = outcomes.iter().filter(|outcome| outcome.path == path);
    of_path.copied().collect()
}

fn coverage(outcomes: &[Outcome]) -> f64 {
    let covered = (outcomes.iter())
        .filter(|outcome| outcome.actual <= outcome.upper)
        .count();
    covered as f64 / outcomes.len().max(1) as f64
}

/// Prints how good the estimates were; the median error.
#[allow(clippy::print_stdout, reason = "the figures behind a verdict")]
fn report(about: &str, path: Path, outcomes: &[Outcome]) -> f64 {
    let mut errors: Vec<f64> = outcomes
        .iter()
        .map(|outcome| (outcome.actual / outcome.mean - 1.0).abs())
        .collect();
    errors.sort_by(f64::total_cmp);
    let error = |share: usize| {
        let at = errors.len() * share / 100;
        errors.get(at).copied().unwrap_or(f64::NAN)
    };
    println!(
        "{about}, {}: {} runs, error median {:.1} %, p90 {:.1} %, coverage {:.1} %",
        path.word(),
        outcomes.len(),
        error(50) * 100.0,
        error(90) * 100.0,
        coverage(outcomes) * 100.0
    );
    error(50)
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
        samples: Default::default(),
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
