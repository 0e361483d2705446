//! The pool under thousands of orders of the threads that share it: compute, a reader, another request, the router, the reaper.
//!
//! The pool is the one that serves; only the taking of its locks lets the checker in. Beside each property stands its negative
//! control: the same model with one rule broken, in which the checker must find the fault. One that finds none checks nothing.

use std::sync::Arc;

use baton_protocol::hash::HashKey;
use baton_protocol::ids::{Generation, Incarnation, LeaseId, RunId, TransferId, WorkerId};
use shuttle::thread::{self, JoinHandle};

use super::*;
use crate::kv::clock::ManualClock;
use crate::kv::sync::checker;
use crate::kv::{CacheScope, Geometry};

const BLOCK_SIZE: usize = 4;
const BLOCKS: usize = 4;
const DURATION: u64 = 100;
const LEASE: LeaseId = LeaseId([1; 16]);
/// Of the first lease of a pool.
const GENERATION: Generation = Generation(1);
/// Orders of a model that must hold, and of one that must not: the second ends with the first fault.
const ORDERS: usize = 20_000;
const AT_MOST: usize = 100_000;
/// Times that a thread looks again for what another has to do first. It gives up then, which is no fault.
const PATIENCE: usize = 60;

/// The rule that is broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Broken {
    Nothing,
    /// The reader looks at the header before the bytes and not after.
    HeaderAfter,
    /// The reaper notes what has expired, and ends it later without looking again.
    ReapAtOnce,
    /// The backend says that a one-sided read is over while it goes on.
    EndOfRead,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reading {
    /// Through the lease, block by block, with headers.
    Asking,
    /// Without asking, under a one-sided read.
    OneSided,
}

/// What a thread found wrong.
type Finding = Result<(), String>;

#[derive(Clone)]
struct World {
    pool: KvPool,
    clock: Arc<ManualClock>,
    broken: Broken,
}

fn tokens() -> Vec<u32> {
    vec![1; 10]
}

/// What the block of these tokens, and of those before it, must hold.
fn content(prefix: &[u32]) -> u8 {
    prefix.iter().fold(7_u8, |sum, token| {
        sum.wrapping_mul(31).wrapping_add(*token as u8)
    })
}

fn expected(index: usize) -> u8 {
    let tokens = tokens();
    content(&tokens[..tokens.len().min((index + 1) * BLOCK_SIZE)])
}

fn reader() -> Reader {
    Reader {
        transfer: TransferId::from("t"),
        worker: WorkerId::from("d"),
        incarnation: Incarnation(1),
    }
}

impl World {
    fn new(broken: Broken) -> Self {
        let clock = Arc::new(ManualClock::default());
        let config = PoolConfig {
            geometry: Geometry {
                block_size: BLOCK_SIZE,
                bytes_per_token: 16,
            },
            blocks: BLOCKS,
            kv_identity: "tiny".to_owned(),
            layout: 3,
            hash_key: HashKey::from_bytes(&[1; 32]),
            event_capacity: 64,
        };
        let pool = KvPool::new(config, u64::MAX, clock.clone()).expect("a small pool");
        Self {
            pool,
            clock,
            broken,
        }
    }

    fn spawn(&self, thread: fn(&Self) -> Finding) -> JoinHandle<Finding> {
        let world = self.clone();
        thread::spawn(move || thread(&world))
    }

    fn reserve(&self, tokens: &[u32]) -> Option<Reservation> {
        let reserve = Reserve {
            tokens,
            scope: &CacheScope::default(),
            room: 0,
            leave_last: true,
        };
        (0..PATIENCE).find_map(|_| self.pool.reserve(&reserve).ok())
    }

    /// Computes what the reservation lacks.
    fn fill(&self, reservation: &mut Reservation, tokens: &[u32]) -> Finding {
        for index in reservation.completed_blocks()..tokens.len() / BLOCK_SIZE {
            let end = (index + 1) * BLOCK_SIZE;
            let byte = content(&tokens[..end]);
            self.pool
                .store()
                .write(reservation.blocks()[index])
                .fill(byte);
            self.pool
                .complete_block(reservation, index, &tokens[end - BLOCK_SIZE..end])
                .map_err(|error| error.to_string())?;
        }
        Ok(())
    }

    /// A prefill for the reader, then a request that wants every block.
    fn compute(&self) -> Finding {
        let tokens = tokens();
        if let Some(mut reservation) = self.reserve(&tokens) {
            let open = LeaseOpen {
                id: LEASE,
                run: RunId::from("run"),
                duration: DURATION,
                skip_blocks: 0,
            };
            let opened = self.pool.open_lease(&mut reservation, &open);
            opened.map_err(|error| error.to_string())?;
            self.fill(&mut reservation, &tokens)?;
            let last = reservation.blocks()[tokens.len() / BLOCK_SIZE];
            self.pool.store().write(last).fill(content(&tokens));
            // It may have ended meanwhile.
            let _ = self.pool.seal(&reservation, tokens.len());
        }
        let others = [9; BLOCKS * BLOCK_SIZE];
        let Some(mut reservation) = self.reserve(&others) else {
            return Ok(());
        };
        self.fill(&mut reservation, &others)
    }

    /// A request with the same beginning.
    fn rival(&self) -> Finding {
        let tokens = tokens();
        let Some(mut reservation) = self.reserve(&tokens) else {
            return Ok(());
        };
        self.fill(&mut reservation, &tokens)?;
        for (index, block) in reservation.blocks()[..2].iter().enumerate() {
            let bytes = self.pool.store().read(*block).to_vec();
            right(index, &bytes)?;
        }
        Ok(())
    }

