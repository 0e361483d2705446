//! The one source of chance: a small seeded generator, so that a decision can be made again from its record.

/// SplitMix64 (Steele, Lea, Flood 2014): 64 bits of state, any seed is good. Not for secrets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rng {
    state: u64,
}

impl Rng {
    pub fn new(seed: u64) -> Self {
        Self { state: seed }
    }

    pub fn next_u64(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.state;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A seed for one decision: 53 bits, so that every JSON reader keeps it exact.
    pub fn next_seed(&mut self) -> u64 {
        self.next_u64() >> 11
    }

    /// Uniform in [0, 1).
    pub fn unit(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Uniform in 0..bound; 0 for an empty range. The bias is below 2⁻³² for the bounds used here (workers, candidates).
    pub fn below(&mut self, bound: usize) -> usize {
        ((u128::from(self.next_u64()) * bound as u128) >> 64) as usize
    }

    /// An independent stream of the same seed, by purpose.
    pub fn stream(seed: u64, purpose: Purpose) -> Self {
        Self::new(seed ^ (purpose as u64).wrapping_mul(0xd6e8_feb8_6659_fd93))
    }
}

/// What a stream of chance is for. Replay draws the second without the first: the sampled workers are in the record.
#[derive(Clone, Copy, Debug)]
pub enum Purpose {
    /// Which workers a decision looks at, from four routers on.
    SampleWorkers = 1,
    /// Which of nearly equal candidates is taken, at a temperature above zero.
    Temperature = 2,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_seed_gives_the_same_numbers_and_streams_differ() {
        let mut first = Rng::new(7);
        let mut second = Rng::new(7);
        let drawn: Vec<u64> = (0..8).map(|_| first.next_u64()).collect();
        assert_eq!(drawn, (0..8).map(|_| second.next_u64()).collect::<Vec<_>>());
        assert_ne!(
            Rng::stream(7, Purpose::SampleWorkers).next_u64(),
            Rng::stream(7, Purpose::Temperature).next_u64()
        );
    }

    #[test]
    fn draws_are_uniform_enough() {
        let mut rng = Rng::new(1);
        let mut counts = [0u32; 5];
        for _ in 0..50_000 {
            counts[rng.below(5)] += 1;
        }
        assert!(
            counts.iter().all(|&count| (9_500..10_500).contains(&count)),
            "{counts:?}"
        );
        assert_eq!(rng.below(0), 0);
        assert!(rng.next_seed() < 1 << 53);
    }
}
