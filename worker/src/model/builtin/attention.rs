//! Attention over the KV as it lies in the blocks: f16, the chunk's own tokens included.
//!
//! Keys are widened and transposed a tile of sixteen tokens at a time, so that a vector holds one dimension of several tokens; values
//! a stretch of tokens at a time. All queries of a strip use what was widened before the next tokens are read. A token past
//! a query's own position enters with weight zero, and a query's numbers never meet another query's.

use std::ops::Range;

use baton_kernels::{Host, LANES, WIDEST_GROUP, Weighing};
use half::f16;
use half::slice::HalfFloatSliceExt;

use super::super::{ModelError, Shape};
use crate::kv::store::{BlockId, BlockStore};

/// Bytes of scores that the queries of a strip may have: they are written, softened and read again, so they and the keys and values of
/// a head (512 KiB for 2,048 tokens of 64 dimensions) should stay in a second-level cache of 2 MiB.
const SCORES: usize = 768 << 10;
/// Tokens whose values are widened at once, a multiple of a tile: 64 × 64 × 4 bytes are a third of a first-level cache.
const STRETCH: usize = 64;

/// Where things lie in a block, in f16 values: `[layer][K,V][token][kv_head][head_dim]`.
#[derive(Clone, Copy, Debug)]
pub struct BlockLayout {
    pub block_size: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
}

impl BlockLayout {
    pub fn new(shape: &Shape, kv: &BlockStore) -> Self {
        Self {
            block_size: kv.geometry().block_size,
            kv_heads: shape.kv_heads,
            head_dim: shape.head_dim,
        }
    }

    fn token_values(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// First value of the keys of a layer; the values of V follow after [`Self::side`].
    fn layer(&self, layer: usize) -> usize {
        layer * 2 * self.side()
    }

    fn side(&self) -> usize {
        self.block_size * self.token_values()
    }

    /// Rounds rows of keys and values to f16 and writes them for the tokens from `start` on.
    pub fn write(
        &self,
        kv: &BlockStore,
        blocks: &[BlockId],
        layer: usize,
        start: usize,
        keys: &[f32],
        values: &[f32],
    ) {
        let width = self.token_values();
        let mut token = start;
        let mut done = 0;
        let total = keys.len() / width;
        while done < total {
            let within = token % self.block_size;
            let count = (self.block_size - within).min(total - done);
            let mut block = kv.write(blocks[token / self.block_size]);
            let block: &mut [f16] = bytemuck::cast_slice_mut(&mut block);
            let source = done * width..(done + count) * width;
            for (offset, rows) in [(0, keys), (self.side(), values)] {
                let at = self.layer(layer) + offset + within * width;
                block[at..at + count * width].convert_from_f32_slice(&rows[source.clone()]);
            }
            token += count;
            done += count;
        }
    }
}

/// Buffers of the attention of one sequence in one layer, reused.
#[derive(Clone, Debug, Default)]
pub struct Attention {
    /// A tile of keys of one head, `[dimension][token]`.
    keys: Vec<[f32; LANES]>,
    /// A stretch of values of one head, `[token][panel of dimensions]`.
    values: Vec<[f32; LANES]>,
    /// Rows of a tile that lies in several blocks.
    staged: Vec<f16>,
    /// Those of the strip, as many for each of its KV heads.
    groups: Vec<Group>,
}

/// Queries whose chains run side by side.
#[derive(Clone, Debug, Default)]
struct Group {
    size: usize,
    /// Tokens that each query sees; the last one sees the most.
    visible: [usize; WIDEST_GROUP],
    /// Where each query lies in the rows, and its output in the outputs.
    places: [usize; WIDEST_GROUP],
    /// `[dimension][query]`, scaled.
    queries: Vec<f32>,
    /// Scores, then weights, `[tile][query][token]`.
    scores: Vec<[f32; LANES]>,
    /// Of the weights of each query.
    totals: [f32; WIDEST_GROUP],
    /// Weighted values so far, `[panel][query]`.
    sums: Vec<[f32; LANES]>,
}

/// Rows of one sequence that attend in one layer.
#[derive(Debug)]
pub struct Rows<'a> {
    pub blocks: &'a [BlockId],
    pub layer: usize,
    /// Position of the first row.
    pub start: usize,
    pub heads: usize,
    /// Rotated queries, `[row][head][dimension]`.
    pub queries: &'a [f32],
}

