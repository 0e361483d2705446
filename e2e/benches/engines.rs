//! What a router adds in front of engines: Baton's beside vllm-router and sglang-router, in one run, in front of the same servers.
//!
//! The servers are a stand-in for vLLM that answers at once (`fake`): 32 tokens streamed for chats of 2,000 and 32,000 characters,
//! three quarters of which are shared with others. Routers are processes of their own and take turns, round by round; clients are
//! this process. Measured is the time to the first token less that without a router, processor time of the router's process a
//! request, requests a second, resident memory.
//!
//! Baton's rows with `tokens checked` tokenise each prompt and look its blocks up in what the servers say they hold; those without
//! do what the other routers do, which read text only. Both write decision records. The others are measured where `BATON_ENGINE_PEERS`
//! names the folder that `bench/engine-peers` has filled. `BATON_TEST_GGUF` names a model for its vocabulary; else a byte is a token.
//! `BATON_BENCH_ROUNDS` (3): how often each is measured.

#![allow(clippy::print_stdout, reason = "a bench prints its figures")]

#[path = "engines/answers.rs"]
mod answers;
#[path = "engines/client.rs"]
mod client;
#[path = "engines/events.rs"]
mod events;
#[path = "engines/fake.rs"]
mod fake;
#[path = "engines/peers.rs"]
mod peers;
#[path = "engines/prompts.rs"]
mod prompts;
#[path = "engines/report.rs"]
mod report;
#[path = "engines/stage.rs"]
mod stage;

use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use baton_e2e::process::{processor_time, resident_bytes};
use baton_e2e::stand_in::text;
use client::{Target, Window};
use peers::{PEERS, Running, Servers};
use prompts::{Draws, Prompts};
use report::{Arm, Figures};
use stage::{Fakes, Fleet};
use tokio::task::LocalSet;

/// Name of the model.
const MODEL: &str = "m";
/// Streamed for each request.
const TOKENS: usize = 32;
/// Of prompts, in characters.
const LENGTHS: [usize; 2] = [2_000, 32_000];
/// Characters, clients and how long they ask.
const CELLS: [(usize, usize, Window); 4] = [
    (LENGTHS[0], 1, window(500)),
    (LENGTHS[0], 64, window(900)),
    (LENGTHS[1], 1, window(500)),
    (LENGTHS[1], 64, window(900)),
];

const fn window(milliseconds: u64) -> Window {
    Window {
        warm: Duration::from_millis(150),
        counted: Duration::from_millis(milliseconds),
    }
}

