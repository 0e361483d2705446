//! Whether KV that an engine keeps for a fixed time is expected to be fetched within it.

/// The last part of a lease, one in so many, is nobody's: it holds the way of the messages, and the time until the reader's worker
/// renews the lease, which vLLM's does every sixth of it.
pub const GUARD: u32 = 6;

/// Whether a reader that looks at the blocks `wait` milliseconds after the prompt was computed is in time, under a lease of so many.
pub fn outlasts(lease: f64, wait: f64) -> bool {
    wait + lease / f64::from(GUARD) < lease
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reader_is_in_time_before_the_last_part_of_the_lease() {
        assert!(outlasts(30_000.0, 0.0) && outlasts(30_000.0, 24_000.0));
        assert!(!outlasts(30_000.0, 25_000.0) && !outlasts(30_000.0, 90_000.0));
        assert!(!outlasts(0.0, 0.0));
    }
}
