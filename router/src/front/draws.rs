//! Random numbers for request ids and seeds, from 32 random bytes read at the start: drawing one cannot fail.

use std::sync::atomic::{AtomicU64, Ordering};

/// Draws by hashing a counter under a random key (BLAKE3, keyed). Draws of one key never repeat in practice; they say nothing
/// about each other.
#[derive(Debug)]
pub struct Draws {
    key: [u8; 32],
    drawn: AtomicU64,
}

impl Draws {
    pub fn new(key: [u8; 32]) -> Self {
        Self {
            key,
            drawn: AtomicU64::new(0),
        }
    }

    pub fn u64(&self) -> u64 {
        let (low, _) = self.pair();
        low
    }

    /// A request id: `req-` and 32 hexadecimal digits.
    pub fn request_id(&self) -> String {
        let (low, high) = self.pair();
        format!("req-{high:016x}{low:016x}")
    }

    fn pair(&self) -> (u64, u64) {
        let counter = self.drawn.fetch_add(1, Ordering::Relaxed);
        let digest = blake3::keyed_hash(&self.key, &counter.to_le_bytes());
        let word = |start: usize| {
            digest.as_bytes()[start..start + 8]
                .iter()
                .fold(0, |word, &byte| (word << 8) | u64::from(byte))
        };
        (word(0), word(8))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_differ_and_follow_from_the_key() {
        let (one, same, other) = (
            Draws::new([1; 32]),
            Draws::new([1; 32]),
            Draws::new([2; 32]),
        );
        let draws: Vec<u64> = (0..3).map(|_| one.u64()).collect();
        assert!(draws[0] != draws[1] && draws[1] != draws[2]);
        assert_eq!(draws, (0..3).map(|_| same.u64()).collect::<Vec<_>>());
        assert_ne!(draws[0], other.u64());
        assert_eq!(one.request_id().len(), 36);
    }
}
