//! Speed of the Builtin engine on one thread, in one run with what it is compared to: llama.cpp and this core's memory.
//!
//! `BATON_TEST_GGUF=FILE LLAMA_BENCH=PATH cargo bench -p baton-worker --bench builtin`. Without a file, the tiny model; without
//! `llama-bench` (or one on the PATH), no comparison with it, which is said. `BATON_BENCH_ROUNDS` (3): every subject is measured once a round, in turn, so that
//! what else the machine does meets all of them alike.
#![allow(clippy::print_stdout)]

mod engine;
mod figures;
mod memory;
mod peer;

use std::path::PathBuf;

use anyhow::{Context, Result};
use baton_kernels::Host;

use engine::Engine;
use figures::Table;
use peer::Peer;

/// What is measured of everything that computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Case {
    /// Of so many tokens.
    Prefill(usize),
    /// Of one sequence, after so many tokens.
    Decode(usize),
}

pub(crate) const PREFILL: [usize; 3] = [128, 512, 2048];
pub(crate) const DECODE: [usize; 3] = [64, 512, 2048];
/// Tokens decoded for a figure.
pub(crate) const DECODED: usize = 24;

fn main() -> Result<()> {
    // `cargo test --benches` runs this too: only a bench measures.
    if !std::env::args().any(|argument| argument == "--bench") {
        return Ok(());
    }
    let rounds: usize = match std::env::var("BATON_BENCH_ROUNDS") {
        Ok(rounds) => rounds
            .parse()
            .context("BATON_BENCH_ROUNDS: must be a whole number")?,
        Err(_) => 3,
    };
    let named = std::env::var_os("BATON_TEST_GGUF").filter(|file| !file.is_empty());
    let Some(file) = named.map(PathBuf::from) else {
        println!("BATON_TEST_GGUF names no file: the tiny model, without comparison");
        let mut table = Table::default();
        Engine::tiny(Host::best())?.measure("tiny", &mut table)?;
        table.print();
        return Ok(());
    };
    let peer = Peer::find();
    let folder = tempfile::tempdir()?;
    let bytes = match &peer {
        Ok(peer) => peer.requantise(&file, folder.path()),
        Err(missing) => Err(anyhow::anyhow!("{missing}")),
    };
    if let Err(missing) = &peer {
        println!("llama.cpp: not compared: {missing}");
    } else if let Err(problem) = &bytes {
        println!("llama.cpp: no Q8_0 file, only the one as shipped is compared: {problem:#}");
    }

    let mut files = vec![("as shipped", file)];
    files.extend(bytes.ok().map(|file| ("Q8_0", file)));
    let mut table = Table::default();
    let mut bandwidths = memory::Bandwidth::new();
    let mut weights = Vec::new();
    for round in 0..rounds {
        println!("round {} of {rounds}", round + 1);
        for (form, file) in &files {
            bandwidths.measure();
            let hosts = Host::all();
            for host in hosts.iter().rev() {
                // The slower paths once: they are no bar.
                if *host != Host::best() && round > 0 {
                    continue;
                }
                let mut engine = Engine::load(file, *host)?;
                let subject = format!("builtin {form} {}", host.name());
                engine.measure(&subject, &mut table)?;
                if round == 0 && *host == Host::best() {
                    println!("{subject}: loaded in {:.2} s", engine.load_seconds());
                    engine.batches()?;
                    weights.push((*form, subject, engine.weight_bytes()));
                }
            }
            if let Ok(peer) = &peer {
                peer.measure(file, &format!("llama.cpp {form}"), &mut table)?;
            }
        }
    }
    table.print();
    for (form, subject, bytes) in &weights {
        table.compare(subject, &format!("llama.cpp {form}"));
        if *form != "Q8_0" {
            table.compare(subject, "llama.cpp Q8_0");
        }
        bandwidths.compare(subject, *bytes, &table);
    }
    Ok(())
}
