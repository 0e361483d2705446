//! A million random histories of the lease protocol against its specification: every answer, refusals by their word included, is
//! the one that the specification gives, and nothing stays behind.
//!
//! The [`specification`] knows nothing of the table's data structures: a lease is in one of a few phases, a worker has one living
//! process, and each message has one right answer.

mod specification;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use baton_protocol::header::BlockHeader;
use baton_protocol::ids::{Generation, Incarnation, LeaseId, RunId, TransferId, WorkerId};

use self::specification::{Phase, Spec};
use super::table::{LeaseError, LeaseTable};
use super::{Completion, Gone, Granted, LeaseOpen, Next, Reader};
use crate::kv::draw::{Draw, for_each_seed};
use crate::kv::store::BlockId;

const HISTORIES: u64 = 1_000_000;
const STEPS: usize = 24;
const DURATION: u64 = 100;
const LEASES: usize = 3;

/// The living process of a worker, and those that it replaced, with the time until which they are held dead.
#[derive(Clone, Debug, Default)]
struct Process {
    current: Option<u64>,
    dead: BTreeMap<u64, u64>,
}

struct Names {
    transfers: Vec<TransferId>,
    workers: Vec<WorkerId>,
    runs: Vec<RunId>,
}

struct World<'a> {
    draw: Draw,
    names: &'a Names,
    table: LeaseTable,
    now: u64,
    generations: u64,
    leases: Vec<Spec>,
    processes: Vec<Process>,
    answers: &'a Answers,
}

/// How often each refusal was met: a history that meets none proves nothing.
#[derive(Default)]
struct Answers {
    gone: [AtomicU64; Gone::ALL.len()],
    granted: AtomicU64,
    accepted: AtomicU64,
    stale: AtomicU64,
}

impl Answers {
    fn note<T>(&self, answer: &Result<T, Gone>) {
        let counter = match *answer {
            Ok(_) => &self.granted,
            Err(reason) => match Gone::ALL.iter().position(|gone| *gone == reason) {
                Some(index) => &self.gone[index],
                None => panic!("{reason} has no code"),
            },
        };
        counter.fetch_add(1, Ordering::Relaxed);
    }
}

fn id(number: usize) -> LeaseId {
    LeaseId([number as u8; 16])
}

