//! Speed of a hand-off between two threads of this machine: claim, transfer, checksum of every block, report; over shared memory
//! and over loopback TCP, against memcpy of the same blocks and against one stream of `iperf3`. All in one run, in turn.
//!
//! `cargo bench -p baton-worker --bench transfer`. The source's thread writes every block anew before each transfer, so that it lies in
//! that core's cache or beyond, as after a prefill. The lease protocol is called directly: a worker adds two gRPC calls.
#![allow(clippy::print_stdout)]

mod iperf;
mod pair;
mod series;

use std::sync::Arc;

use baton_worker::kv::Geometry;
use baton_worker::transport::Transport;

use self::pair::{Pair, Way};
use self::series::Series;

const MIB: usize = 1 << 20;
/// Tokens of a block.
const BLOCK_SIZE: usize = 16;
/// Bytes of keys and values of one token of SmolLM2-135M, and of a very small model.
const MODELS: [(&str, usize); 2] = [("SmolLM2-135M", 23_040), ("tiny", 256)];

struct Case {
    megabytes: usize,
    rounds: usize,
}

const CASES: [Case; 3] = [
    Case {
        megabytes: 1,
        rounds: 300,
    },
    Case {
        megabytes: 16,
        rounds: 50,
    },
    Case {
        megabytes: 64,
        rounds: 20,
    },
];

fn main() -> anyhow::Result<()> {
    // `cargo test --benches` runs this as well: it is no test.
    if !std::env::args().any(|argument| argument == "--bench") {
        return Ok(());
    }
    let stream = iperf::one_stream();
    match &stream {
        Ok(rates) => println!("iperf3, one stream: {rates} GB/s"),
        Err(reason) => println!("iperf3, one stream: skipped, {reason}"),
    }
    let stream = stream.ok();
    println!("all in GB/s: least / median / most; ratios of medians");
    for (model, bytes_per_token) in MODELS {
        let geometry = Geometry {
            block_size: BLOCK_SIZE,
            bytes_per_token,
        };
        println!("{model}: blocks of {} bytes", geometry.block_bytes());
        for case in &CASES {
            let blocks = (case.megabytes * MIB).div_ceil(geometry.block_bytes());
            let mut pair = Pair::new(geometry, blocks)?;
            measure(&mut pair, case, stream.as_ref())?;
            pair.end()?;
        }
        let mut pair = Pair::new(geometry, 1)?;
        alone(&mut pair)?;
        pair.end()?;
    }
    Ok(())
}

fn measure(pair: &mut Pair, case: &Case, stream: Option<&Series>) -> anyhow::Result<()> {
    let [mut copy, mut shm, mut tcp, mut raw_shm, mut raw_tcp] =
        std::array::from_fn(|_| Series::default());
    let bytes = pair.bytes() as f64;
    // The first ones touch pages, make connections and map.
    for round in 0..case.rounds + 3 {
        let seconds = [
            pair.copied()?,
            pair.taken(Way::Shm)?,
            pair.fetched(Way::Shm)?,
            pair.taken(Way::Tcp)?,
            pair.fetched(Way::Tcp)?,
        ];
        if round < 3 {
            continue;
        }
        let all = [&mut copy, &mut shm, &mut raw_shm, &mut tcp, &mut raw_tcp];
        for (series, seconds) in all.into_iter().zip(seconds) {
            series.push(bytes / seconds / 1e9);
        }
    }
    let megabytes = case.megabytes;
    println!("  {megabytes:>2} MiB  memcpy           {copy}");
    println!(
        "          Shm hand-off     {shm}  {:.2} of memcpy (bar 0.7), {:.2} of its bare transfer",
        shm.median() / copy.median(),
        shm.median() / raw_shm.median()
    );
    println!("          Shm bare         {raw_shm}");
    let of_stream = stream.map_or_else(
        || "no iperf3".to_owned(),
        |stream| format!("{:.2} of iperf3 (bar 0.8)", tcp.median() / stream.median()),
    );
    println!(
        "          Tcp hand-off     {tcp}  {of_stream}, {:.2} of its bare transfer",
        tcp.median() / raw_tcp.median()
    );
    println!("          Tcp bare         {raw_tcp}");
    Ok(())
}

/// One block: what a hand-off costs beside its bytes.
fn alone(pair: &mut Pair) -> anyhow::Result<()> {
    for way in [Way::Shm, Way::Tcp] {
        let mut series = Series::default();
        for round in 0..303 {
            let seconds = pair.taken(way)?;
            if round >= 3 {
                series.push(seconds * 1e6);
            }
        }
        println!("  one block, {way:?}: {series} µs");
    }
    Ok(())
}

/// Those of both sides.
struct Transports {
    shm: Arc<dyn Transport>,
    tcp: Arc<dyn Transport>,
}
