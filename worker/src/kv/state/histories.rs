//! Random histories of everything that can happen to a pool, with its invariants checked after each step. Seeds are fixed; a failure
//! names its seed.

use std::collections::{HashMap, HashSet};

use baton_protocol::hash::BlockHash;
use baton_protocol::ids::{Generation, Incarnation, LeaseId, RunId, TransferId, WorkerId};

use super::tests::config;
use super::{CacheScope, PoolState, Proof, ReservationId, Reserve};
use crate::kv::draw::{Draw, for_each_seed};
use crate::kv::events::{CacheChange, EventsSince};
use crate::kv::lease::one_sided::OneSidedRead;
use crate::kv::lease::{Completion, Gone, LeaseOpen, Next, Reader};
use crate::kv::store::BlockId;

/// Histories in the suite; each checks every block after every step. The lease protocol alone is checked over a million elsewhere.
const HISTORIES: u64 = 200_000;
const STEPS: usize = 40;
const BLOCKS: usize = 12;
const DURATION: u64 = 100;

struct Request {
    id: ReservationId,
    tokens: Vec<u32>,
    salt: usize,
    leased: bool,
}

/// What the outside world remembers of a lease, kept apart from the table under test.
#[derive(Clone)]
struct Known {
    id: LeaseId,
    generation: Generation,
    /// Not later than this, unless renewed.
    expires_at: u64,
    /// Ended by somebody.
    ended: bool,
}

struct World {
    draw: Draw,
    state: PoolState,
    now: u64,
    requests: Vec<Request>,
    leases: Vec<Known>,
    /// One-sided reads that their backends have not ended.
    reads: Vec<OneSidedRead>,
    /// Full content of each use of a block, to compare hits with.
    contents: HashMap<(BlockId, Generation), (usize, Vec<u32>)>,
    /// Uses of a block whose bytes nobody compared with their checksum.
    unchecked: HashSet<(BlockId, Generation)>,
    seen: u64,
    findable: HashSet<BlockHash>,
}

impl World {
    fn new(seed: u64) -> Self {
        Self {
            draw: Draw(seed),
            state: PoolState::new(config(BLOCKS)),
            now: 0,
            requests: Vec::new(),
            leases: Vec::new(),
            reads: Vec::new(),
            contents: HashMap::new(),
            unchecked: HashSet::new(),
            seen: 0,
            findable: HashSet::new(),
        }
    }

    fn step(&mut self) {
        match self.draw.below(21) {
            0..=3 => self.reserve(),
            4..=8 => self.fill(),
            9 => self.open(),
            10 => self.seal(),
            11 => self.release(),
            12..=14 => self.lease_message(),
            15 => self.one_sided(),
            16 => self.end(),
            17 => self.now += self.draw.below(60) as u64,
            18 => {
                self.state.reap(self.now);
                let held: HashSet<_> = self.reads.iter().map(OneSidedRead::lease).collect();
                assert!(
                    self.state
                        .quarantine
                        .keys()
                        .all(|lease| held.contains(lease))
                );
            }
            19 => self.extend(),
            _ => match self.draw.below(8) {
                0 => self.state.clear_cache(),
                _ => self.grow(),
            },
        }
        self.check();
    }

    /// A prompt from a small language, so that prompts share prefixes.
    fn prompt(&mut self) -> Vec<u32> {
        let length = 1 + self.draw.below(18);
        let branch = self.draw.below(length + 1);
        let word = self.draw.below(2) as u32;
        (0..length)
            .map(|position| if position < branch { 1 } else { 2 + word })
            .collect()
    }

    fn reserve(&mut self) {
        let tokens = self.prompt();
        let salt = self.draw.below(2);
        let scope = CacheScope::salted(["", "tenant"][salt]);
        let leave_last = self.draw.below(2) == 0;
        let before = self.state.counts();
        let reserve = Reserve {
            tokens: &tokens,
            scope: &scope,
            room: self.draw.below(6),
            leave_last,
        };
        let spare = self.draw.below(6) / 3;
        let reserved = self.state.reserve(&reserve, spare);
        let reserved = match reserved {
            Ok(reserved) => reserved,
            Err(full) => {
                assert!(full.needed > full.available);
                assert_eq!(self.state.counts(), before, "a refusal changes nothing");
                return;
            }
        };
        assert!(!leave_last || reserved.cached_blocks * 4 < tokens.len());
        assert!(self.state.blocks.available() >= spare);
        for (index, block) in reserved.blocks[..reserved.cached_blocks].iter().enumerate() {
            let generation = self.state.blocks.generation(*block);
            assert_eq!(
                self.contents.get(&(*block, generation)),
                Some(&(salt, tokens[..(index + 1) * 4].to_vec())),
                "a hit is the content asked for"
            );
            assert!(
                !self.unchecked.contains(&(*block, generation)),
                "nobody is offered what nobody checked"
            );
        }
        self.requests.push(Request {
            id: reserved.id,
            tokens,
            salt,
            leased: false,
        });
    }