impl World<'_> {
    fn step(&mut self) {
        match self.draw.below(21) {
            0..=2 => self.open(),
            3 => self.publish(),
            4 => self.seal(),
            5..=8 => self.claim(),
            9..=10 => self.renew(),
            11..=12 => self.look(),
            13..=14 => self.complete(),
            15 => self.release(),
            16 => self.cancel(),
            17..=18 => self.now += self.draw.below(70) as u64,
            19 => self.extend(),
            _ => self.reap(),
        }
        self.compare();
    }

    fn some_lease(&mut self) -> usize {
        self.draw.below(LEASES)
    }

    /// Mostly the right one.
    fn some_generation(&mut self, lease: usize) -> u64 {
        let right = self.leases[lease].generation;
        right + u64::from(self.draw.below(8) == 0)
    }

    fn some_transfer(&mut self) -> usize {
        self.draw.below(self.names.transfers.len())
    }

    fn open(&mut self) {
        let lease = self.some_lease();
        let run = self.draw.below(self.names.runs.len());
        let duration = if self.draw.below(16) == 0 {
            0
        } else {
            DURATION
        };
        let skip = self.draw.below(2) as u32;
        let open = LeaseOpen {
            id: id(lease),
            run: self.names.runs[run].clone(),
            duration,
            skip_blocks: skip,
        };
        let found = self.table.open(&open, self.now);
        if duration == 0 {
            assert_eq!(found, Err(LeaseError::NoDuration));
            return;
        }
        if self.leases[lease].phase != Phase::Unknown {
            assert_eq!(found, Err(LeaseError::Reused));
            return;
        }
        self.generations += 1;
        let opened = found.expect("a new id");
        assert_eq!(opened.generation.0, self.generations, "never used before");
        assert_eq!(opened.expires_in, DURATION);
        self.leases[lease] = Spec {
            phase: Phase::Live,
            generation: self.generations,
            run,
            expires_at: self.now + DURATION,
            skip,
            blocks: 0,
            sealed: false,
            claim: None,
            completed: None,
            until: 0,
        };
    }

    fn publish(&mut self) {
        let lease = self.some_lease();
        let spec = &mut self.leases[lease];
        let Some(live) = self.table.live_mut(id(lease)) else {
            assert_ne!(spec.phase, Phase::Live);
            return;
        };
        if !spec.sealed {
            live.publish(BlockId(spec.blocks), BlockHeader::default());
            spec.blocks += 1;
        }
    }

    fn seal(&mut self) {
        let lease = self.some_lease();
        if let Some(live) = self.table.live_mut(id(lease)) {
            live.seal();
            self.leases[lease].sealed = true;
        }
    }

    fn claim(&mut self) {
        let lease = self.some_lease();
        let generation = self.some_generation(lease);
        let transfer = self.some_transfer();
        let worker = self.draw.below(self.names.workers.len());
        let incarnation = 1 + self.draw.below(8) as u64 / 6;
        let reader = Reader {
            transfer: self.names.transfers[transfer].clone(),
            worker: self.names.workers[worker].clone(),
            incarnation: Incarnation(incarnation),
        };
        let found = self
            .table
            .claim(id(lease), Generation(generation), &reader, self.now);
        let right = self.right_claim(lease, generation, (transfer, worker, incarnation));
        self.answers.note(&right);
        assert_eq!(found, right);
    }

    fn right_claim(
        &mut self,
        lease: usize,
        generation: u64,
        reader: (usize, usize, u64),
    ) -> Result<Granted, Gone> {
        let (now, (transfer, worker, incarnation)) = (self.now, reader);
        self.leases[lease].named(generation, now)?;
        let process = &mut self.processes[worker];
        if process.current != Some(incarnation) {
            if process
                .dead
                .get(&incarnation)
                .is_some_and(|until| *until > now)
            {
                return Err(Gone::DeadReader);
            }
            if let Some(former) = process.current.replace(incarnation) {
                process.dead.insert(former, now + 2 * DURATION);
                process.dead.remove(&incarnation);
                for other in &mut self.leases {
                    other.claim = other
                        .claim
                        .filter(|(_, of, process)| *of != worker || *process == incarnation);
                }
            }
        }
        let spec = &mut self.leases[lease];
        match spec.claim {
            Some((claimed, _, _)) if claimed != transfer => Err(Gone::Claimed),
            _ => {
                spec.claim = Some(reader);
                spec.expires_at = now + DURATION;
                Ok(Granted {
                    for_milliseconds: DURATION,
                })
            }
        }
    }

    fn renew(&mut self) {
        let lease = self.some_lease();
        let generation = self.some_generation(lease);
        let transfer = self.some_transfer();
        let found = self.table.renew(
            id(lease),
            Generation(generation),
            &self.names.transfers[transfer],
            self.now,
        );
        let spec = &mut self.leases[lease];
        let right = spec.reads(generation, transfer, self.now).map(|()| {
            spec.expires_at = self.now + DURATION;
            Granted {
                for_milliseconds: DURATION,
            }
        });
        self.answers.note(&right);
        assert_eq!(found, right);
    }

    /// The owner needs no claim and no generation, and wins nothing back.
    fn extend(&mut self) {
        let lease = self.some_lease();
        let found = self.table.extend(id(lease), self.now);
        let spec = &mut self.leases[lease];
        let right = spec.alive(self.now).is_ok() && !spec.sealed;
        if right {
            spec.expires_at = self.now + DURATION;
        }
        assert_eq!(found, right, "what it fills, and nothing else");
    }

    fn look(&mut self) {
        let lease = self.some_lease();
        let generation = self.some_generation(lease);
        let transfer = self.some_transfer();
        let index = self.draw.below(4) as u32;
        let name = &self.names.transfers[transfer];
        let generation_asked = Generation(generation);
        let found = self
            .table
            .next(id(lease), generation_asked, name, index, self.now);
        let watched = self
            .table
            .subscribe(id(lease), generation_asked, name, self.now);
        let spec = &self.leases[lease];
        let right = spec.reads(generation, transfer, self.now);
        assert_eq!(watched.map(|_| ()), right);
        let right = match right {
            Ok(()) if index < spec.skip => Err(Gone::OutOfRange),
            right => right,
        };
        self.answers.note(&right);
        // Skipped blocks are held and never shown.
        let end = spec.blocks.max(spec.skip);
        match (found, right) {
            (Next::Gone(gone), Err(reason)) => assert_eq!(gone, reason),
            (Next::Block { entry, sealed }, Ok(())) => {
                assert!(index < spec.blocks);
                assert_eq!(entry.block, BlockId(index), "in order, none left out");
                assert_eq!(sealed, spec.sealed.then_some(end));
            }
            (Next::Sealed { end: found }, Ok(())) => {
                assert!(spec.sealed && index >= spec.blocks);
                assert_eq!(found, end);
            }
            (Next::Wait, Ok(())) => assert!(!spec.sealed && index >= spec.blocks),
            other => panic!("{other:?}"),
        }
    }

    fn complete(&mut self) {
        let lease = self.some_lease();
        let generation = self.some_generation(lease);
        let transfer = self.some_transfer();
        let verified = self.draw.below(2) == 0;
        let (found, ended) = self.table.complete(
            id(lease),
            Generation(generation),
            &self.names.transfers[transfer],
            verified,
            self.now,
        );
        let spec = &mut self.leases[lease];
        if spec.reads(generation, transfer, self.now).is_ok() {
            self.answers.accepted.fetch_add(1, Ordering::Relaxed);
            assert_eq!(found, Completion::Accepted);
            let ended = ended.expect("its blocks are given back, once");
            assert_eq!(ended.held.len(), spec.blocks as usize);
            spec.end(Gone::Completed, self.now);
            spec.completed = Some(transfer);
            return;
        }
        assert!(ended.is_none(), "nothing is given back twice");
        // The report that ended it may come again; every other one came too late, and what was read is discarded.
        let again = spec.phase == Phase::Ended(Gone::Completed) && spec.completed == Some(transfer);
        let right = if again {
            Completion::Accepted
        } else {
            self.answers.stale.fetch_add(1, Ordering::Relaxed);
            Completion::Stale
        };
        assert_eq!(found, right);
    }

    fn release(&mut self) {
        let lease = self.some_lease();
        let run = self.draw.below(self.names.runs.len());
        let spec = &mut self.leases[lease];
        let its = spec.phase == Phase::Live && spec.run == run;
        assert_eq!(self.table.belongs(id(lease), &self.names.runs[run]), its);
        if its {
            let ended = self.table.end(id(lease), Gone::Released, None, self.now);
            assert_eq!(
                ended.map(|ended| ended.held.len() as u32),
                Some(spec.blocks)
            );
            spec.end(Gone::Released, self.now);
        }
    }

    fn cancel(&mut self) {
        let run = self.draw.below(self.names.runs.len());
        let mut found = self.table.of_run(&self.names.runs[run]);
        found.sort_unstable_by_key(|id| id.0);
        let mut right = Vec::new();
        for (number, spec) in self.leases.iter_mut().enumerate() {
            if spec.phase == Phase::Live && spec.run == run {
                right.push(id(number));
                spec.end(Gone::Cancelled, self.now);
            }
        }
        assert_eq!(found, right);
        for lease in found {
            assert!(
                self.table
                    .end(lease, Gone::Cancelled, None, self.now)
                    .is_some()
            );
        }
    }

    fn reap(&mut self) {
        let mut found: Vec<_> = self
            .table
            .expire(self.now)
            .into_iter()
            .map(|ended| (ended.lease.0[0] as usize, ended.held.len() as u32))
            .collect();
        found.sort_unstable();
        let mut right = Vec::new();
        for (number, spec) in self.leases.iter_mut().enumerate() {
            match spec.phase {
                Phase::Live if self.now >= spec.expires_at => {
                    right.push((number, spec.blocks));
                    spec.end(Gone::Expired, self.now);
                }
                Phase::Ended(_) if self.now >= spec.until => spec.phase = Phase::Unknown,
                _ => {}
            }
        }
        assert_eq!(found, right, "all that have expired, and no other");
    }

    fn compare(&self) {
        let count =
            |wanted: fn(&Spec) -> bool| self.leases.iter().filter(|spec| wanted(spec)).count();
        let live = count(|spec| spec.phase == Phase::Live);
        assert_eq!(self.table.counts().total() as usize, live);
        let claimed = count(|spec| spec.phase == Phase::Live && spec.claim.is_some());
        assert_eq!(self.table.counts().claimed as usize, claimed);
        let ended = count(|spec| matches!(spec.phase, Phase::Ended(_)));
        assert_eq!(self.table.tombstones(), ended);
    }

    fn wind_up(&mut self) {
        self.now += DURATION;
        self.reap();
        assert_eq!(
            self.table.counts().total(),
            0,
            "time frees what nobody frees"
        );
        self.now += 2 * DURATION;
        self.reap();
        assert_eq!(self.table.tombstones(), 0);
    }
}