    /// Until when the reader may count on the lease.
    fn claim(&self) -> Option<u64> {
        (0..PATIENCE).find_map(|_| {
            let asked = self.clock.now();
            let granted = self.pool.claim(LEASE, GENERATION, &reader()).ok()?;
            Some(asked + granted.for_milliseconds)
        })
    }

    fn ask(&self) -> Finding {
        let Some(mut until) = self.claim() else {
            return Ok(());
        };
        let transfer = reader().transfer;
        let mut next = 0;
        for _ in 0..PATIENCE {
            let asked = self.clock.now();
            if let Ok(granted) = self.pool.renew(LEASE, GENERATION, &transfer) {
                until = asked + granted.for_milliseconds;
            }
            match self.pool.next_block(LEASE, GENERATION, &transfer, next) {
                Next::Wait => {}
                Next::Block { entry, .. } => {
                    let before = self.pool.header(entry.block);
                    let bytes = self.pool.store().read(entry.block).to_vec();
                    let after = self.pool.header(entry.block);
                    let whole = after == entry.header || self.broken == Broken::HeaderAfter;
                    if before != entry.header || !whole {
                        return Ok(());
                    }
                    right(next as usize, &bytes)?;
                    next += 1;
                }
                Next::Sealed { .. } => {
                    self.pool.complete_read(LEASE, GENERATION, &transfer, true);
                    return Ok(());
                }
                Next::Gone(Gone::Expired) if self.clock.now() < until => {
                    return Err(EXPIRED.to_owned());
                }
                Next::Gone(_) => return Ok(()),
            }
        }
        Ok(())
    }

    fn look(&self) -> Finding {
        if self.claim().is_none() {
            return Ok(());
        }
        let transfer = reader().transfer;
        let Ok(read) = self.pool.one_sided_begin(LEASE, GENERATION, &transfer) else {
            return Ok(());
        };
        let mut read = Some(read);
        let mut found = Ok(());
        for index in 0..3 {
            let Next::Block { entry, .. } =
                self.pool.next_block(LEASE, GENERATION, &transfer, index)
            else {
                break;
            };
            if self.broken == Broken::EndOfRead {
                read = None;
            }
            // Whatever has become of the lease by now.
            for _ in 0..4 {
                let bytes = self.pool.store().read(entry.block).to_vec();
                found = found.and(right(index as usize, &bytes));
            }
        }
        if let Some(read) = read {
            self.pool.one_sided_end(read);
        }
        found
    }

    fn router(&self) -> Finding {
        thread::yield_now();
        self.pool.cancel_run(&RunId::from("run"));
        Ok(())
    }

    fn reaper(&self) -> Finding {
        for _ in 0..3 {
            thread::yield_now();
            self.clock.advance(DURATION * 3 / 5);
            if self.broken == Broken::ReapAtOnce {
                let expired = self.pool.with(|state, now| {
                    let late = state.leases.live().filter(|lease| lease.expired(now));
                    late.map(|lease| lease.id).collect::<Vec<_>>()
                });
                for lease in expired {
                    self.pool
                        .with(|state, now| state.end_lease(lease, Gone::Expired, now));
                }
            } else {
                self.pool.reap();
            }
        }
        Ok(())
    }

    /// All have gone: nothing is held, and every block is accounted for.
    fn end(&self) -> Finding {
        self.clock.advance(3 * DURATION);
        self.pool.reap();
        self.pool
            .with(|state, _| state.blocks.check(&[(0, 0); BLOCKS]));
        let counts = self.pool.counts();
        if counts.free + counts.cached == counts.total && self.pool.lease_counts().total() == 0 {
            Ok(())
        } else {
            Err(format!("something stays behind: {counts:?}"))
        }
    }
}

fn right(index: usize, bytes: &[u8]) -> Finding {
    if bytes.iter().all(|byte| *byte == expected(index)) {
        Ok(())
    } else {
        Err(format!("block {index} {TAKEN}"))
    }
}

/// What the two kinds of broken rules come to.
const TAKEN: &str = "was taken for what it is not";
const EXPIRED: &str = "the lease expired within what was granted";

fn model(reading: Reading, broken: Broken) {
    let world = World::new(broken);
    let threads = [
        world.spawn(World::compute),
        world.spawn(match reading {
            Reading::Asking => World::ask,
            Reading::OneSided => World::look,
        }),
        world.spawn(World::reaper),
        world.spawn(match broken {
            // A fault is found sooner among few.
            Broken::Nothing => World::rival,
            _ => |_| Ok(()),
        }),
        world.spawn(match broken {
            Broken::ReapAtOnce => |_| Ok(()),
            _ => World::router,
        }),
    ];
    let mut findings: Vec<String> = threads
        .into_iter()
        .filter_map(|thread| match thread.join() {
            Ok(finding) => finding.err(),
            Err(_) => Some("a thread has panicked".to_owned()),
        })
        .collect();
    findings.extend(world.end().err());
    assert!(findings.is_empty(), "{findings:?}");
}

#[test]
fn no_order_of_threads_gives_wrong_bytes_or_leaves_anything_behind() {
    for reading in [Reading::Asking, Reading::OneSided] {
        let holds = checker::holds(ORDERS, move || model(reading, Broken::Nothing));
        assert_eq!(holds, Ok(()), "{reading:?}");
    }
}

#[test]
fn the_checker_finds_each_rule_that_is_broken() {
    for (reading, broken, finding) in [
        (Reading::Asking, Broken::HeaderAfter, TAKEN),
        (Reading::Asking, Broken::ReapAtOnce, EXPIRED),
        (Reading::OneSided, Broken::EndOfRead, TAKEN),
    ] {
        let found = checker::holds(AT_MOST, move || model(reading, broken));
        let found = found.expect_err("a broken rule holds");
        assert!(found.contains(finding), "{broken:?}: {found}");
    }
}
