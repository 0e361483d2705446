//! Numbers for random histories in tests: the same from the same seed, and how many histories are run.

/// SplitMix64 (Steele, Lea and Flood, 2014).
pub(crate) struct Draw(pub(crate) u64);

impl Draw {
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) % bound as u64) as usize
    }

    pub(crate) fn of<'a, T>(&mut self, items: &'a [T]) -> Option<&'a T> {
        (!items.is_empty()).then(|| &items[self.below(items.len())])
    }
}

/// Runs a history for each seed; a failure names the seed. `usual` many in the suite, more or fewer with `BATON_HISTORIES`.
pub(crate) fn for_each_seed(usual: u64, history: impl Fn(u64) + std::panic::RefUnwindSafe) {
    let histories = std::env::var("BATON_HISTORIES")
        .ok()
        .and_then(|number| number.parse().ok())
        .unwrap_or(usual);
    for seed in 0..histories {
        let run = std::panic::catch_unwind(|| history(seed));
        assert!(
            run.is_ok(),
            "the history of seed {seed} breaks an invariant"
        );
    }
}
