//! What one thread reads from memory in a second: the bound of decode, which reads all weights for each token.

use std::hint::black_box;
use std::time::Instant;

use super::Case;
use super::figures::{Series, Table};

/// Beyond every cache, a shared last level of hundreds of megabytes too.
const BYTES: usize = 1 << 30;
/// Sums side by side, so that additions never wait for one another.
const LANES: usize = 32;

pub(crate) struct Bandwidth {
    buffer: Vec<u64>,
    gigabytes_per_second: Series,
}

impl Bandwidth {
    pub(crate) fn new() -> Self {
        Self {
            // Not zero: untouched zero pages are all one page.
            buffer: vec![1; BYTES / size_of::<u64>()],
            gigabytes_per_second: Series::default(),
        }
    }

    pub(crate) fn measure(&mut self) {
        let start = Instant::now();
        let mut sums = [0_u64; LANES];
        for values in self.buffer.as_chunks::<LANES>().0 {
            for (sum, value) in sums.iter_mut().zip(values) {
                *sum = sum.wrapping_add(*value);
            }
        }
        black_box(sums);
        self.gigabytes_per_second
            .push(BYTES as f64 / start.elapsed().as_secs_f64() / 1e9);
    }

    /// Prints how near decode is to reading its weights as fast as the memory gives them.
    pub(crate) fn compare(&self, subject: &str, weights: usize, table: &Table) {
        let series = &self.gigabytes_per_second;
        println!(
            "memory: one thread reads {:.1} / {:.1} / {:.1} GB/s; {subject} reads {:.1} MB of weights a token",
            series.least(),
            series.median(),
            series.most(),
            weights as f64 / 1e6
        );
        let bound = |gigabytes: f64| gigabytes * 1e9 / weights as f64;
        let ratios: Vec<String> = table
            .of(subject)
            .filter(|(case, _)| matches!(case, Case::Decode(_)))
            .map(|(case, figures)| {
                format!(
                    "{} {:.2} (of the best {:.2})",
                    case.name(),
                    figures.median() / bound(series.median()),
                    figures.most() / bound(series.most())
                )
            })
            .collect();
        println!(
            "{subject} / memory's {:.0} tokens/s: {}",
            bound(series.median()),
            ratios.join(", ")
        );
    }
}
