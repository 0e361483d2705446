//! Attention over the KV as it lies in the blocks: f16, the chunk's own tokens included.
//!
//! The keys of a sequence are widened and transposed into tiles of 16 tokens, so that a vector holds
//! one dimension of several tokens; the values are cut into panels of 16 dimensions. A score is then a chain of fused
//! multiply-adds over the dimensions in order, an output a chain over the tokens in order. Which queries are computed together
//! decides only how often a key is loaded: a chain never sees another query, and a token past a query's own position
//! enters with weight zero.

use half::f16;
use half::slice::HalfFloatSliceExt;
use wide::f32x8;

use super::super::{ModelError, Shape};
use crate::kv::store::{BlockId, BlockStore};

/// Tokens of a key tile and dimensions of a value panel: two vectors.
pub const TILE: usize = 16;
/// Queries computed together: with two vectors each they leave room for keys in 16 registers.
const GROUP: usize = 4;
/// Groups that pass over keys and values together, so that these come from memory a quarter as often.
const STRIP: usize = 4;
/// Tokens of a value panel that all groups of a strip use before the next ones: 128 × 64 bytes are a quarter of a first-level cache.
const STRETCH: usize = 128;

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
    /// `[kv_head][tile][dimension][token of the tile]`.
    keys: Vec<[f32; TILE]>,
    /// `[kv_head][panel][token][dimension of the panel]`.
    values: Vec<[f32; TILE]>,
    /// Keys of one tile before they are transposed, `[token][kv_head][dimension]`.
    staged: Vec<f16>,
    groups: [Group; STRIP],
}

/// Queries whose chains run side by side.
#[derive(Clone, Debug, Default)]
struct Group {
    size: usize,
    /// Tokens that each query sees; the last one sees the most.
    visible: [usize; GROUP],
    /// Where each query lies in the rows, and its output in the outputs.
    places: [usize; GROUP],
    /// `[dimension][query]`, scaled.
    queries: Vec<[f32; GROUP]>,
    /// Scores, then weights, `[query][tile]`.
    scores: [Vec<[f32; TILE]>; GROUP],
    /// Of the weights of each query.
    totals: [f32; GROUP],
    /// Weighted values so far, `[panel][query]`.
    sums: Vec<[[f32; TILE]; GROUP]>,
}

/// Rows of one sequence that attend in one layer.
#[derive(Debug)]
pub struct Rows<'a> {
    pub blocks: &'a [BlockId],
    pub layer: usize,
    /// Position of the first row.
    pub start: usize,
    /// Rotated queries, `[row][head][dimension]`.
    pub queries: &'a [f32],
}

impl Attention {
    /// Writes `[row][head][dimension]` to `out`. The KV of the rows themselves is in the blocks already.
    pub fn attend(
        &mut self,
        kv: &BlockStore,
        layout: BlockLayout,
        rows: &Rows<'_>,
        heads: usize,
        out: &mut [f32],
    ) {
        let head_dim = layout.head_dim;
        let width = heads * head_dim;
        let sharing = heads / layout.kv_heads;
        let count = rows.queries.len() / width;
        let tokens = rows.start + count;
        self.load(kv, layout, rows, tokens);
        for kv_head in 0..layout.kv_heads {
            // (row, head) pairs that share this KV head, by row: neighbours see nearly the same tokens.
            let pairs = count * sharing;
            for first in (0..pairs).step_by(STRIP * GROUP) {
                let mut used = 0;
                for (group, first) in self.groups.iter_mut().zip((first..pairs).step_by(GROUP)) {
                    group.size = GROUP.min(pairs - first);
                    for query in 0..group.size {
                        let row = (first + query) / sharing;
                        let head = kv_head * sharing + (first + query) % sharing;
                        group.visible[query] = rows.start + row + 1;
                        group.places[query] = row * width + head * head_dim;
                    }
                    group.prepare(rows.queries, head_dim);
                    used += 1;
                }
                self.strip(used, kv_head, head_dim, tokens, out);
            }
        }
    }