    fn fill(&mut self) {
        if self.requests.is_empty() {
            return;
        }
        let at = self.draw.below(self.requests.len());
        let request = &self.requests[at];
        let index = self.state.reservations[&request.id].completed;
        if let Some(tokens) = request.tokens.chunks_exact(4).nth(index) {
            let block = self.state.reservations[&request.id].blocks[index];
            let proof = match self.draw.below(6) {
                0 => Proof::Promised(index as u64),
                _ => Proof::Checked(index as u64),
            };
            let kept = self
                .state
                .complete(request.id, index, tokens, proof)
                .expect("in order");
            let content = (request.salt, request.tokens[..(index + 1) * 4].to_vec());
            if kept == block {
                let generation = self.state.blocks.generation(block);
                self.contents.insert((block, generation), content);
                if matches!(proof, Proof::Promised(_)) {
                    self.unchecked.insert((block, generation));
                }
            } else {
                let generation = self.state.blocks.generation(kept);
                assert_eq!(self.contents[&(kept, generation)], content);
            }
        }
    }

    fn grow(&mut self) {
        let more = self.draw.below(12);
        if let Some(request) = self.draw.of(&self.requests) {
            let _ = self.state.grow(request.id, request.tokens.len() + more);
        }
    }

    fn open(&mut self) {
        let number = self.leases.len();
        if self.requests.is_empty() {
            return;
        }
        let at = self.draw.below(self.requests.len());
        let open = LeaseOpen {
            id: LeaseId([number as u8; 16]),
            run: RunId(format!("run{}", number % 3)),
            duration: DURATION,
            skip_blocks: self.draw.below(3) as u32,
        };
        let request = &mut self.requests[at];
        let opened = self.state.open_lease(request.id, &open, self.now);
        assert_eq!(
            opened.is_err(),
            request.leased,
            "one lease for a reservation"
        );
        if let Ok(opened) = opened {
            request.leased = true;
            self.leases.push(Known {
                id: open.id,
                generation: opened.generation,
                expires_at: self.now + DURATION,
                ended: false,
            });
        }
    }

    fn extend(&mut self) {
        let Some(request) = self.draw.of(&self.requests) else {
            return;
        };
        let held = &self.state.reservations[&request.id];
        let (lease, sealed) = (held.lease, held.sealed);
        let extended = self.state.extend_lease(request.id, self.now);
        let known = self.leases.iter_mut().find(|one| Some(one.id) == lease);
        match known {
            Some(known) if extended => {
                assert!(!sealed && !known.ended && self.now < known.expires_at);
                known.expires_at = self.now + DURATION;
            }
            _ => assert!(!extended, "no lease, and extended"),
        }
    }

    fn seal(&mut self) {
        if let Some(request) = self.draw.of(&self.requests) {
            let sealable =
                self.state.reservations[&request.id].completed == request.tokens.len() / 4;
            let sealed = self
                .state
                .seal(request.id, request.tokens.len(), 5, self.now);
            assert!(sealable || sealed.is_err());
        }
    }

    fn release(&mut self) {
        if !self.requests.is_empty() {
            let at = self.draw.below(self.requests.len());
            let request = self.requests.swap_remove(at);
            self.state.release(request.id, self.now);
        }
        self.learn_ends();
    }

    fn reader(&mut self) -> Reader {
        let number = self.draw.below(3);
        Reader {
            transfer: TransferId(format!("t{number}")),
            worker: WorkerId::from("d"),
            // Now and then the reading process restarts.
            incarnation: Incarnation((self.draw.below(12) == 0).into()),
        }
    }

    fn lease_message(&mut self) {
        let reader = self.reader();
        if self.leases.is_empty() {
            return;
        }
        let at = self.draw.below(self.leases.len());
        let known = self.leases[at].clone();
        let generation = Generation(known.generation.0 + u64::from(self.draw.below(8) == 0));
        let wrong = generation != known.generation;
        let over = known.ended || self.now >= known.expires_at;
        let granted = match self.draw.below(4) {
            0 => self
                .state
                .leases
                .claim(known.id, generation, &reader, self.now),
            1 => self
                .state
                .leases
                .renew(known.id, generation, &reader.transfer, self.now),
            2 => {
                let next =
                    self.state
                        .leases
                        .next(known.id, generation, &reader.transfer, 1, self.now);
                if over || wrong {
                    assert!(matches!(next, Next::Gone(_)), "{next:?}");
                }
                return;
            }
            _ => {
                let verified = self.draw.below(2) == 0;
                let completion = self.state.complete_read(
                    known.id,
                    generation,
                    &reader.transfer,
                    verified,
                    self.now,
                );
                let live = !over && !wrong;
                if completion == Completion::Accepted {
                    self.leases[at].ended = true;
                    // Alive until now, or a repetition of the message that ended it.
                    assert!(live || self.state.leases.live().all(|lease| lease.id != known.id));
                }
                return;
            }
        };
        if let Ok(granted) = granted {
            assert!(!over, "granted after the end");
            assert!(!wrong, "granted for another generation");
            assert_eq!(granted.for_milliseconds, DURATION);
            self.leases[at].expires_at = self.now + granted.for_milliseconds;
        }
    }

