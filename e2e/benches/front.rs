//! What the router adds: a real router process before a simulated worker whose steps take no time, against direct calls of the
//! same worker. Prompts of 2K and 32K characters, 32 tokens streamed, placement and decision records on.
//!
//! Time to first token at one client (router and direct taken in turn) and at 64 (one after the other), processor time of the router
//! process a request, and requests a second. Once with a vocabulary of bytes, where a character is a token: hashing, placing and sending are
//! those of prompts four times as long, and merging of tokens is not in it. And, where `BATON_TEST_GGUF` names a model, with that
//! model's: only there is it said whether the bars, which are for 2,000 characters, are met. `BATON_BENCH_CALLGRIND=1` counts instructions instead of time: on a busy machine nothing else can be compared.

#![allow(clippy::print_stdout, reason = "a bench prints its figures")]

#[path = "front/direct.rs"]
mod direct;
#[path = "front/routed.rs"]
mod routed;
#[path = "front/stage.rs"]
mod stage;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Result;
use baton_e2e::process::processor_time;
use baton_e2e::prompts::story;
use direct::{Direct, Text};
use routed::Routed;
use stage::Stage;
use tokio::task::JoinSet;

const TOKENS: u32 = 32;
/// Of what is added to the time to first token, at the median.
const ADDED: Duration = Duration::from_millis(1);
/// Of the router's processor time a request.
const SPENT: Duration = Duration::from_micros(500);
/// What the bars are for.
const CHARACTERS: usize = 2_000;
const CLIENTS: usize = 64;
/// The first ones compile, connect and fill caches.
const WARM: usize = 10;
/// Of each run with 64 clients.
const LOADED: Duration = Duration::from_secs(5);

fn main() -> Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?;
    runtime.block_on(Box::pin(measure()))
}

async fn measure() -> Result<()> {
    let model = std::env::var_os("BATON_TEST_GGUF").filter(|path| !path.is_empty());
    let model = model.map(PathBuf::from);
    if model.is_none() {
        println!("only the byte-level vocabulary: BATON_TEST_GGUF names no model");
    }
    let vocabularies = [None].into_iter().chain(model.as_deref().map(Some));
    for vocabulary in vocabularies {
        let name = vocabulary
            .and_then(Path::file_stem)
            .unwrap_or("bytes".as_ref());
        println!("vocabulary: {}", name.display());
        match std::env::var_os("BATON_BENCH_CALLGRIND") {
            Some(_) => instructions(vocabulary).await?,
            None => times(vocabulary).await?,
        }
    }
    Ok(())
}

async fn times(model: Option<&Path>) -> Result<()> {
    let stage = Stage::start(model, false).await?;
    let direct = Arc::new(Direct::connect(&stage, Text::of(model)?).await?);
    let mut judged = Vec::new();
    println!(
        "{:>10} {:>7} {:>9} {:>12} {:>12} {:>12} {:>12} {:>12}",
        "characters",
        "tokens",
        "requests",
        "direct p50",
        "routed p50",
        "added p50",
        "added p99",
        "CPU/request"
    );
    for (characters, requests) in [(CHARACTERS, 400), (32_000, 80)] {
        let costs = one_client(&stage, &direct, characters, requests).await?;
        judged.push((characters, 1, costs));
    }
    println!(
        "{:>10} {:>9} {:>12} {:>12} {:>12} {:>12} {:>12}",
        "characters",
        "clients",
        "requests/s",
        "direct p50",
        "routed p50",
        "routed p99",
        "CPU/request"
    );
    for characters in [CHARACTERS, 32_000] {
        let costs = many_clients(&stage, &direct, characters).await?;
        judged.push((characters, CLIENTS, costs));
    }
    judged.retain(|(characters, ..)| model.is_some() && *characters == CHARACTERS);
    for (characters, clients, costs) in &judged {
        println!(
            "{characters} characters, clients: {clients}: {}",
            costs.judged(*clients)
        );
    }
    Ok(())
}

/// Medians of the time to first token, and the router's processor time a request.
struct Costs {
    direct: Duration,
    routed: Duration,
    spent: Duration,
}

impl Costs {
    fn added(&self) -> Duration {
        self.routed.saturating_sub(self.direct)
    }

    /// As ratios, so that one below 1 is good. What is added has a bar at one client: many wait for each other.
    fn judged(&self, clients: usize) -> String {
        let beside = |cost: Duration, bar: Duration| {
            let ratio = cost.as_secs_f64() / bar.as_secs_f64();
            let word = if ratio < 1.0 { "met" } else { "missed" };
            format!("/ {} = {ratio:.2} {word}", shown(bar))
        };
        let added = match clients {
            1 => format!("added p50 {}; ", beside(self.added(), ADDED)),
            _ => String::new(),
        };
        format!(
            "routed / direct TTFT p50 = {:.2}; {added}CPU/request {}",
            self.routed.as_secs_f64() / self.direct.as_secs_f64(),
            beside(self.spent, SPENT),
        )
    }
}