    /// Widens the keys and values of tokens `0..tokens`, all heads while a block is at hand: memory delivers it as one stream.
    fn load(&mut self, kv: &BlockStore, layout: BlockLayout, rows: &Rows<'_>, tokens: usize) {
        let head_dim = layout.head_dim;
        let width = layout.token_values();
        let tiles = tokens.div_ceil(TILE);
        let panels = head_dim / TILE;
        self.keys
            .resize(layout.kv_heads * tiles * head_dim, [0.0; TILE]);
        self.values
            .resize(layout.kv_heads * panels * tokens, [0.0; TILE]);
        self.staged.resize(TILE * width, f16::ZERO);
        let mut token = 0;
        for id in rows.blocks {
            let block = kv.read(*id);
            let block: &[f16] = bytemuck::cast_slice(&block);
            let block = &block[layout.layer(rows.layer)..][..2 * layout.side()];
            let (keys, values) = block.split_at(layout.side());
            for (keys, values) in keys
                .chunks_exact(width)
                .zip(values.chunks_exact(width))
                .take(tokens - token)
            {
                let staged = token % TILE * width;
                self.staged[staged..staged + width].copy_from_slice(keys);
                // Panels of all heads follow each other.
                for (panel, part) in values.as_chunks::<TILE>().0.iter().enumerate() {
                    part.convert_to_f32_slice(&mut self.values[panel * tokens + token]);
                }
                token += 1;
                if token % TILE == 0 || token == tokens {
                    let tile = (token - 1) / TILE;
                    for head in 0..layout.kv_heads {
                        let first = (head * tiles + tile) * head_dim;
                        transpose(
                            &self.staged[head * head_dim..],
                            width,
                            &mut self.keys[first..first + head_dim],
                        );
                    }
                }
            }
            if token == tokens {
                break;
            }
        }
    }

    /// Runs the first `used` groups: all of them over one stretch of keys or values while it is in the first-level cache.
    fn strip(
        &mut self,
        used: usize,
        kv_head: usize,
        head_dim: usize,
        tokens: usize,
        out: &mut [f32],
    ) {
        let groups = &mut self.groups[..used];
        let tiles = tokens.div_ceil(TILE) * head_dim;
        let keys = &self.keys[kv_head * tiles..][..tiles];
        let panels = head_dim / TILE * tokens;
        let values = &self.values[kv_head * panels..][..panels];
        for (tile, keys) in keys.chunks_exact(head_dim).enumerate() {
            for group in groups.iter_mut() {
                if tile * TILE < group.farthest() {
                    group.score(tile, keys);
                }
            }
        }
        for group in groups.iter_mut() {
            for query in 0..group.size {
                group.totals[query] = soften(&mut group.scores[query], group.visible[query]);
            }
        }
        for (panel, values) in values.chunks_exact(tokens).enumerate() {
            for (stretch, values) in values.chunks(STRETCH).enumerate() {
                for group in groups.iter_mut() {
                    let left = group.farthest().saturating_sub(stretch * STRETCH);
                    if left > 0 {
                        let values = &values[..left.min(values.len())];
                        group.weigh(panel, stretch * STRETCH, values);
                    }
                }
            }
        }
        for group in groups.iter() {
            for query in 0..group.size {
                for (panel, sums) in group.sums.iter().enumerate() {
                    let place = group.places[query] + panel * TILE;
                    for (out, sum) in out[place..place + TILE].iter_mut().zip(sums[query]) {
                        *out = sum / group.totals[query];
                    }
                }
            }
        }
    }
}

impl Group {
    fn farthest(&self) -> usize {
        self.visible[..self.size].last().copied().unwrap_or(0)
    }

    fn prepare(&mut self, rows: &[f32], head_dim: usize) {
        let scale = 1.0 / (head_dim as f32).sqrt();
        self.queries.clear();
        self.queries.resize(head_dim, [0.0; GROUP]);
        for (query, place) in self.places.iter().take(self.size).enumerate() {
            let row = &rows[*place..*place + head_dim];
            for (queries, value) in self.queries.iter_mut().zip(row) {
                queries[query] = value * scale;
            }
        }
        let tiles = self.farthest().div_ceil(TILE);
        for scores in self.scores.iter_mut().take(self.size) {
            scores.resize(tiles, [0.0; TILE]);
        }
        self.sums.clear();
        self.sums.resize(head_dim / TILE, [[0.0; TILE]; GROUP]);
    }

    fn score(&mut self, tile: usize, keys: &[[f32; TILE]]) {
        match self.size {
            1 => self.score_of::<1>(tile, keys),
            2 => self.score_of::<2>(tile, keys),
            3 => self.score_of::<3>(tile, keys),
            _ => self.score_of::<GROUP>(tile, keys),
        }
    }

    #[inline(always)]
    fn score_of<const N: usize>(&mut self, tile: usize, keys: &[[f32; TILE]]) {
        let found = dots::<N>(keys, &self.queries);
        for (scores, found) in self.scores.iter_mut().zip(found) {
            scores[tile] = found;
        }
    }

    fn weigh(&mut self, panel: usize, first: usize, values: &[[f32; TILE]]) {
        match self.size {
            1 => self.weigh_of::<1>(panel, first, values),
            2 => self.weigh_of::<2>(panel, first, values),
            3 => self.weigh_of::<3>(panel, first, values),
            _ => self.weigh_of::<GROUP>(panel, first, values),
        }
    }

