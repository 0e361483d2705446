//! Histories of two candidates over one record: clocks that are wrong and run at different pace, requests that are slow, fail, or
//! succeed without their answer; a candidate that sleeps or dies. Never two lead at once, and somebody leads in the end.

use std::time::Duration;

use proptest::prelude::*;

use super::election::{Decision, Election, Record, Timing};

/// What the API server keeps: a record and its version.
#[derive(Default)]
struct Server {
    record: Option<Record>,
    version: u64,
}

/// What a request comes to.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fate {
    Good,
    /// It never arrives.
    Lost,
    /// It arrives; the answer does not.
    Unanswered,
}

/// A candidate goes on: its request under way arrives, or it looks anew.
#[derive(Clone, Debug)]
struct Turn {
    second: bool,
    /// Milliseconds of real time since the turn before, of whichever candidate.
    delay: u64,
    /// Milliseconds that a request is under way, each way.
    flight: u64,
    fate: Fate,
}

struct Candidate {
    election: Election,
    /// What its clock says at time zero, and how fast it runs in percent.
    offset: Duration,
    pace: u32,
    /// A write that is under way: the record, when it was sent, and the version that it replaces.
    pending: Option<(Record, Duration, u64)>,
    /// The version that its own last write has made.
    known: Option<u64>,
    dead: bool,
}

impl Candidate {
    fn new(name: &str, offset: u64, pace: u32) -> Self {
        Self {
            election: Election::new(name.into(), Timing::default()),
            offset: Duration::from_secs(offset),
            pace,
            pending: None,
            known: None,
            dead: false,
        }
    }

    fn clock(&self, real: u64) -> Duration {
        self.offset + Duration::from_millis(real) * self.pace / 100
    }

    fn leads(&self, real: u64) -> bool {
        !self.dead && self.election.holds(self.clock(real))
    }

    /// It has nothing to do with the monotonic clock, nor with the other's.
    fn wall(&self, real: u64) -> i64 {
        i64::try_from(real).unwrap() - i64::try_from(self.offset.as_secs()).unwrap()
    }

    fn go_on(&mut self, turn: &Turn, server: &mut Server, real: u64) {
        // Whoever has lost the lease ends; what it has sent may still arrive.
        self.dead |= self.election.lost(self.clock(real));
        if let Some((record, sent, version)) = self.pending.take() {
            if turn.fate == Fate::Lost || server.version != version {
                return;
            }
            server.record = Some(record.clone());
            server.version += 1;
            if turn.fate == Fate::Good && !self.dead {
                self.election.written(record, sent);
                self.known = Some(server.version);
            }
            return;
        }
        if let Some(version) = self.known.take().filter(|_| self.leads(real)) {
            let now = self.clock(real);
            let record = self.election.record(Decision::Renew, self.wall(real));
            self.pending = Some((record, now, version));
            return;
        }
        if self.dead || turn.fate != Fate::Good {
            return;
        }
        let asked = self.clock(real.saturating_sub(turn.flight));
        let now = self.clock(real + turn.flight);
        let decision = self.election.read(server.record.as_ref(), asked, now);
        if decision != Decision::Wait {
            let record = self.election.record(decision, self.wall(real));
            self.pending = Some((record, now, server.version));
        }
    }
}

fn turns() -> impl Strategy<Value = Vec<Turn>> {
    let fate =
        prop_oneof![8 => Just(Fate::Good), 1 => Just(Fate::Lost), 1 => Just(Fate::Unanswered)];
    let delay = prop_oneof![8 => 0u64..3_000, 2 => 3_000u64..20_000, 1 => 20_000u64..80_000];
    let flight = prop_oneof![4 => 0u64..50, 1 => 50u64..5_000];
    let turn =
        (any::<bool>(), delay, flight, fate).prop_map(|(second, delay, flight, fate)| Turn {
            second,
            delay,
            flight,
            fate,
        });
    proptest::collection::vec(turn, 1..200)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3_000))]

    #[test]
    fn never_two_lead_and_a_dead_leader_is_followed(
        history in turns(),
        offsets in (0u64..1_000_000, 0u64..1_000_000),
        paces in (90u32..110, 90u32..110),
    ) {
        let mut candidates = [
            Candidate::new("a", offsets.0, paces.0),
            Candidate::new("b", offsets.1, paces.1),
        ];
        let mut server = Server::default();
        let mut real = 10_000;
        for turn in &history {
            real += turn.delay;
            candidates[usize::from(turn.second)].go_on(turn, &mut server, real);
            let both = candidates.iter().all(|candidate| candidate.leads(real));
            prop_assert!(!both, "two lead at {real} ms");
        }

        // The first dies; another start of the second, alone and with a good network, leads within the lease and its looks.
        let mut next = Candidate::new("c", offsets.1, paces.1);
        let good = Turn { second: true, delay: 0, flight: 1, fate: Fate::Good };
        let died = real;
        while !next.leads(real) {
            prop_assert!(real - died < 40_000, "nobody leads {} ms after the leader's death", real - died);
            next.go_on(&good, &mut server, real);
            next.go_on(&good, &mut server, real + 2);
            real += 2_000;
        }
    }
}
