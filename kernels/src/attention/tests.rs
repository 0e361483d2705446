//! Scores, softmax and weighted values: right, and the same bits on every instruction set and in every group.

use super::*;

fn values(count: usize, seed: u32) -> Vec<f32> {
    (0..count as u32)
        .map(|index| {
            let mixed = (index ^ seed.rotate_left(16)).wrapping_mul(2_654_435_761);
            (mixed >> 8) as f32 / (1 << 23) as f32 - 1.0
        })
        .collect()
}

fn tiles(count: usize, seed: u32) -> Vec<[f32; LANES]> {
    values(count * LANES, seed).as_chunks().0.to_vec()
}

#[test]
fn keys_are_transposed_and_missing_tokens_are_zero() {
    let (dimensions, stride) = (48, 64);
    let rows: Vec<f16> = values(LANES * stride, 1)
        .into_iter()
        .map(f16::from_f32)
        .collect();
    for host in Host::all() {
        for count in [1, 5, 16] {
            let mut keys = vec![[7.0; LANES]; dimensions];
            host.transpose(
                &rows[..(count - 1) * stride + dimensions],
                stride,
                count,
                &mut keys,
            );
            for (dimension, keys) in keys.iter().enumerate() {
                for (token, key) in keys.iter().enumerate() {
                    let expected = if token < count {
                        rows[token * stride + dimension].to_f32()
                    } else {
                        0.0
                    };
                    assert_eq!(*key, expected, "dimension {dimension} of token {token}");
                }
            }
        }
    }
}

#[test]
fn a_score_is_a_dot_product_whatever_the_group() {
    let keys = tiles(32, 2);
    for size in [1, 2, 3, 4, 8, 12] {
        let queries = values(32 * size, 3);
        for host in Host::all() {
            let mut scores = vec![[0.0; LANES]; size];
            host.score(&keys, &queries, &mut scores);
            for (query, found) in scores.iter().enumerate() {
                let alone: Vec<f32> = queries.iter().copied().skip(query).step_by(size).collect();
                let mut score = [[0.0; LANES]];
                Host::portable().score(&keys, &alone, &mut score);
                assert_eq!(score[0], *found, "{} of {size}", host.name());
                for (token, score) in score[0].iter().enumerate() {
                    let expected: f64 = (0..32)
                        .map(|at| f64::from(keys[at][token]) * f64::from(alone[at]))
                        .sum();
                    assert!((f64::from(*score) - expected).abs() < 1e-5);
                }
            }
        }
    }
}

#[test]
fn weights_are_a_softmax_of_what_is_visible() {
    let (size, all) = (3, 5);
    let scores: Vec<[f32; LANES]> = tiles(size * all, 4)
        .into_iter()
        .map(|tile| tile.map(|score| score * 9.0))
        .collect();
    for visible in [1, 15, 16, 17, 60, 80] {
        for query in 0..size {
            let score =
                |token: usize| f64::from(scores[token / LANES * size + query][token % LANES]);
            let highest = (0..visible).map(score).fold(f64::NEG_INFINITY, f64::max);
            let expected: Vec<f64> = (0..visible)
                .map(|token| (score(token) - highest).exp())
                .collect();
            let mut first = None;
            for host in Host::all() {
                let mut weights = scores.clone();
                let total = host.soften(&mut weights, query, size, visible);
                assert!((f64::from(total) - expected.iter().sum::<f64>()).abs() < 1e-4);
                for token in 0..all * LANES {
                    let found = weights[token / LANES * size + query][token % LANES];
                    match expected.get(token) {
                        Some(expected) => assert!((f64::from(found) - expected).abs() < 1e-6),
                        None => assert_eq!(found, 0.0, "token {token} of {visible}"),
                    }
                }
                // Others are as they were.
                let other = (query + 1) % size;
                assert_eq!(weights[other], scores[other]);
                let bits = (total.to_bits(), weights);
                assert!(
                    *first.get_or_insert_with(|| bits.clone()) == bits,
                    "{}",
                    host.name()
                );
            }
        }
    }
}

#[test]
fn outputs_are_weighted_sums_whatever_the_group() {
    let tokens = 37;
    for panels in [1, 3, 4] {
        let values = tiles(tokens * panels, 5);
        for size in [1, 2, 3, 4, 8, 12] {
            let weights = tiles(tokens.div_ceil(LANES) * size, 6);
            let start = tiles(panels * size, 7);
            for host in Host::all() {
                let mut sums = start.clone();
                // In two goes, the first of whole tiles.
                let (early, late) = values.split_at(LANES * panels);
                for (values, weights) in [(early, &weights[..size]), (late, &weights[size..])] {
                    host.weigh(Weighing {
                        size,
                        panels,
                        values,
                        weights,
                        sums: &mut sums,
                    });
                }
                for (at, (sums, start)) in sums.iter().zip(&start).enumerate() {
                    let (panel, query) = (at / size, at % size);
                    for lane in 0..LANES {
                        let expected = (0..tokens).fold(start[lane], |sum, token| {
                            let weight = weights[token / LANES * size + query][token % LANES];
                            values[token * panels + panel][lane].mul_add(weight, sum)
                        });
                        assert_eq!(sums[lane], expected, "{} of {size}", host.name());
                    }
                }
            }
        }
    }
}

#[test]
fn groups_are_as_large_as_registers_allow() {
    for host in Host::all() {
        for left in 1..100 {
            let size = host.group(left);
            assert!(size >= 1 && size <= left && size <= WIDEST_GROUP);
        }
    }
}