/// Where the keys and values of a sequence are.
struct Source<'a> {
    kv: &'a BlockStore,
    layout: BlockLayout,
    rows: &'a Rows<'a>,
}

/// The queries that pass over keys and values together.
struct Strip {
    kv_heads: Range<usize>,
    /// (row, head) pairs that share a KV head, by row: neighbours see nearly the same tokens.
    pairs: Range<usize>,
}

impl Attention {
    /// Writes `[row][head][dimension]` to `out`. The KV of the rows themselves is in the blocks already.
    pub fn attend(
        &mut self,
        host: Host,
        kv: &BlockStore,
        layout: BlockLayout,
        rows: &Rows<'_>,
        out: &mut [f32],
    ) {
        let source = Source { kv, layout, rows };
        let count = rows.queries.len() / (rows.heads * layout.head_dim);
        let pairs = count * source.sharing();
        let tokens = (rows.start + count).next_multiple_of(LANES);
        let together = SCORES / size_of::<f32>() / tokens;
        if pairs * layout.kv_heads <= together {
            // Few queries: keys and values are read from memory once, in the order in which they lie.
            let strip = Strip {
                kv_heads: 0..layout.kv_heads,
                pairs: 0..pairs,
            };
            self.strip(host, &source, &strip, out);
            return;
        }
        let together = (together / WIDEST_GROUP).max(1) * WIDEST_GROUP;
        for kv_head in 0..layout.kv_heads {
            for first in (0..pairs).step_by(together) {
                let strip = Strip {
                    kv_heads: kv_head..kv_head + 1,
                    pairs: first..pairs.min(first + together),
                };
                self.strip(host, &source, &strip, out);
            }
        }
    }

    fn strip(&mut self, host: Host, source: &Source<'_>, strip: &Strip, out: &mut [f32]) {
        let head_dim = source.layout.head_dim;
        let panels = head_dim / LANES;
        let width = source.layout.token_values();
        let each = self.gather(host, source, strip);
        let groups = &mut self.groups[..each * strip.kv_heads.len()];
        let farthest = groups.iter().map(Group::farthest).max().unwrap_or(0);

        self.keys.resize(head_dim, [0.0; LANES]);
        for first in (0..farthest).step_by(LANES) {
            let tokens = first..farthest.min(first + LANES);
            let count = tokens.len();
            source.read(&mut self.staged, Side::Keys, tokens, |rows| {
                let heads = strip.kv_heads.clone().zip(groups.chunks_mut(each));
                for (kv_head, groups) in heads {
                    let rows = &rows[kv_head * head_dim..];
                    host.transpose(rows, width, count, &mut self.keys);
                    for group in groups.iter_mut().filter(|group| first < group.farthest()) {
                        let at = first / LANES * group.size;
                        let scores = &mut group.scores[at..at + group.size];
                        host.score(&self.keys, &group.queries, scores);
                    }
                }
            });
        }
        for group in groups.iter_mut() {
            let size = group.size;
            for query in 0..size {
                let visible = group.visible[query];
                group.totals[query] = host.soften(&mut group.scores, query, size, visible);
            }
        }
        self.values.resize(STRETCH * panels, [0.0; LANES]);
        for first in (0..farthest).step_by(STRETCH) {
            let end = farthest.min(first + STRETCH);
            for (kv_head, groups) in strip.kv_heads.clone().zip(groups.chunks_mut(each)) {
                source.values(&mut self.staged, kv_head, first..end, &mut self.values);
                for group in groups.iter_mut().filter(|group| first < group.farthest()) {
                    let count = end.min(group.farthest()) - first;
                    host.weigh(Weighing {
                        size: group.size,
                        panels,
                        values: &self.values[..count * panels],
                        weights: &group.scores[first / LANES * group.size..],
                        sums: &mut group.sums,
                    });
                }
            }
        }
        for group in groups.iter() {
            for query in 0..group.size {
                let place = group.places[query];
                let (outputs, _) = out[place..place + head_dim].as_chunks_mut::<LANES>();
                let sums = group.sums.iter().skip(query).step_by(group.size);
                for (out, sums) in outputs.iter_mut().zip(sums) {
                    *out = sums.map(|sum| sum / group.totals[query]);
                }
            }
        }
    }

