//! Parts of attention: scores of a group of queries against a tile of keys, their softmax, and the sum of weighted values.
//!
//! A score is a chain of fused multiply-adds over the dimensions in order, an output a chain over the tokens in order. Which
//! queries are computed together decides only how often a key or a value is loaded.

use half::f16;

use crate::LANES;
use crate::exponential::exponential;
use crate::host::{Host, Task};
use crate::lanes::Lanes;

/// Most queries of a group on any instruction set.
pub const WIDEST_GROUP: usize = 12;

// For the match that gives each its own loop.
const WIDE: &[usize] = &[12, 8, 4, 3, 2, 1];
const NARROW: &[usize] = &[4, 3, 2, 1];

impl Host {
    /// Queries that are best computed together where `left` are to do: 1 to 12.
    pub fn group(self, left: usize) -> usize {
        let sizes = if self.is_wide() { WIDE } else { NARROW };
        sizes
            .iter()
            .copied()
            .find(|size| *size <= left)
            .unwrap_or(1)
    }

    /// Transposes the keys of up to sixteen tokens, `rows[token · stride ..]`, into `keys[dimension][token]`; zero for the
    /// tokens from `count` on. The number of dimensions is a multiple of sixteen.
    pub fn transpose(self, rows: &[f16], stride: usize, count: usize, keys: &mut [[f32; LANES]]) {
        self.run(Transpose {
            rows,
            stride,
            count,
            keys,
        });
    }

    /// Scores of `scores.len()` queries (`[dimension][query]`) against a tile of keys: `scores[query][token]`.
    pub fn score(self, keys: &[[f32; LANES]], queries: &[f32], scores: &mut [[f32; LANES]]) {
        self.run(Score {
            keys,
            queries,
            scores,
        });
    }

    /// Turns the scores of query `query` of `size` (`[tile][query][token]`) into weights e^(score − highest), zero from token
    /// `visible` (at least 1) on. Returns their sum.
    pub fn soften(
        self,
        scores: &mut [[f32; LANES]],
        query: usize,
        size: usize,
        visible: usize,
    ) -> f32 {
        self.run(Soften {
            scores,
            query,
            size,
            visible,
        })
    }

    /// Adds weighted values to `sums`.
    pub fn weigh(self, weighing: Weighing<'_>) {
        self.run(weighing);
    }
}

struct Transpose<'a> {
    rows: &'a [f16],
    stride: usize,
    count: usize,
    keys: &'a mut [[f32; LANES]],
}

impl Task for Transpose<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let dimensions = self.keys.len();
        // Cut once, so that the loops below have little to check.
        let mut rows = [[].as_slice(); LANES];
        for (token, row) in rows.iter_mut().enumerate().take(self.count) {
            let at = token * self.stride;
            *row = self.rows[at..at + dimensions].as_chunks::<LANES>().0;
        }
        let parts = self.keys.as_chunks_mut::<LANES>().0.iter_mut();
        for (part, keys) in parts.enumerate() {
            let mut square = [lanes.splat(0.0); LANES];
            for token in 0..LANES {
                if let Some(row) = rows[token].get(part) {
                    square[token] = lanes.widen(row);
                }
            }
            let columns = lanes.transpose(square);
            for token in 0..LANES {
                keys[token] = lanes.array(columns[token]);
            }
        }
    }
}

struct Score<'a> {
    keys: &'a [[f32; LANES]],
    queries: &'a [f32],
    scores: &'a mut [[f32; LANES]],
}

impl Task for Score<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        match self.scores.len() {
            12 => self.of::<L, 12>(lanes),
            8 => self.of::<L, 8>(lanes),
            4 => self.of::<L, 4>(lanes),
            3 => self.of::<L, 3>(lanes),
            2 => self.of::<L, 2>(lanes),
            _ => self.of::<L, 1>(lanes),
        }
    }
}

impl Score<'_> {
    #[inline(always)]
    fn of<L: Lanes, const SIZE: usize>(self, lanes: L) {
        let mut sums = [lanes.splat(0.0); SIZE];
        let (queries, _) = self.queries.as_chunks::<SIZE>();
        for (keys, queries) in self.keys.iter().zip(queries) {
            let keys = lanes.load(keys);
            for query in 0..SIZE {
                sums[query] = lanes.fused(keys, lanes.splat(queries[query]), sums[query]);
            }
        }
        for (scores, sums) in self.scores.iter_mut().zip(sums) {
            *scores = lanes.array(sums);
        }
    }
}

