//! Load reports: what the engine last said of itself, numbered so that a router knows which of its dispatches are counted in.

use baton_protocol::wire;
use parking_lot::Mutex;

use super::scheduler::SchedulerLoad;
use crate::kv::KvPool;

/// Shared between the compute thread, which writes, and whoever reports. Never locked for longer than a copy.
#[derive(Debug)]
pub struct LoadBoard {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    sequence: u64,
    load: SchedulerLoad,
    /// Begin and predicted duration of the running step.
    step: Option<(f64, f64)>,
}

impl LoadBoard {
    pub(super) fn new() -> Self {
        Self {
            state: Mutex::new(State::default()),
        }
    }

    /// Writes the scheduler's numbers. Returns the number of the first report that will say so.
    pub(super) fn write(&self, load: SchedulerLoad) -> u64 {
        let mut state = self.state.lock();
        state.load = load;
        state.sequence + 1
    }

    pub(super) fn step_begins(&self, now: f64, predicted: f64) {
        self.state.lock().step = Some((now, predicted));
    }

    pub(super) fn step_ended(&self) {
        self.state.lock().step = None;
    }

    /// The numbers as they are, without making a report of them.
    pub fn current(&self) -> SchedulerLoad {
        self.state.lock().load
    }

    /// The next report at `now` milliseconds. Counts blocks by a full scan: for reports, not for each step.
    pub fn report(&self, now: f64, pool: &KvPool, draining: bool) -> wire::Load {
        let blocks = pool.counts();
        let leases = pool.lease_counts();
        let mut state = self.state.lock();
        state.sequence += 1;
        let remaining = state
            .step
            .map_or(0.0, |(begun, predicted)| (begun + predicted - now).max(0.0));
        wire::Load {
            load_sequence: state.sequence,
            queued_tokens: state.load.queued_tokens as u64,
            // What waits for its hand-off will decode here: whoever places by these numbers has to see it from its admission on.
            running_sequences: narrow(state.load.decoding + state.load.held),
            context_tokens: (state.load.context_tokens + state.load.held_tokens) as u64,
            queued_sequences: narrow(state.load.queued_sequences),
            blocks: Some(wire::BlockCounts {
                total: blocks.total,
                free: blocks.free,
                cached: blocks.cached,
                active: blocks.active,
                leased: blocks.leased,
                quarantined: blocks.quarantined,
                leaked: blocks.leaked,
            }),
            step_remaining_milliseconds: remaining,
            leases_open: leases.total(),
            draining,
            // Baton's own transports refuse a late read: nothing is served after its lease.
            late_reads: 0,
            failed_transfers: 0,
            expired_leases: 0,
            events_skipped: 0,
            event_gaps: 0,
            preemptions: 0,
            ended_transfers: 0,
        }
    }
}

fn narrow(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}
