//! Speed of the Builtin engine's arithmetic on one thread: loading, prefill and decode in tokens per second.
//!
//! `BATON_TEST_GGUF=FILE cargo bench -p baton-worker --bench builtin`; without a file, the tiny model. Anchors: reference numbers of
//! llama.cpp for the embedded model are 230 tokens/s prefill and 71 decode at 8 bits on one core.
#![allow(clippy::print_stdout)]

use std::path::PathBuf;
use std::time::Instant;

use baton_worker::kv::store::{BlockId, BlockStore, Geometry};
use baton_worker::model::{Batch, Model, SequenceKey, SequenceSlice, builtin, tiny};

const BLOCK_SIZE: usize = 16;

fn main() -> anyhow::Result<()> {
    let start = Instant::now();
    let mut model = match std::env::var_os("BATON_TEST_GGUF") {
        Some(file) => builtin::load(&PathBuf::from(file))?,
        None => tiny::model(1),
    };
    println!("load: {:.2} s", start.elapsed().as_secs_f64());
    let shape = model.facts().shape;
    let geometry = Geometry {
        block_size: BLOCK_SIZE,
        bytes_per_token: shape.kv_bytes_per_token(),
    };
    let longest = 4096_usize.min(shape.max_context);
    let per_sequence = longest.div_ceil(BLOCK_SIZE) + 4;
    let kv = BlockStore::new(geometry, 8 * per_sequence, u64::MAX)?;
    let tables: Vec<Vec<BlockId>> = (0..8)
        .map(|sequence| {
            (sequence * per_sequence..(sequence + 1) * per_sequence)
                .map(|block| BlockId(block as u32))
                .collect()
        })
        .collect();
    let tokens: Vec<u32> = (0..longest + 64)
        .map(|index| (index * 7919 % (shape.vocabulary - 20)) as u32 + 17)
        .collect();
    let mut step = |ranges: &[(usize, usize)]| -> anyhow::Result<f64> {
        let slices = ranges
            .iter()
            .zip(&tables)
            .map(|((start, end), blocks)| SequenceSlice {
                sequence: SequenceKey(0),
                history: &tokens[..*end],
                start: *start,
                blocks,
                wants_output: true,
            })
            .collect();
        let start = Instant::now();
        model.forward(&Batch { slices }, &kv)?;
        Ok(start.elapsed().as_secs_f64())
    };

    step(&[(0, 64)])?;
    for length in [16, 128, 512, 2048] {
        let seconds = step(&[(0, length)])?;
        println!(
            "prefill {length}: {:.0} tokens/s ({:.1} ms)",
            length as f64 / seconds,
            seconds * 1e3
        );
    }
    let seconds = step(&[(longest - 512, longest)])?;
    println!(
        "prefill 512 after {}: {:.0} tokens/s",
        longest - 512,
        512.0 / seconds
    );

    for context in [64, 512, 2048] {
        for sequences in [1, 2, 4, 8] {
            let mut best = f64::INFINITY;
            for offset in 0..12 {
                let ranges = vec![(context + offset, context + offset + 1); sequences];
                best = best.min(step(&ranges)?);
            }
            println!(
                "decode {sequences} at {context}: {:.1} tokens/s ({:.2} ms a step)",
                sequences as f64 / best,
                best * 1e3
            );
        }
    }
    Ok(())
}
