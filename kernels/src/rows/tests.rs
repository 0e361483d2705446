//! Norms and gates: right, and the same bits on every instruction set.

use super::*;

fn values(count: usize, factor: f32) -> Vec<f32> {
    (0..count as u32)
        .map(|index| {
            let mixed = index.wrapping_mul(2_654_435_761) >> 8;
            (mixed as f32 / (1 << 23) as f32 - 1.0) * factor
        })
        .collect()
}

#[test]
fn a_row_has_the_size_of_its_weights_after_the_norm() {
    let (rows, weights) = (values(3 * 96, 7.0), values(96, 2.0));
    let mut expected: Vec<f64> = Vec::new();
    for row in rows.chunks_exact(96) {
        let square: f64 = row.iter().map(|value| f64::from(*value).powi(2)).sum();
        let scale = 1.0 / (square / 96.0 + 1e-5).sqrt();
        let scaled = row.iter().zip(&weights);
        expected
            .extend(scaled.map(|(value, weight)| f64::from(*value) * scale * f64::from(*weight)));
    }
    let mut first = Vec::new();
    for host in Host::all() {
        let mut out = vec![0.0; rows.len()];
        host.normalise(&mut out, &rows, &weights, 1e-5);
        for (found, expected) in out.iter().zip(&expected) {
            assert!(
                (f64::from(*found) - expected).abs() < 1e-5,
                "{found} for {expected}"
            );
        }
        if first.is_empty() {
            first.clone_from(&out);
        }
        assert!(first == out, "{} differs", host.name());
    }
}

#[test]
fn a_gate_passes_what_is_positive() {
    // From where the exponential is cut off on one side to where it is on the other.
    let (gate, up) = (values(4096, 120.0), values(4096, 3.0));
    let mut first = Vec::new();
    for host in Host::all() {
        let mut out = gate.clone();
        host.gate(&mut out, &up);
        for ((found, gate), up) in out.iter().zip(&gate).zip(&up) {
            let expected = f64::from(*gate) / (1.0 + (-f64::from(*gate)).exp()) * f64::from(*up);
            let error = (f64::from(*found) - expected).abs();
            assert!(
                error < 1e-6 * expected.abs().max(1.0),
                "{found} for {expected}"
            );
        }
        if first.is_empty() {
            first.clone_from(&out);
        }
        assert!(first == out, "{} differs", host.name());
    }
}
