//! Is this block the one that was asked for? Pure.

use baton_protocol::failure::HandoffFailure;
use baton_protocol::hash::BlockHash;

use crate::kv::Proof;
use crate::transport::Arrival;
use crate::transport::checksum::checksum;

/// For which blocks the checksum over the received bytes is compared. Everything else is compared for all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ChecksumMode {
    /// All.
    #[default]
    Always,
    /// One in eight, drawn by a seed, and the last.
    Sampled {
        /// Another one for each transfer.
        seed: u64,
    },
    /// None.
    Off,
}

impl ChecksumMode {
    pub(super) fn covers(self, index: u32, last: bool) -> bool {
        match self {
            Self::Always => true,
            Self::Off => false,
            Self::Sampled { seed } => {
                // One round of SplitMix64 (Steele, Lea and Flood, 2014).
                let mut mixed = (seed ^ u64::from(index)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
                mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
                last || (mixed >> 32) % 8 == 0
            }
        }
    }
}

/// What the reader knows by itself about a block to come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Expected {
    /// From the reader's own tokens; zero for a partly filled last block.
    pub hash: BlockHash,
    /// Tokens in it.
    pub fill: u32,
    /// The reader's layout.
    pub layout: u64,
    /// It is the last one.
    pub last: bool,
}

/// Compares what came with what was promised and with what must be. The first doubt is the answer. Returns what is known of the
/// bytes afterwards.
pub fn verify(
    arrival: &Arrival,
    expected: &Expected,
    mode: ChecksumMode,
    bytes: &[u8],
) -> Result<Proof, HandoffFailure> {
    let Arrival {
        promised,
        before,
        after,
        checksum: found,
        ..
    } = arrival;
    if before.generation != promised.generation || after.generation != promised.generation {
        return Err(HandoffFailure::GenerationMismatch);
    }
    if before.layout != expected.layout {
        return Err(HandoffFailure::LayoutMismatch);
    }
    if before.hash != expected.hash {
        return Err(HandoffFailure::HashMismatch);
    }
    if before.fill != expected.fill {
        return Err(HandoffFailure::FillMismatch);
    }
    // Same generation, other header: nothing that keeps the rules writes this.
    if before != promised || after != promised {
        return Err(HandoffFailure::GenerationMismatch);
    }
    if !mode.covers(arrival.index, expected.last) {
        return Ok(Proof::Promised(before.checksum));
    }
    if found.unwrap_or_else(|| checksum(bytes)) != before.checksum {
        return Err(HandoffFailure::ChecksumMismatch);
    }
    Ok(Proof::Checked(before.checksum))
}

#[cfg(test)]
mod tests {
    use baton_protocol::header::BlockHeader;
    use baton_protocol::ids::Generation;

    use super::*;

    const BYTES: [u8; 32] = [7; 32];

    fn case() -> (Arrival, Expected) {
        let header = BlockHeader {
            hash: BlockHash(11),
            generation: Generation(3),
            layout: 5,
            checksum: checksum(&BYTES),
            fill: 4,
        };
        (
            Arrival {
                index: 2,
                promised: header,
                before: header,
                after: header,
                checksum: None,
            },
            Expected {
                hash: BlockHash(11),
                fill: 4,
                layout: 5,
                last: false,
            },
        )
    }

    fn judged(change: impl FnOnce(&mut Arrival)) -> Result<Proof, HandoffFailure> {
        let (mut arrival, expected) = case();
        change(&mut arrival);
        verify(&arrival, &expected, ChecksumMode::Always, &BYTES)
    }

    #[test]
    fn what_was_asked_for_is_taken() {
        let promised = case().0.promised.checksum;
        assert_eq!(judged(|_| {}), Ok(Proof::Checked(promised)));
    }

    #[test]
    fn what_was_not_compared_is_not_called_checked() {
        let (arrival, expected) = case();
        let judged = verify(&arrival, &expected, ChecksumMode::Off, &[0; 32]);
        assert_eq!(judged, Ok(Proof::Promised(arrival.promised.checksum)));
    }

    #[test]
    fn each_doubt_has_its_name() {
        use HandoffFailure::*;
        let all = |arrival: &mut Arrival, change: fn(&mut BlockHeader)| {
            change(&mut arrival.promised);
            change(&mut arrival.before);
            change(&mut arrival.after);
        };
        let cases: [(Result<Proof, HandoffFailure>, HandoffFailure); 8] = [
            (judged(|a| a.before.generation.0 += 1), GenerationMismatch),
            (judged(|a| a.after.generation.0 += 1), GenerationMismatch),
            (judged(|a| a.promised.generation.0 += 1), GenerationMismatch),
            (judged(|a| a.after.checksum += 1), GenerationMismatch),
            (judged(|a| all(a, |h| h.layout += 1)), LayoutMismatch),
            (judged(|a| all(a, |h| h.hash.0 += 1)), HashMismatch),
            (judged(|a| all(a, |h| h.fill -= 1)), FillMismatch),
            (judged(|a| all(a, |h| h.checksum += 1)), ChecksumMismatch),
        ];
        for (number, (found, expected)) in cases.into_iter().enumerate() {
            assert_eq!(found, Err(expected), "case {number}");
        }
    }

    #[test]
    fn sampling_checks_some_of_the_blocks_and_always_the_last() {
        let covered = |seed| {
            (0..8000)
                .filter(|index| ChecksumMode::Sampled { seed }.covers(*index, false))
                .count()
        };
        assert!((800..1200).contains(&covered(1)), "{}", covered(1));
        assert!((0..100).all(|seed| ChecksumMode::Sampled { seed }.covers(5, true)));
        let drawn: Vec<_> = (0..64)
            .map(|seed| ChecksumMode::Sampled { seed }.covers(5, false))
            .collect();
        assert!(drawn.contains(&true) && drawn.contains(&false));
        assert!(!ChecksumMode::Off.covers(5, true));
    }
}