    /// Cuts the strip into groups and makes them ready; returns how many each KV head has.
    fn gather(&mut self, host: Host, source: &Source<'_>, strip: &Strip) -> usize {
        let Source { layout, rows, .. } = source;
        let head_dim = layout.head_dim;
        let sharing = source.sharing();
        let mut used = 0;
        for kv_head in strip.kv_heads.clone() {
            let mut first = strip.pairs.start;
            while first < strip.pairs.end {
                if used == self.groups.len() {
                    self.groups.push(Group::default());
                }
                let group = &mut self.groups[used];
                group.size = host.group(strip.pairs.end - first);
                for query in 0..group.size {
                    let row = (first + query) / sharing;
                    let head = kv_head * sharing + (first + query) % sharing;
                    group.visible[query] = rows.start + row + 1;
                    group.places[query] = (row * rows.heads + head) * head_dim;
                }
                group.prepare(rows.queries, head_dim);
                first += group.size;
                used += 1;
            }
        }
        used / strip.kv_heads.len()
    }
}

impl Group {
    fn farthest(&self) -> usize {
        self.visible[self.size - 1]
    }

    fn prepare(&mut self, rows: &[f32], head_dim: usize) {
        let scale = 1.0 / (head_dim as f32).sqrt();
        self.queries.resize(head_dim * self.size, 0.0);
        for query in 0..self.size {
            let row = &rows[self.places[query]..][..head_dim];
            let places = self.queries.iter_mut().skip(query).step_by(self.size);
            for (place, value) in places.zip(row) {
                *place = value * scale;
            }
        }
        let tiles = self.farthest().div_ceil(LANES);
        self.scores.resize(tiles * self.size, [0.0; LANES]);
        self.sums.clear();
        self.sums.resize(head_dim / LANES * self.size, [0.0; LANES]);
    }
}

#[derive(Clone, Copy)]
enum Side {
    Keys,
    Values,
}

impl Source<'_> {
    fn sharing(&self) -> usize {
        self.rows.heads / self.layout.kv_heads
    }

    /// Hands over the rows of some tokens, `[token][kv_head][dimension]`: as they lie where one block has them all.
    fn read(
        &self,
        staged: &mut Vec<f16>,
        side: Side,
        tokens: Range<usize>,
        mut with: impl FnMut(&[f16]),
    ) {
        let layout = self.layout;
        let width = layout.token_values();
        let offset = layout.layer(self.rows.layer)
            + match side {
                Side::Keys => 0,
                Side::Values => layout.side(),
            };
        let within = tokens.start % layout.block_size;
        if within + tokens.len() <= layout.block_size {
            let block = self
                .kv
                .read(self.rows.blocks[tokens.start / layout.block_size]);
            let block: &[f16] = bytemuck::cast_slice(&block);
            with(&block[offset + within * width..][..tokens.len() * width]);
            return;
        }
        staged.resize(tokens.len() * width, f16::ZERO);
        for (token, staged) in tokens.zip(staged.chunks_exact_mut(width)) {
            let block = self.kv.read(self.rows.blocks[token / layout.block_size]);
            let block: &[f16] = bytemuck::cast_slice(&block);
            let within = token % layout.block_size;
            staged.copy_from_slice(&block[offset + within * width..][..width]);
        }
        with(staged);
    }

    /// Widens the values of one head for a stretch of tokens.
    fn values(
        &self,
        staged: &mut Vec<f16>,
        kv_head: usize,
        tokens: Range<usize>,
        values: &mut [[f32; LANES]],
    ) {
        let head_dim = self.layout.head_dim;
        let width = self.layout.token_values();
        let mut wide = values.as_flattened_mut().chunks_exact_mut(head_dim);
        for first in tokens.clone().step_by(LANES) {
            let tile = first..tokens.end.min(first + LANES);
            self.read(staged, Side::Values, tile, |rows| {
                for (row, wide) in rows.chunks_exact(width).zip(wide.by_ref()) {
                    row[kv_head * head_dim..][..head_dim].convert_to_f32_slice(wide);
                }
            });
        }
    }
}

/// Refuses a head size that the vectors do not divide.
pub fn check_head_dim(head_dim: usize, file: &str) -> Result<(), ModelError> {
    if head_dim == 0 || !head_dim.is_multiple_of(LANES) {
        return Err(ModelError::Malformed {
            file: file.to_owned(),
            field: "llama.attention.key_length".to_owned(),
            problem: format!("head size {head_dim} is not a multiple of {LANES}"),
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests;