    fn one_sided(&mut self) {
        let reader = self.reader();
        if self.leases.is_empty() {
            return;
        }
        if !self.reads.is_empty() && self.draw.below(2) == 0 {
            let at = self.draw.below(self.reads.len());
            let read = self.reads.swap_remove(at);
            // Reported, or the connection goes without a word.
            if self.draw.below(2) == 0 {
                self.state.one_sided_end(read);
            }
            return;
        }
        let known = self.draw.of(&self.leases).expect("not empty");
        let begun =
            self.state
                .one_sided_begin(known.id, known.generation, &reader.transfer, self.now);
        if let Ok(read) = begun {
            assert!(!known.ended && self.now < known.expires_at);
            self.reads.push(read);
        }
    }

    fn end(&mut self) {
        let run = RunId(format!("run{}", self.draw.below(3)));
        match self.draw.of(&self.leases) {
            Some(known) if known.id.0[0] % 2 == 0 => {
                let id = known.id;
                self.state.release_lease(id, &run, self.now);
            }
            _ => {
                self.state.cancel_run(&run, self.now);
            }
        }
        self.learn_ends();
    }

    fn learn_ends(&mut self) {
        let live: HashSet<_> = self.state.leases.live().map(|lease| lease.id).collect();
        for known in &mut self.leases {
            known.ended |= !live.contains(&known.id);
        }
    }

    fn check(&mut self) {
        let mut owners = vec![(0, 0); BLOCKS];
        for held in self.state.reservations.values() {
            for block in &held.blocks {
                owners[block.index()].0 += 1;
            }
        }
        for block in self.state.leases.held() {
            owners[block.index()].1 += 1;
        }
        for quarantined in self.state.quarantine.values() {
            for block in &quarantined.blocks {
                owners[block.index()].1 += 1;
            }
        }
        self.state.blocks.check(&owners);
        for lease in self.state.leases.live() {
            for entry in &lease.manifest {
                assert_eq!(
                    self.state.blocks.header(entry.block),
                    entry.header,
                    "what the manifest promises lies beside the block"
                );
            }
        }
        for read in &self.reads {
            let lease = read.lease();
            assert!(
                self.state.quarantine.contains_key(&lease)
                    || self.state.leases.live().any(|live| live.id == lease),
                "blocks under a one-sided read are held, whatever time it is"
            );
        }
        let counts = self.state.counts();
        assert_eq!(counts.leaked, 0, "{counts:?}");
        let parts =
            counts.free + counts.cached + counts.active + counts.leased + counts.quarantined;
        assert_eq!(parts, counts.total, "{counts:?}");
        self.watch();
    }

    /// A watcher that applies each event knows what a snapshot would say.
    fn watch(&mut self) {
        let EventsSince::Events(events) = self.state.events.since(self.seen) else {
            panic!("the log is long enough");
        };
        for event in events {
            assert_eq!(event.sequence, self.seen + 1, "dense");
            self.seen = event.sequence;
            match event.change {
                CacheChange::Stored(hashes) => {
                    for hash in hashes {
                        assert!(self.findable.insert(hash), "stored twice");
                    }
                }
                CacheChange::Removed(hashes) => {
                    for hash in hashes {
                        assert!(self.findable.remove(&hash), "removed but never stored");
                    }
                }
                CacheChange::Cleared => self.findable.clear(),
            }
        }
        let snapshot: HashSet<_> = self.state.blocks.hashes().into_iter().collect();
        assert_eq!(snapshot, self.findable);
    }

    /// Everybody goes away: nothing may stay behind.
    fn wind_up(&mut self) {
        for request in std::mem::take(&mut self.requests) {
            self.state.release(request.id, self.now);
        }
        self.reads.clear();
        self.now += DURATION;
        self.state.reap(self.now);
        self.check();
        let counts = self.state.counts();
        assert_eq!(counts.free + counts.cached, counts.total, "{counts:?}");
        assert_eq!(self.state.leases.counts().total(), 0);
        for known in self.leases.clone() {
            let late = self.reader();
            let claim = self
                .state
                .leases
                .claim(known.id, known.generation, &late, self.now);
            assert!(claim.is_err(), "a late claim meets a tombstone");
            let next =
                self.state
                    .leases
                    .next(known.id, known.generation, &late.transfer, 0, self.now);
            assert!(matches!(next, Next::Gone(gone) if gone != Gone::NotClaimed));
        }
        self.now += 2 * DURATION;
        self.state.reap(self.now);
        assert_eq!(self.state.leases.tombstones(), 0);
    }
}

#[test]
fn no_history_breaks_an_invariant() {
    for_each_seed(HISTORIES, |seed| {
        let mut world = World::new(seed);
        for _ in 0..STEPS {
            world.step();
        }
        world.wind_up();
    });
}
