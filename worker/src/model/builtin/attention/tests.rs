//! Attention against the plain formula.

use super::*;
use crate::kv::store::Geometry;

const SHAPE: Shape = Shape {
    layers: 2,
    hidden: 64,
    feed_forward: 64,
    heads: 4,
    kv_heads: 2,
    head_dim: 16,
    vocabulary: 10,
    max_context: 100,
};

fn values(count: usize, seed: u32) -> Vec<f32> {
    (0..count as u32)
        .map(|index| ((index.wrapping_mul(2_654_435_761) ^ seed) % 1000) as f32 / 500.0 - 1.0)
        .collect()
}

#[test]
fn attention_is_the_softmax_of_the_visible_tokens() {
    let (tokens, start, block_size) = (37, 20, 5);
    let geometry = Geometry {
        block_size,
        bytes_per_token: SHAPE.kv_bytes_per_token(),
    };
    let kv = BlockStore::new(geometry, 12, u64::MAX).expect("small");
    // What is past the sequence's end, or in the other layer, must not count: fill it with values that would show.
    for block in 0..12 {
        kv.write(BlockId(block)).fill(0x7b);
    }
    let blocks: Vec<BlockId> = [9, 3, 7, 1, 0, 11, 2, 5].map(BlockId).to_vec();
    let layout = BlockLayout::new(&SHAPE, &kv);
    let width = SHAPE.kv_heads * SHAPE.head_dim;
    let (k, v) = (values(tokens * width, 1), values(tokens * width, 2));
    layout.write(&kv, &blocks, 1, 0, &k[..8 * width], &v[..8 * width]);
    layout.write(&kv, &blocks, 1, 8, &k[8 * width..], &v[8 * width..]);

    let query_width = SHAPE.heads * SHAPE.head_dim;
    let queries = values((tokens - start) * query_width, 3);
    let rows = Rows {
        blocks: &blocks,
        layer: 1,
        start,
        heads: SHAPE.heads,
        queries: &queries,
    };
    let mut out = vec![0.0; queries.len()];
    Attention::default().attend(Host::best(), &kv, layout, &rows, &mut out);

    let half = |value: f32| f64::from(f16::from_f32(value).to_f32());
    for row in 0..tokens - start {
        for head in 0..SHAPE.heads {
            let query = &queries[row * query_width + head * 16..][..16];
            let at = |token: usize| token * width + head / 2 * 16;
            let scores: Vec<f64> = (0..=start + row)
                .map(|token| {
                    let dot: f64 = (0..16)
                        .map(|dimension| {
                            f64::from(query[dimension]) * half(k[at(token) + dimension])
                        })
                        .sum();
                    (dot / 4.0).exp()
                })
                .collect();
            let total: f64 = scores.iter().sum();
            for dimension in 0..16 {
                let expected: f64 = scores
                    .iter()
                    .enumerate()
                    .map(|(token, score)| score * half(v[at(token) + dimension]) / total)
                    .sum();
                let found = f64::from(out[row * query_width + head * 16 + dimension]);
                assert!(
                    (found - expected).abs() < 1e-5,
                    "row {row} head {head}: {found} for {expected}"
                );
            }
        }
    }
}
