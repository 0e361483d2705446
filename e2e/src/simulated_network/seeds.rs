//! Each seed in a process of its own, whose hash maps and random choices are always the same: what failed once fails again.

use std::env;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};

use super::bank::Bank;
use super::hosts::Defect;
use super::plan::{EngineKind, Plan};
use super::records::Tally;
use super::scene;

/// Real time of one seed: one that takes longer turns in circles. The slowest take seconds.
const PATIENCE: Duration = Duration::from_secs(180);
/// What a process is told.
const ORDER: &str = "BATON_SIMULATION";

/// One seed to be played.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Order {
    seed: u64,
    defect: Option<Defect>,
    banks: PathBuf,
    result: PathBuf,
}

/// What came of it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Played {
    /// Empty: all held.
    pub problem: String,
    /// Hash of all that went over the network, and number of writes.
    pub trace: (u64, u64),
    /// Simulated milliseconds.
    pub lasted: u64,
    pub tally: Tally,
}

#[derive(Debug, Serialize, Deserialize)]
struct Banks {
    simulated: Bank,
    tiny: Bank,
}

impl Banks {
    fn of(&self, engine: EngineKind) -> &Bank {
        match engine {
            EngineKind::Simulated => &self.simulated,
            EngineKind::Tiny => &self.tiny,
        }
    }
}

/// Plays seeds, several at a time.
#[derive(Debug)]
pub struct Seeds {
    folder: tempfile::TempDir,
    /// The test, of this same program, that calls [`play_if_told`].
    entry: &'static str,
    same_random: PathBuf,
}

impl Seeds {
    /// Makes the right answers, and what keeps chance out. `build` is a folder that stays, such as `CARGO_TARGET_TMPDIR`.
    ///
    /// # Errors
    /// There is no C compiler, or the reference does not answer.
    pub fn new(entry: &'static str, build: &Path) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let banks = Banks {
            simulated: Bank::of(EngineKind::Simulated)?,
            tiny: Bank::of(EngineKind::Tiny)?,
        };
        std::fs::write(
            folder.path().join("banks.json"),
            serde_json::to_string(&banks)?,
        )?;
        Ok(Self {
            same_random: same_random(build)?,
            folder,
            entry,
        })
    }

    /// Plays one.
    ///
    /// # Errors
    /// The process says nothing.
    pub fn play(&self, seed: u64, defect: Option<Defect>) -> Result<Played> {
        let result = self.folder.path().join(format!("{seed}.{defect:?}.json"));
        let order = Order {
            seed,
            defect,
            banks: self.folder.path().join("banks.json"),
            result: result.clone(),
        };
        let shown = if env::var_os("BATON_SEED").is_some() {
            Stdio::inherit
        } else {
            Stdio::null
        };
        let mut child = Command::new(env::current_exe()?)
            .args(["--exact", self.entry, "--nocapture"])
            .env(ORDER, serde_json::to_string(&order)?)
            .env("LD_PRELOAD", &self.same_random)
            .stdout(shown())
            .stderr(shown())
            .spawn()?;
        let began = Instant::now();
        let ended = loop {
            if let Some(status) = child.try_wait()? {
                break status;
            }
            if began.elapsed() > PATIENCE {
                child.kill()?;
                child.wait()?;
                return Ok(Played::failed(format!(
                    "it was not over after {PATIENCE:?}"
                )));
            }
            thread::sleep(Duration::from_millis(5));
        };
        let Ok(text) = std::fs::read_to_string(&result) else {
            return Ok(Played::failed(format!("the process ended with {ended}")));
        };
        std::fs::remove_file(&result)?;
        Ok(serde_json::from_str(&text)?)
    }

    /// Plays many, one on each core, and returns what failed and the sum of what happened.
    ///
    /// # Errors
    /// Processes cannot be started.
    pub fn play_all(
        &self,
        seeds: impl Iterator<Item = u64> + Send,
    ) -> Result<(Tally, Vec<String>)> {
        let seeds = Mutex::new(seeds);
        let all: Mutex<(Tally, Vec<String>)> = Mutex::default();
        let cores = thread::available_parallelism().map_or(1, usize::from);
        thread::scope(|scope| {
            let hands: Vec<_> = (0..cores)
                .map(|_| scope.spawn(|| self.play_some(&seeds, &all)))
                .collect();
            for hand in hands {
                match hand.join() {
                    Ok(done) => done?,
                    Err(_) => bail!("a thread of the test panicked"),
                }
            }
            Ok(())
        })?;
        Ok(all.into_inner().unwrap_or_else(PoisonError::into_inner))
    }

    #[allow(
        clippy::print_stdout,
        reason = "a failure shows at once, not after hours"
    )]
    fn play_some(
        &self,
        seeds: &Mutex<impl Iterator<Item = u64>>,
        all: &Mutex<(Tally, Vec<String>)>,
    ) -> Result<()> {
        loop {
            let next = seeds.lock().unwrap_or_else(PoisonError::into_inner).next();
            let Some(seed) = next else {
                return Ok(());
            };
            let played = self.play(seed, None)?;
            let mut all = all.lock().unwrap_or_else(PoisonError::into_inner);
            if played.problem.is_empty() {
                all.0.add(&played.tally);
            } else {
                let problem = format!(
                    "seed {seed}: {}\n  again: BATON_SEED={seed} cargo test --release -p baton-e2e --test simulated_network -- --nocapture",
                    played.problem
                );
                println!("{problem}");
                all.1.push(problem);
            }
        }
    }
}

impl Played {
    fn failed(problem: String) -> Self {
        Self {
            problem,
            trace: (0, 0),
            lasted: 0,
            tally: Tally::default(),
        }
    }
}

/// Plays the seed that this process was started for; nothing when it was not.
///
/// # Errors
/// The order cannot be read, or its result not be written.
pub fn play_if_told() -> Result<()> {
    let Ok(order) = env::var(ORDER) else {
        return Ok(());
    };
    if env::var_os("BATON_SEED").is_some() {
        let filter = tracing_subscriber::EnvFilter::from_default_env();
        let format = tracing_subscriber::fmt().with_env_filter(filter);
        format.with_ansi(false).without_time().init();
    }
    let order: Order = serde_json::from_str(&order)?;
    let banks: Banks = serde_json::from_str(&std::fs::read_to_string(&order.banks)?)?;
    let plan = Plan::of(order.seed);
    let bank = banks.of(plan.engine);
    let played = match scene::play_with(&plan, &bank.bodies, Some(bank), order.defect) {
        Ok(report) => {
            tracing::info!("{report:#?}");
            Played {
                problem: String::new(),
                trace: report.trace,
                lasted: u64::try_from(report.lasted.as_millis())?,
                tally: report.tally,
            }
        }
        Err(error) => Played::failed(format!("{error:#}")),
    };
    std::fs::write(&order.result, serde_json::to_string(&played)?)?;
    Ok(())
}

/// The library that gives every process the same random bytes.
fn same_random(build: &Path) -> Result<PathBuf> {
    let source = build.join("fixed_random.c");
    let library = build.join(format!("fixed_random.{}.so", std::process::id()));
    std::fs::write(&source, include_str!("fixed_random.c"))?;
    let compiler = env::var_os("CC").unwrap_or_else(|| "cc".into());
    let status = Command::new(&compiler)
        .args(["-shared", "-fPIC", "-O1", "-o"])
        .args([&library, &source])
        .status()
        .with_context(|| format!("{}: install a C compiler", compiler.display()))?;
    ensure!(status.success(), "the C compiler ended with {status}");
    Ok(library)
}
