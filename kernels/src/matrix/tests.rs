//! Products against the plain formula, and each row of them alone.

use super::*;

// Values in ±1 that a linear congruential generator gives; the tests need spread, not quality.
fn values(count: usize, seed: u32) -> Vec<f32> {
    let mut state = seed;
    (0..count)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        })
        .collect()
}

fn product_on(host: Host, matrix: &Matrix, activations: &[f32], columns: usize) -> Vec<f32> {
    let mut quantised = Activations::default();
    quantised.quantise(host, activations, columns);
    let mut out = vec![0.0; activations.len() / columns * matrix.rows()];
    matrix.product(host, &quantised, &mut out);
    out
}

fn product_of(matrix: &Matrix, activations: &[f32], columns: usize) -> Vec<f32> {
    product_on(Host::best(), matrix, activations, columns)
}

fn exact(matrix: &Matrix, activations: &[f32], columns: usize) -> Vec<f64> {
    let mut weights = vec![0.0; columns];
    let mut out = Vec::new();
    for activations in activations.chunks_exact(columns) {
        for row in 0..matrix.rows() {
            matrix.row(row, &mut weights);
            out.push(
                weights
                    .iter()
                    .zip(activations)
                    .map(|(weight, value)| f64::from(*weight) * f64::from(*value))
                    .sum(),
            );
        }
    }
    out
}

/// Random bytes as Q4_1 blocks with sane scales.
fn q4_1(rows: usize, columns: usize) -> Vec<u8> {
    let noise = values(rows * columns, 9);
    noise
        .chunks_exact(BLOCK)
        .flat_map(|chunk| {
            let mut block = Vec::new();
            block.extend_from_slice(&f16::from_f32(0.1 + chunk[0].abs()).to_le_bytes());
            block.extend_from_slice(&f16::from_f32(chunk[1]).to_le_bytes());
            block.extend(chunk[..16].iter().map(|value| (value * 128.0) as i8 as u8));
            block
        })
        .collect()
}

#[test]
fn products_are_those_of_the_weights() {
    // Neither the outputs nor the activation rows fill their groups.
    let (rows, columns, batch) = (13, 96, 11);
    let activations = values(batch * columns, 3);
    let q8: Vec<u8> = values(rows * columns, 5)
        .chunks_exact(BLOCK)
        .flat_map(|chunk| {
            let mut block = f16::from_f32(0.25).to_le_bytes().to_vec();
            block.extend(chunk.iter().map(|value| (value * 127.0) as i8 as u8));
            block
        })
        .collect();
    for matrix in [
        Matrix::from_f32(&values(rows * columns, 1), columns),
        Matrix::from_q8_0(&q8, columns),
        Matrix::from_q4_1(&q4_1(rows, columns), columns),
    ] {
        let found = product_of(&matrix, &activations, columns);
        let expected = exact(&matrix, &activations, columns);
        assert_eq!(found.len(), expected.len());
        let largest = expected.iter().fold(0.0_f64, |a, b| a.max(b.abs()));
        for (found, expected) in found.iter().zip(&expected) {
            // Activations are rounded to one part in 254 of their block's largest.
            assert!(
                (f64::from(*found) - expected).abs() < 0.02 * largest,
                "{found} for {expected}"
            );
        }
    }
}

#[test]
fn a_row_alone_gives_the_bits_it_gives_in_a_batch() {
    let (rows, columns, batch) = (24, 64, 27);
    let mut activations = values(batch * columns, 3);
    // A block of zeros has no scale of its own.
    activations[5 * columns..5 * columns + BLOCK].fill(0.0);
    for matrix in [
        Matrix::from_f32(&values(rows * columns, 1), columns),
        Matrix::from_q4_1(&q4_1(rows, columns), columns),
    ] {
        let together = product_of(&matrix, &activations, columns);
        for host in Host::all() {
            let found = product_on(host, &matrix, &activations, columns);
            assert!(found == together, "{} gives other bits", host.name());
        }
        for (index, row) in activations.chunks_exact(columns).enumerate() {
            let alone = product_of(&matrix, row, columns);
            assert_eq!(alone, together[index * rows..][..rows]);
        }
    }
}

#[test]
fn weights_survive_their_layout() {
    let columns = 64;
    let plain = values(10 * columns, 2);
    let matrix = Matrix::from_f32(&plain, columns);
    let mut row = vec![0.0; columns];
    matrix.row(9, &mut row);
    for (found, expected) in row.iter().zip(&plain[9 * columns..]) {
        assert!((found - expected).abs() <= 0.5 / 127.0 + 1e-6);
    }

    // One block of Q4_1: scale 2, minimum -1, quants 0..=15 in the low halves and 15..=0 in the high ones.
    let mut block = Vec::new();
    block.extend_from_slice(&f16::from_f32(2.0).to_le_bytes());
    block.extend_from_slice(&f16::from_f32(-1.0).to_le_bytes());
    block.extend((0..16_u8).map(|quant| quant | (15 - quant) << 4));
    let matrix = Matrix::from_q4_1(&block, BLOCK);
    let mut row = vec![0.0; BLOCK];
    matrix.row(0, &mut row);
    let expected: Vec<f32> = (0..16)
        .chain((0..16).rev())
        .map(|quant| 2.0 * quant as f32 - 1.0)
        .collect();
    assert_eq!(row, expected);

    let mut block = f16::from_f32(2.0).to_le_bytes().to_vec();
    block.extend((0..16_u8).map(|quant| quant | (15 - quant) << 4));
    Matrix::from_q4_0(&block, BLOCK).row(0, &mut row);
    assert_eq!(row[0], -16.0);
    assert_eq!(row[31], -16.0);
    assert_eq!(row[16], 14.0);
}

#[test]
fn the_largest_weights_and_activations_do_not_overflow() {
    // Every weight -128 (Q8_0 may hold it) or 15, every activation at an end of its range.
    let columns = 4096;
    let mut q8 = Vec::new();
    for _ in 0..columns / BLOCK {
        q8.extend_from_slice(&f16::from_f32(1.0).to_le_bytes());
        q8.extend([0x80; BLOCK]);
    }
    let mut q4 = Vec::new();
    for _ in 0..columns / BLOCK {
        q4.extend_from_slice(&f16::from_f32(1.0).to_le_bytes());
        q4.extend_from_slice(&f16::from_f32(0.0).to_le_bytes());
        q4.extend([0xff; BLOCK / 2]);
    }
    for host in Host::all() {
        for value in [127.0, -127.0] {
            let activations = vec![value; columns];
            let found = product_on(
                host,
                &Matrix::from_q8_0(&q8, columns),
                &activations,
                columns,
            );
            assert_eq!(found, [-128.0 * value * columns as f32], "{}", host.name());
            let found = product_on(
                host,
                &Matrix::from_q4_1(&q4, columns),
                &activations,
                columns,
            );
            assert_eq!(found, [15.0 * value * columns as f32], "{}", host.name());
        }
    }
}