    #[inline(always)]
    fn weigh_of<const N: usize>(&mut self, panel: usize, first: usize, values: &[[f32; TILE]]) {
        let weights: [&[f32]; N] = std::array::from_fn(|query| {
            &self.scores[query].as_flattened()[first..first + values.len()]
        });
        weigh::<N>(values, weights, &mut self.sums[panel]);
    }
}

/// `[16 tokens][dimension]` to `[dimension][16 tokens]`, widened.
fn transpose(staged: &[f16], stride: usize, keys: &mut [[f32; TILE]]) {
    let head_dim = keys.len();
    for half in 0..2 {
        for first in (0..head_dim).step_by(8) {
            let square = std::array::from_fn(|token| {
                let at = (half * 8 + token) * stride + first;
                let mut row = [0.0; 8];
                staged[at..at + 8].convert_to_f32_slice(&mut row);
                f32x8::new(row)
            });
            for (dimension, column) in f32x8::transpose(square).into_iter().enumerate() {
                keys[first + dimension][half * 8..half * 8 + 8].copy_from_slice(&column.to_array());
            }
        }
    }
}

#[inline(always)]
fn load(values: &[f32]) -> f32x8 {
    let mut lanes = [0.0; 8];
    lanes.copy_from_slice(values);
    f32x8::new(lanes)
}

#[inline(always)]
fn halves(values: &[f32; TILE]) -> [f32x8; 2] {
    let (left, right) = values.split_at(TILE / 2);
    [load(left), load(right)]
}

#[inline(always)]
fn joined(halves: [f32x8; 2]) -> [f32; TILE] {
    let mut values = [0.0; TILE];
    values[..8].copy_from_slice(&halves[0].to_array());
    values[8..].copy_from_slice(&halves[1].to_array());
    values
}

/// Scores of `N` queries against one tile of keys.
#[inline(always)]
fn dots<const N: usize>(keys: &[[f32; TILE]], queries: &[[f32; GROUP]]) -> [[f32; TILE]; N] {
    let mut sums = [[f32x8::ZERO; 2]; N];
    for (keys, queries) in keys.iter().zip(queries) {
        let keys = halves(keys);
        for query in 0..N {
            let value = f32x8::splat(queries[query]);
            for half in 0..2 {
                sums[query][half] = keys[half].mul_add(value, sums[query][half]);
            }
        }
    }
    sums.map(joined)
}

/// Turns scores into weights e^(score − highest), zero past `visible`; returns their sum.
fn soften(scores: &mut [[f32; TILE]], visible: usize) -> f32 {
    scores.as_flattened_mut()[visible..].fill(f32::NEG_INFINITY);
    let mut highest = f32x8::splat(f32::NEG_INFINITY);
    for tile in scores.iter() {
        let [left, right] = halves(tile);
        highest = highest.max(left).max(right);
    }
    let highest = highest
        .to_array()
        .into_iter()
        .fold(f32::NEG_INFINITY, f32::max);
    let highest = f32x8::splat(highest);
    let mut total = f32x8::ZERO;
    for tile in scores.iter_mut() {
        let weights = halves(tile).map(|half| (half - highest).exp());
        total = total + weights[0] + weights[1];
        *tile = joined(weights);
    }
    total.reduce_add()
}

/// Adds one stretch of a panel of values, weighted for `N` queries, to their sums.
#[inline(always)]
fn weigh<const N: usize>(
    values: &[[f32; TILE]],
    weights: [&[f32]; N],
    sums: &mut [[f32; TILE]; GROUP],
) {
    let weights = weights.map(|weights| &weights[..values.len()]);
    let mut running: [[f32x8; 2]; N] = std::array::from_fn(|query| halves(&sums[query]));
    for (token, values) in values.iter().enumerate() {
        let values = halves(values);
        for query in 0..N {
            let weight = f32x8::splat(weights[query][token]);
            for half in 0..2 {
                running[query][half] = values[half].mul_add(weight, running[query][half]);
            }
        }
    }
    for (sums, running) in sums.iter_mut().zip(running) {
        *sums = joined(running);
    }
}

/// Refuses a head size that the vectors do not divide.
pub fn check_head_dim(head_dim: usize, file: &str) -> Result<(), ModelError> {
    if head_dim == 0 || !head_dim.is_multiple_of(TILE) {
        return Err(ModelError::Malformed {
            file: file.to_owned(),
            field: "llama.attention.key_length".to_owned(),
            problem: format!("head size {head_dim} is not a multiple of {TILE}"),
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests;
