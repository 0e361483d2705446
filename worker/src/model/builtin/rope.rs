//! Rotary position embedding over interleaved pairs (2i, 2i+1), as the Llama files of GGUF are permuted for.

use super::super::Rope;

/// Angles by position, computed as positions are first met.
#[derive(Clone, Debug)]
pub struct RopeTable {
    /// Radians per position, one for each pair.
    frequencies: Vec<f64>,
    /// (cosine, sine) of each pair, position after position.
    angles: Vec<(f32, f32)>,
}

impl RopeTable {
    /// `factors` divide the frequencies (Llama 3's `rope_freqs`); empty for none. `scale` divides every position.
    pub fn new(rope: &Rope, scale: f64, factors: &[f32]) -> Self {
        let pairs = rope.dimensions / 2;
        let frequencies = (0..pairs)
            .map(|pair| {
                let exponent = 2.0 * pair as f64 / rope.dimensions as f64;
                let factor = factors.get(pair).copied().map_or(1.0, f64::from);
                f64::from(rope.base).powf(-exponent) / factor / scale
            })
            .collect();
        Self {
            frequencies,
            angles: Vec::new(),
        }
    }

    /// Makes positions below `positions` ready for [`Self::rotate`].
    pub fn reach(&mut self, positions: usize) {
        let pairs = self.frequencies.len().max(1);
        for position in self.angles.len() / pairs..positions {
            self.angles.extend(self.frequencies.iter().map(|frequency| {
                let (sine, cosine) = (position as f64 * frequency).sin_cos();
                (cosine as f32, sine as f32)
            }));
        }
    }

    /// Rotates every head of one row in place. The position has been reached.
    pub fn rotate(&self, row: &mut [f32], head_dim: usize, position: usize) {
        let pairs = self.frequencies.len();
        let angles = &self.angles[position * pairs..][..pairs];
        for head in row.chunks_exact_mut(head_dim) {
            let (values, _) = head.as_chunks_mut::<2>();
            for ([even, odd], (cosine, sine)) in values.iter_mut().zip(angles) {
                (*even, *odd) = (*even * cosine - *odd * sine, *even * sine + *odd * cosine);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_product_of_rotated_rows_depends_on_their_distance_alone() {
        let rope = Rope {
            base: 10_000.0,
            dimensions: 8,
            interleaved: true,
            scaling: "None".to_owned(),
        };
        let mut table = RopeTable::new(&rope, 1.0, &[]);
        table.reach(120);
        let product = |left: usize, right: usize| -> f32 {
            let mut query = [0.3, -1.0, 0.5, 2.0, 0.1, 0.7, -0.4, 1.5];
            let mut key = [1.0, 0.2, -0.6, 0.4, 0.9, -1.1, 0.8, 0.3];
            table.rotate(&mut query, 8, left);
            table.rotate(&mut key, 8, right);
            query.iter().zip(&key).map(|(a, b)| a * b).sum()
        };
        assert!((product(7, 3) - product(104, 100)).abs() < 1e-4);
        assert!((product(7, 3) - product(8, 3)).abs() > 1e-3);
    }
}
