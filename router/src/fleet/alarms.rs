//! What an engine's own counters say against its links. Pure.
//!
//! An engine moves KV by itself and answers well all the same: that a block was read after its lease, or that a transfer was given up and
//! computed again, is seen in its counters only, and not of which request.

use baton_protocol::wire::Load;

/// How much the counters have risen between two reports of one engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rises {
    /// Blocks of this worker were read after it had given them to others: an answer may have been made from them.
    pub late_reads: u64,
    /// This worker could not fetch what it was told to.
    pub failed_transfers: u64,
    /// The same, as it had been given up where it lay: that says nothing of the way.
    pub ended_transfers: u64,
}

impl Rises {
    /// Of a worker that is heard for the first time nothing is known to have risen.
    pub fn between(before: Option<&Load>, after: &Load) -> Self {
        before.map_or_else(Self::default, |before| Self {
            late_reads: after.late_reads.saturating_sub(before.late_reads),
            failed_transfers: after
                .failed_transfers
                .saturating_sub(before.failed_transfers),
            ended_transfers: after.ended_transfers.saturating_sub(before.ended_transfers),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_rises_is_an_alarm() {
        let load = |late_reads, failed_transfers| Load {
            late_reads,
            failed_transfers,
            ..Load::default()
        };
        let none = Rises::default();
        assert_eq!(Rises::between(None, &load(7, 7)), none);
        assert_eq!(Rises::between(Some(&load(7, 7)), &load(7, 7)), none);
        assert_eq!(
            Rises::between(Some(&load(7, 7)), &load(0, 1)),
            none,
            "another start"
        );
        let both = Rises {
            late_reads: 1,
            failed_transfers: 2,
            ended_transfers: 0,
        };
        assert_eq!(Rises::between(Some(&load(7, 7)), &load(8, 9)), both);
        let ended = |ended_transfers| Load {
            ended_transfers,
            ..load(7, 7)
        };
        assert_eq!(
            Rises::between(Some(&ended(1)), &ended(4)),
            Rises {
                ended_transfers: 3,
                ..none
            }
        );
    }
}