#[test]
fn every_answer_of_a_million_histories_is_the_one_that_the_protocol_says() {
    let names = Names {
        transfers: (0..4).map(|n| TransferId(format!("t{n}"))).collect(),
        workers: (0..2).map(|n| WorkerId(format!("d{n}"))).collect(),
        runs: (0..2).map(|n| RunId(format!("r{n}"))).collect(),
    };
    let answers = Answers::default();
    let unknown = Spec {
        phase: Phase::Unknown,
        generation: 0,
        run: 0,
        expires_at: 0,
        skip: 0,
        blocks: 0,
        sealed: false,
        claim: None,
        completed: None,
        until: 0,
    };
    for_each_seed(HISTORIES, |seed| {
        let mut world = World {
            draw: Draw(seed),
            names: &names,
            table: LeaseTable::default(),
            now: 0,
            generations: 0,
            leases: vec![unknown.clone(); LEASES],
            processes: vec![Process::default(); names.workers.len()],
            answers: &answers,
        };
        for _ in 0..STEPS {
            world.step();
        }
        world.wind_up();
    });
    let met = |counter: &AtomicU64| counter.load(Ordering::Relaxed) > 0;
    for (reason, counter) in Gone::ALL.iter().zip(&answers.gone) {
        assert!(met(counter), "no history met {reason}");
    }
    assert!(met(&answers.granted) && met(&answers.accepted) && met(&answers.stale));
}
