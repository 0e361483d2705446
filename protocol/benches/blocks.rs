//! What proving and finding a block costs: checksum against memcpy of the same bytes, block hashes per block.
//!
//! `cargo bench -p baton-protocol`. Prints the best of several rounds, and ratios: this machine's noise cancels in them.
#![allow(clippy::print_stdout)]

use std::hint::black_box;
use std::time::Instant;

use baton_protocol::checksum::checksum;
use baton_protocol::hash::{BlockHasher, HashKey};

/// Seconds of the fastest of `rounds` rounds.
fn best(rounds: u32, mut work: impl FnMut()) -> f64 {
    (0..rounds)
        .map(|_| {
            let start = Instant::now();
            work();
            start.elapsed().as_secs_f64()
        })
        .fold(f64::INFINITY, f64::min)
}

fn main() {
    for kibibytes in [64, 360, 4096] {
        let source: Vec<u8> = (0..kibibytes * 1024)
            .map(|byte| (byte % 251) as u8)
            .collect();
        let mut target = vec![0u8; source.len()];
        let repeat = (64 * 1024 / kibibytes).max(1);
        let bytes = (source.len() * repeat) as f64;
        let copied = best(5, || {
            for _ in 0..repeat {
                black_box(&mut target).copy_from_slice(black_box(&source));
            }
        });
        let summed = best(5, || {
            for _ in 0..repeat {
                black_box(checksum(black_box(&source)));
            }
        });
        println!(
            "checksum {kibibytes} KiB: {:.1} GB/s, memcpy {:.1} GB/s, ratio {:.2}",
            bytes / summed / 1e9,
            bytes / copied / 1e9,
            copied / summed
        );
    }

    let hasher = BlockHasher::new(&HashKey::from_bytes(&[7; 32]), "identity", "");
    let tokens: Vec<u32> = (0..16 * 4096).collect();
    let hashed = best(5, || {
        black_box(hasher.chain(black_box(&tokens), 16));
    });
    println!(
        "block hash, 16 tokens: {:.1} ns a block",
        hashed / 4096.0 * 1e9
    );
}