/// Instructions of the router process outside of the kernel, which depend neither on the machine nor on what else it does.
async fn instructions(model: Option<&Path>) -> Result<()> {
    for (characters, requests) in [(2_000, 100), (32_000, 20)] {
        let stage = Stage::start(model, true).await?;
        let mut routed = Routed::connect(stage.api).await?;
        for number in 0..WARM {
            let text = prompt(characters, number);
            routed.first_token(&text, TOKENS).await?;
        }
        stage.count(true)?;
        for number in WARM..WARM + requests {
            let text = prompt(characters, number);
            routed.first_token(&text, TOKENS).await?;
        }
        stage.count(false)?;
        drop(routed);
        let (total, profile) = stage.instructions()?;
        println!(
            "{characters:>10} characters: {:>7.2} million instructions a request; {}",
            total as f64 / requests as f64 / 1e6,
            profile.display()
        );
    }
    Ok(())
}

/// A prompt that no other begins like.
fn prompt(characters: usize, number: usize) -> String {
    let mut text = format!("{number:08} {}", story(number, characters / 60));
    while text.len() < characters {
        text.push_str(" and so on");
    }
    text.truncate(characters);
    text
}

async fn one_client(
    stage: &Stage,
    direct: &Direct,
    characters: usize,
    requests: usize,
) -> Result<Costs> {
    let router = stage.router();
    let mut routed = Routed::connect(stage.api).await?;
    let (mut direct_times, mut routed_times) = (Vec::new(), Vec::new());
    let mut spent = Duration::ZERO;
    for number in 0..requests + WARM {
        let text = prompt(characters, number);
        let alone = direct.first_token(&text, TOKENS).await?;
        let before = processor_time(router)?;
        let through = routed.first_token(&text, TOKENS).await?;
        if number >= WARM {
            spent += processor_time(router)?.saturating_sub(before);
            direct_times.push(alone);
            routed_times.push(through);
        }
    }
    let (alone, through) = (Sorted::new(direct_times), Sorted::new(routed_times));
    let costs = Costs {
        direct: alone.at(0.5),
        routed: through.at(0.5),
        spent: spent / u32::try_from(requests)?,
    };
    println!(
        "{characters:>10} {:>7} {requests:>9} {:>12} {:>12} {:>12} {:>12} {:>12}",
        direct.length(&prompt(characters, 0))?,
        shown(costs.direct),
        shown(costs.routed),
        shown(costs.added()),
        shown(through.at(0.99).saturating_sub(alone.at(0.99))),
        shown(costs.spent),
    );
    Ok(costs)
}

/// First all call the worker, then all the router.
async fn many_clients(stage: &Stage, direct: &Arc<Direct>, characters: usize) -> Result<Costs> {
    let (address, router) = (stage.api, stage.router());
    let alone = crowd(|client, began| {
        let direct = direct.clone();
        async move {
            let mut times = Vec::new();
            while began.elapsed() < LOADED {
                let text = prompt(characters, client * 1_000_000 + times.len());
                times.push(direct.first_token(&text, TOKENS).await?);
            }
            Ok(times)
        }
    });
    let alone = Sorted::new(alone.await?);
    let before = processor_time(router)?;
    let began = Instant::now();
    let times = crowd(|client, began| async move {
        let mut routed = Routed::connect(address).await?;
        let mut times = Vec::new();
        while began.elapsed() < LOADED {
            let text = prompt(characters, client * 1_000_000 + times.len());
            times.push(routed.first_token(&text, TOKENS).await?);
        }
        Ok(times)
    });
    let times = times.await?;
    let took = began.elapsed();
    let spent = processor_time(router)?.saturating_sub(before);
    let requests = times.len();
    let sorted = Sorted::new(times);
    let costs = Costs {
        direct: alone.at(0.5),
        routed: sorted.at(0.5),
        spent: spent / u32::try_from(requests.max(1))?,
    };
    println!(
        "{characters:>10} {CLIENTS:>9} {:>12.0} {:>12} {:>12} {:>12} {:>12}",
        requests as f64 / took.as_secs_f64(),
        shown(costs.direct),
        shown(costs.routed),
        shown(sorted.at(0.99)),
        shown(costs.spent),
    );
    Ok(costs)
}

/// The times of all clients, each of which is told its number and when all began.
async fn crowd<Times>(client: impl Fn(usize, Instant) -> Times) -> Result<Vec<Duration>>
where
    Times: Future<Output = Result<Vec<Duration>>> + Send + 'static,
{
    let began = Instant::now();
    let mut clients: JoinSet<_> = (0..CLIENTS).map(|number| client(number, began)).collect();
    let mut times = Vec::new();
    while let Some(client) = clients.join_next().await {
        times.extend(client??);
    }
    Ok(times)
}

struct Sorted(Vec<Duration>);

impl Sorted {
    fn new(mut times: Vec<Duration>) -> Self {
        times.sort_unstable();
        Self(times)
    }

    fn at(&self, share: f64) -> Duration {
        let last = self.0.len().saturating_sub(1);
        let index = (last as f64 * share).round() as usize;
        self.0.get(index).copied().unwrap_or_default()
    }
}

fn shown(time: Duration) -> String {
    format!("{:.0} us", time.as_secs_f64() * 1e6)
}