/// A router that takes its turn.
struct Turn {
    target: Target,
    /// Whose processor time is taken.
    process: u32,
    servers: Servers,
    failed: bool,
    arm: Arm,
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().collect();
    if let [_, word, file, ..] = arguments.as_slice()
        && word == "fake"
    {
        return fake::run(Path::new(file));
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    LocalSet::new().block_on(&runtime, Box::pin(measure()))
}

async fn measure() -> Result<()> {
    let began = Instant::now();
    let folder = tempfile::tempdir()?;
    let model = folder.path().join("model");
    let gguf = std::env::var_os("BATON_TEST_GGUF").filter(|path| !path.is_empty());
    let gguf = gguf.map(PathBuf::from);
    text::write_folder(gguf.as_deref(), &model, fake::MAX_LENGTH)?;
    let fakes = Fakes::start(&model, folder.path()).await?;
    let checked = Fleet::start(&model, &fakes.checked, &folder.path().join("checked")).await?;
    let unchecked =
        Fleet::start(&model, &fakes.unchecked, &folder.path().join("unchecked")).await?;
    let others = start_others(&fakes.checked, folder.path()).await;

    let mut turns = vec![turn(
        "direct",
        false,
        false,
        fakes.id(),
        &fakes.checked,
        Target {
            addresses: fakes
                .checked
                .decode
                .iter()
                .map(|server| server.http)
                .collect(),
            headers: Vec::new(),
        },
    )];
    for (name, split, fleet, servers) in [
        ("Baton, tokens checked", false, &checked, &fakes.checked),
        (
            "Baton, tokens not checked",
            false,
            &unchecked,
            &fakes.unchecked,
        ),
        ("Baton P/D, tokens checked", true, &checked, &fakes.checked),
        (
            "Baton P/D, tokens not checked",
            true,
            &unchecked,
            &fakes.unchecked,
        ),
    ] {
        turns.push(turn(
            name,
            split,
            true,
            fleet.id(),
            servers,
            fleet.target(split),
        ));
    }
    for (name, split, running) in &others {
        let target = running.target.clone();
        turns.push(turn(
            name,
            *split,
            false,
            running.id(),
            &fakes.checked,
            target,
        ));
    }
    let vocabulary = gguf.as_deref().and_then(Path::file_stem);
    println!(
        "vocabulary: {}; {} processors; load as it begins: {}",
        vocabulary.unwrap_or("bytes".as_ref()).display(),
        std::thread::available_parallelism()?,
        load()
    );
    credits(&checked, &unchecked).await?;
    let rounds = std::env::var("BATON_BENCH_ROUNDS").map_or(Ok(3), |count| count.parse::<u64>())?;
    for round in 0..rounds {
        round_of(&mut turns, round).await?;
    }
    let arms: Vec<Arm> = turns.into_iter().map(|turn| turn.arm).collect();
    for (cell, (characters, clients, window)) in CELLS.into_iter().enumerate() {
        println!(
            "\n{characters} characters, clients: {clients}, {rounds} rounds of {} ms: median [least-most]",
            window.counted.as_millis()
        );
        report::cell(&arms, cell);
        println!("\nthe same, ratios within a round");
        report::ratios(&arms, cell);
    }
    println!(
        "\nload at the end: {}; all of it took {} s",
        load(),
        began.elapsed().as_secs()
    );
    Ok(())
}

fn turn(
    name: &str,
    split: bool,
    of_baton: bool,
    process: u32,
    servers: &Servers,
    target: Target,
) -> Turn {
    Turn {
        target,
        process,
        servers: servers.clone(),
        failed: false,
        arm: Arm {
            name: name.to_owned(),
            split,
            of_baton,
            cells: vec![Vec::new(); CELLS.len()],
        },
    }
}

/// Those that run; why others do not is printed.
async fn start_others(servers: &Servers, folder: &Path) -> Vec<(&'static str, bool, Running)> {
    let Some(installed) = peers::installed() else {
        println!(
            "without vllm-router and sglang-router: BATON_ENGINE_PEERS names no folder that bench/engine-peers has filled"
        );
        return Vec::new();
    };
    let mut running = Vec::new();
    for peer in PEERS {
        match peer.start(&installed, servers, folder).await {
            Ok(started) => running.push((peer.name, peer.split, started)),
            Err(error) => println!("without {}: {error:#}", peer.name),
        }
    }
    running
}

/// Baton's rows are what they are called: records say so.
async fn credits(checked: &Fleet, unchecked: &Fleet) -> Result<()> {
    for (fleet, expected) in [(checked, "Tokens"), (unchecked, "TextUnverified")] {
        for characters in LENGTHS {
            let prompt = Prompts::new(characters).draw(&mut Draws::new(99));
            let record = fleet.record(false, &prompt).await?;
            let credit = &record.0["input"]["credit"];
            ensure!(
                credit == expected,
                "the record says credit {credit}, not {expected}"
            );
            let cached = &record.chosen()?["cachedTokens"];
            println!(
                "{characters} characters, credit {expected}: {} tokens, of which a decode worker holds {}",
                record.0["input"]["tokens"], cached["decode"]
            );
            let holds = cached["decode"].as_u64().unwrap_or(0) > 0;
            ensure!(
                holds == (expected == "Tokens"),
                "credit {expected}, and the chosen worker holds {cached}"
            );
        }
    }
    Ok(())
}

/// Each cell of each router once, routers in turn.
async fn round_of(turns: &mut [Turn], round: u64) -> Result<()> {
    for (cell, (characters, clients, window)) in CELLS.into_iter().enumerate() {
        let prompts = Rc::new(Prompts::new(characters));
        for (place, turn) in turns.iter_mut().enumerate() {
            if turn.failed {
                continue;
            }
            let seed = (round * 8 + cell as u64) * 64 + place as u64;
            match one(turn, &prompts, clients, seed, window).await {
                Ok(figures) => turn.arm.cells[cell].push(figures),
                Err(error) if turn.arm.of_baton || place == 0 => {
                    return Err(error.context(turn.arm.name.clone()));
                }
                Err(error) => {
                    println!(
                        "{} has failed and is left out from here on: {error:#}",
                        turn.arm.name
                    );
                    turn.failed = true;
                }
            }
        }
    }
    Ok(())
}

async fn one(
    turn: &Turn,
    prompts: &Rc<Prompts>,
    clients: usize,
    seed: u64,
    window: Window,
) -> Result<Figures> {
    let before = stage::counts(&turn.servers).await?;
    client::once(&turn.target, &prompts.draw(&mut Draws::new(seed + 1))).await?;
    let mut edges = Vec::new();
    let seen = client::ask(&turn.target, prompts, clients, seed, window, || {
        edges.push(processor_time(turn.process)?);
        Ok(())
    })
    .await?;
    stage::check_legs(turn.arm.split, before, stage::counts(&turn.servers).await?)?;
    let [first, last] = edges.as_slice() else {
        anyhow::bail!("the window has not two edges");
    };
    let resident = resident_bytes(turn.process)? as f64 / f64::from(1 << 20);
    ensure!(
        !seen.first_tokens.is_empty(),
        "no request ended within {:?}",
        window.counted
    );
    Ok(Figures::new(
        seen.first_tokens,
        window.counted,
        last.saturating_sub(*first),
        resident,
    ))
}

/// Processes that ran or waited for a processor, on average of the last minute.
fn load() -> String {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ').next().unwrap_or("unknown").to_owned()
}