struct Soften<'a> {
    scores: &'a mut [[f32; LANES]],
    query: usize,
    size: usize,
    visible: usize,
}

impl Task for Soften<'_> {
    type Output = f32;

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) -> f32 {
        let (seen, unseen) = self
            .scores
            .split_at_mut(self.visible.div_ceil(LANES) * self.size);
        if let Some(last) = seen.chunks_exact_mut(self.size).last() {
            let within = (self.visible - 1) % LANES + 1;
            last[self.query][within..].fill(f32::NEG_INFINITY);
        }
        for tile in unseen.chunks_exact_mut(self.size) {
            tile[self.query] = [0.0; LANES];
        }
        let mut highest = lanes.splat(f32::NEG_INFINITY);
        for tile in seen.chunks_exact(self.size) {
            highest = lanes.highest(highest, lanes.load(&tile[self.query]));
        }
        let highest = lanes.splat(lanes.maximum(highest));
        let mut total = lanes.splat(0.0);
        for tile in seen.chunks_exact_mut(self.size) {
            let scores = lanes.load(&tile[self.query]);
            let weights = exponential(lanes, lanes.subtract(scores, highest));
            total = lanes.add(total, weights);
            tile[self.query] = lanes.array(weights);
        }
        lanes.sum(total)
    }
}

/// Values of some tokens, to be weighted for a group of queries.
#[derive(Debug)]
pub struct Weighing<'a> {
    /// Queries of the group.
    pub size: usize,
    /// Sixteenths of a head.
    pub panels: usize,
    /// `[token][panel]`.
    pub values: &'a [[f32; LANES]],
    /// `[tile][query][token]`.
    pub weights: &'a [[f32; LANES]],
    /// So far, `[panel][query]`.
    pub sums: &'a mut [[f32; LANES]],
}

impl Task for Weighing<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        match self.size {
            12 => self.of::<L, 12>(lanes),
            8 => self.of::<L, 8>(lanes),
            4 => self.of::<L, 4>(lanes),
            3 => self.of::<L, 3>(lanes),
            2 => self.of::<L, 2>(lanes),
            _ => self.of::<L, 1>(lanes),
        }
    }
}

impl Weighing<'_> {
    #[inline(always)]
    fn of<L: Lanes, const SIZE: usize>(mut self, lanes: L) {
        let mut panel = 0;
        // Two panels at a time use a weight twice.
        while L::WIDE && panel + 2 <= self.panels {
            self.part::<L, SIZE, 2>(lanes, panel);
            panel += 2;
        }
        while panel < self.panels {
            self.part::<L, SIZE, 1>(lanes, panel);
            panel += 1;
        }
    }

    #[inline(always)]
    fn part<L: Lanes, const SIZE: usize, const PANELS: usize>(&mut self, lanes: L, first: usize) {
        let sums = &mut self.sums[first * SIZE..].as_chunks_mut::<SIZE>().0[..PANELS];
        let mut running = [[lanes.splat(0.0); SIZE]; PANELS];
        for (running, sums) in running.iter_mut().zip(sums.iter()) {
            for (running, sums) in running.iter_mut().zip(sums) {
                *running = lanes.load(sums);
            }
        }
        let (weights, _) = self.weights.as_chunks::<SIZE>();
        for (values, weights) in self.values.chunks(LANES * self.panels).zip(weights) {
            for (token, values) in values.chunks_exact(self.panels).enumerate() {
                let Some(values) = values[first..].first_chunk::<PANELS>() else {
                    continue;
                };
                for query in 0..SIZE {
                    // At most 15 as it is; said so that it need not be checked.
                    let weight = lanes.splat(weights[query][token % LANES]);
                    for panel in 0..PANELS {
                        running[panel][query] =
                            lanes.fused(lanes.load(&values[panel]), weight, running[panel][query]);
                    }
                }
            }
        }
        for (running, sums) in running.into_iter().zip(sums) {
            for (running, sums) in running.into_iter().zip(sums) {
                *sums = lanes.array(running);
            }
        }
    }
}

#[cfg(test)]
mod tests;
