//! What the router adds: a real router process before a simulated worker whose steps take no time, against direct calls of the
//! same worker. Prompts of 2K and 32K characters, 32 tokens streamed, placement and decision records on.
//!
//! Time to first token at one client (router and direct taken in turn), processor time of the router process a request, and
//! requests a second at 64 clients. The worker's tokenizer is byte-level: a character is a token, so hashing, placing and sending
//! are those of prompts four times as long, and merging of tokens is not in it.

#![allow(clippy::print_stdout, reason = "a bench prints its figures")]

#[path = "front/direct.rs"]
mod direct;
#[path = "front/routed.rs"]
mod routed;

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use baton_e2e::fleet::Fleet;
use baton_e2e::lone_router::control;
use baton_e2e::manifest::Manifest;
use baton_e2e::prompts::story;
use direct::Direct;
use routed::Routed;
use tokio::task::JoinSet;

const TOKENS: u32 = 32;
const CLIENTS: usize = 64;
/// Of the run with 64 clients.
const LOADED: Duration = Duration::from_secs(5);

fn main() -> Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?;
    runtime.block_on(Box::pin(measure()))
}

fn timeless() -> Manifest {
    let timing = "prefillFloorMicroseconds: 0, prefillBaseMicroseconds: 0, prefillPerTokenNanoseconds: 0, \
                  prefillPerTokenPairPicoseconds: 0, decodeBaseMicroseconds: 0, decodePerSequenceNanoseconds: 0, \
                  decodePerContextTokenPicoseconds: 0, jitterPercent: 0, seed: 1";
    Manifest {
        engine: format!("{{type: Simulated, simulated: {{{timing}}}}}"),
        kv_pool: "{blocks: 40000, leaseSeconds: 3}".to_owned(),
        ..Manifest::tiny()
    }
}

async fn measure() -> Result<()> {
    let fleet = Fleet::of(&timeless()).await?;
    let router = fleet
        .processes()?
        .into_iter()
        .find(|process| process.role == "router")
        .context("no router")?
        .pid;
    let (_, worker) = control(&fleet, "decode")?;
    let direct = Direct::connect(&worker, &fleet).await?;
    println!(
        "{:>10} {:>9} {:>12} {:>12} {:>12} {:>12} {:>12}",
        "characters",
        "requests",
        "direct p50",
        "routed p50",
        "added p50",
        "added p99",
        "CPU/request"
    );
    for (characters, requests) in [(2_000, 400), (32_000, 80)] {
        one_client(&fleet, &direct, router, characters, requests).await?;
    }
    println!(
        "{:>10} {:>9} {:>12} {:>12} {:>12} {:>12}",
        "characters", "clients", "requests/s", "TTFT p50", "TTFT p99", "CPU/request"
    );
    for characters in [2_000, 32_000] {
        many_clients(&fleet, router, characters).await?;
    }
    fleet.end().await
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
    fleet: &Fleet,
    direct: &Direct,
    router: u32,
    characters: usize,
    requests: usize,
) -> Result<()> {
    let mut routed = Routed::connect(fleet.api.address()).await?;
    let (mut direct_times, mut routed_times) = (Vec::new(), Vec::new());
    let mut spent = Duration::ZERO;
    for number in 0..requests + 10 {
        let text = prompt(characters, number);
        let alone = direct.first_token(&text, TOKENS).await?;
        let before = processor_time(router)?;
        let through = routed.first_token(&text, TOKENS).await?;
        // The first ones compile, connect and fill caches.
        if number >= 10 {
            spent += processor_time(router)?.saturating_sub(before);
            direct_times.push(alone);
            routed_times.push(through);
        }
    }
    let (alone, through) = (Sorted::new(direct_times), Sorted::new(routed_times));
    println!(
        "{characters:>10} {requests:>9} {:>12} {:>12} {:>12} {:>12} {:>12}",
        shown(alone.at(0.5)),
        shown(through.at(0.5)),
        shown(through.at(0.5).saturating_sub(alone.at(0.5))),
        shown(through.at(0.99).saturating_sub(alone.at(0.99))),
        shown(spent / u32::try_from(requests)?),
    );
    Ok(())
}

async fn many_clients(fleet: &Fleet, router: u32, characters: usize) -> Result<()> {
    let address = fleet.api.address();
    let before = processor_time(router)?;
    let began = Instant::now();
    let mut clients = JoinSet::new();
    for client in 0..CLIENTS {
        clients.spawn(async move {
            let mut routed = Routed::connect(address).await?;
            let mut times = Vec::new();
            while began.elapsed() < LOADED {
                let number = client * 1_000_000 + times.len();
                let text = prompt(characters, number);
                times.push(routed.first_token(&text, TOKENS).await?);
            }
            Ok::<_, anyhow::Error>(times)
        });
    }
    let mut times = Vec::new();
    while let Some(client) = clients.join_next().await {
        times.extend(client??);
    }
    let took = began.elapsed();
    let spent = processor_time(router)?.saturating_sub(before);
    let requests = times.len();
    let sorted = Sorted::new(times);
    println!(
        "{characters:>10} {CLIENTS:>9} {:>12.0} {:>12} {:>12} {:>12}",
        requests as f64 / took.as_secs_f64(),
        shown(sorted.at(0.5)),
        shown(sorted.at(0.99)),
        shown(spent / u32::try_from(requests.max(1))?),
    );
    Ok(())
}

/// Time that the threads of a process have computed, as its scheduler knows it.
fn processor_time(process: u32) -> Result<Duration> {
    let mut nanoseconds = 0;
    for thread in std::fs::read_dir(format!("/proc/{process}/task"))? {
        // A thread may end meanwhile.
        let text = std::fs::read_to_string(thread?.path().join("schedstat")).unwrap_or_default();
        let first = text.split_whitespace().next().unwrap_or("0");
        nanoseconds += first.parse::<u64>().context("schedstat")?;
    }
    Ok(Duration::from_nanos(nanoseconds))
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
