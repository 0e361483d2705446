//! From readings of a server's metrics to load reports and fitted costs. Pure.

use baton_placement::calibration::{StepShape, WorkerCalibrator, WorkerCoefficients};
use baton_protocol::wire;

use super::exposition::Reading;
use super::index::Counts;
use crate::kv::BlockCounts;

/// Prompt tokens of a request that waits, before any prompt was seen.
const UNSEEN_PROMPT: f64 = 512.0;

/// What a report is made of besides the reading.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Beside {
    /// Blocks of the prefix index.
    pub(crate) cached: usize,
    pub(crate) counts: Counts,
    pub(crate) gaps: u64,
    pub(crate) draining: bool,
    /// Leases of Baton's connector that live; of NIXL, which does not count them, one for all.
    pub(crate) leases: u32,
    /// Of Baton's connector: leases that nobody came for, and hand-offs that were given up here: those that failed, and
    /// those whose owner had ended the lease.
    pub(crate) expired: u64,
    pub(crate) failed: u64,
    pub(crate) ended: u64,
    /// Of Baton's connector: its own memory, beside the server's.
    pub(crate) staging: BlockCounts,
}

/// One life's reports.
#[derive(Debug)]
pub(crate) struct Reporter {
    blocks: u32,
    block_size: u32,
    sequence: u64,
    last: Option<Reading>,
    speed: Speed,
}

/// What is known of the server's speed. The first step of each kind that is seen says how far the prior is off: nobody knows on what
/// device a server runs, and a fit is slow to come from an order of magnitude away.
#[derive(Debug)]
struct Speed {
    calibrator: WorkerCalibrator,
    prefill_seen: bool,
    decode_seen: bool,
}

impl Speed {
    fn observe(&mut self, step: &StepShape, milliseconds: f64) {
        let prefill = step.tokens > 0;
        let seen = if prefill {
            &mut self.prefill_seen
        } else {
            &mut self.decode_seen
        };
        if !std::mem::replace(seen, true) {
            let factor = milliseconds / self.calibrator.predict(step);
            let now = self.calibrator.coefficients();
            let scaled = if prefill {
                WorkerCoefficients {
                    a: now.a * factor,
                    b: now.b * factor,
                    k: now.k * factor,
                    floor: 0.0,
                    ..now
                }
            } else {
                WorkerCoefficients {
                    d0: now.d0 * factor,
                    d1: now.d1 * factor,
                    d2: now.d2 * factor,
                    ..now
                }
            };
            if scaled.is_sound() {
                self.calibrator = WorkerCalibrator::new(scaled);
            }
        }
        self.calibrator.observe(step, milliseconds);
    }
}

impl Reporter {
    /// `blocks` of the device, of so many tokens.
    pub(crate) fn new(blocks: u32, block_size: u32, prior: WorkerCoefficients) -> Self {
        Self {
            blocks,
            block_size,
            sequence: 0,
            last: None,
            speed: Speed {
                calibrator: WorkerCalibrator::new(prior),
                prefill_seen: false,
                decode_seen: false,
            },
        }
    }

    /// Of the last reading: another one is another process of the server.
    pub(crate) fn process_start(&self) -> Option<f64> {
        self.last.as_ref().and_then(|last| last.process_start)
    }

    pub(crate) fn coefficients(&self) -> WorkerCoefficients {
        self.speed.calibrator.coefficients()
    }

    /// A report of this reading, and what it says of the server's speed since the last one.
    pub(crate) fn report(&mut self, reading: Reading, beside: Beside) -> wire::Load {
        let context = self.context(&reading);
        if let Some(last) = &self.last {
            learn(&mut self.speed, last, &reading, context);
        }
        self.sequence += 1;
        let used =
            whole(reading.kv_usage * f64::from(self.blocks)).min(u64::from(self.blocks)) as u32;
        let cached = u32::try_from(beside.cached)
            .unwrap_or(u32::MAX)
            .min(self.blocks - used);
        let prompt = reading.prompts.mean().unwrap_or(UNSEEN_PROMPT);
        let load = wire::Load {
            load_sequence: self.sequence,
            queued_tokens: whole(reading.waiting * prompt),
            running_sequences: narrow(reading.running),
            context_tokens: context,
            // Those whose KV is to come have no tokens to compute here.
            queued_sequences: narrow(reading.waiting + reading.fetching),
            blocks: Some(wire::BlockCounts {
                total: self.blocks,
                free: self.blocks - used - cached,
                cached,
                // Those that a lease of NIXL or SGLang holds are among them: the server does not tell them apart.
                active: used,
                // The server's blocks are free again once they are copied into the staging: these are not among the total.
                leased: beside.staging.active + beside.staging.leased,
                quarantined: beside.staging.quarantined,
                leaked: beside.staging.leaked,
            }),
            step_remaining_milliseconds: 0.0,
            leases_open: beside.leases.saturating_add(narrow(reading.unsent)),
            draining: beside.draining,
            late_reads: whole(reading.late_reads),
            failed_transfers: whole(reading.failed_transfers) + beside.failed,
            expired_leases: whole(reading.expired) + beside.expired,
            events_skipped: beside.counts.hidden(),
            event_gaps: beside.gaps,
            preemptions: whole(reading.preemptions),
            ended_transfers: beside.ended,
        };
        self.last = Some(reading);
        load
    }

    /// Tokens that running sequences hold, by the memory that they use.
    fn context(&self, reading: &Reading) -> u64 {
        whole(reading.kv_usage * f64::from(self.blocks) * f64::from(self.block_size))
    }
}

/// Two readings tell a step's length where only one kind of work was done between them, and nothing waited: what the server counts
/// includes the wait.
fn learn(speed: &mut Speed, before: &Reading, now: &Reading, context: u64) {
    if before.process_start != now.process_start {
        return;
    }
    let first = now.first_tokens.since(before.first_tokens);
    let between = now.between_tokens.since(before.between_tokens);
    let computed = (now.computed - before.computed).max(0.0);
    let found = (now.found - before.found).max(0.0);
    let taken_over = (now.taken_over - before.taken_over).max(0.0);
    let waited = [before, now]
        .iter()
        .any(|reading| reading.waiting + reading.fetching > 0.0);
    let alone = !waited && taken_over == 0.0;
    if let Some(seconds) = first.mean().filter(|_| alone && computed > 0.0) {
        let mut step = StepShape::default();
        step.add_chunk(narrow(computed / first.count), narrow(found / first.count));
        step.sequences = narrow(before.running);
        speed.observe(&step, seconds * 1e3);
    }
    if let Some(seconds) = between
        .mean()
        .filter(|_| computed == 0.0 && taken_over == 0.0)
    {
        let step = StepShape {
            sequences: narrow(now.running.max(before.running)).max(1),
            context,
            ..StepShape::default()
        };
        speed.observe(&step, seconds * 1e3);
    }
}

fn whole(value: f64) -> u64 {
    // A float's cast keeps to the range of the integer.
    value.max(0.0).round() as u64
}

fn narrow(value: f64) -> u32 {
    value.max(0.0).round() as u32
}

#[cfg(test)]
mod tests {
    use baton_placement::calibration::built_in;

    use super::*;
    use crate::beside::exposition::Sum;

    fn reporter() -> Reporter {
        Reporter::new(100, 32, built_in("h100-8b-tp1").unwrap())
    }

    #[test]
    fn a_report_says_what_was_read_and_estimates_what_waits() {
        let mut reporter = reporter();
        let reading = Reading {
            running: 3.0,
            waiting: 2.0,
            kv_usage: 0.25,
            prompts: Sum {
                sum: 300.0,
                count: 3.0,
            },
            late_reads: 1.0,
            failed_transfers: 2.0,
            ..Reading::default()
        };
        let beside = Beside {
            cached: 90,
            draining: true,
            gaps: 4,
            failed: 5,
            ended: 6,
            staging: BlockCounts {
                total: 16,
                cached: 2,
                active: 3,
                leased: 4,
                quarantined: 5,
                leaked: 1,
                ..BlockCounts::default()
            },
            ..Beside::default()
        };
        let load = reporter.report(reading.clone(), beside);
        assert_eq!((load.running_sequences, load.queued_sequences), (3, 2));
        assert_eq!(load.queued_tokens, 200);
        assert_eq!(load.context_tokens, 25 * 32);
        let blocks = load.blocks.unwrap();
        let counts = (blocks.total, blocks.active, blocks.cached, blocks.free);
        assert_eq!(counts, (100, 25, 75, 0));
        let staged = (blocks.leased, blocks.quarantined, blocks.leaked);
        assert_eq!(staged, (7, 5, 1), "what hand-offs hold");
        let counted = (load.late_reads, load.failed_transfers, load.event_gaps);
        assert_eq!(counted, (1, 7, 4));
        assert_eq!(load.ended_transfers, 6, "beside those that failed");
        assert!(load.draining);
        assert_eq!(reporter.report(reading, beside).load_sequence, 2);
    }

    #[test]
    fn what_is_on_its_way_between_two_servers_is_queued_without_tokens_or_still_to_be_read() {
        let reading = Reading {
            waiting: 1.0,
            fetching: 2.0,
            unsent: 3.0,
            prompts: Sum {
                sum: 100.0,
                count: 1.0,
            },
            ..Reading::default()
        };
        let beside = Beside {
            leases: 4,
            ..Beside::default()
        };
        let load = reporter().report(reading, beside);
        assert_eq!((load.queued_sequences, load.queued_tokens), (3, 100));
        assert_eq!(load.leases_open, 7);
    }

    /// Prompts of 1000 tokens take a second and steps take 40 ms: the costs come near, and a queue says nothing.
    #[test]
    fn costs_are_learnt_from_what_was_done_alone() {
        let mut reporter = reporter();
        let prior = reporter.coefficients();
        let mut reading = Reading {
            running: 1.0,
            ..Reading::default()
        };
        for round in 0..200 {
            let prefills = round % 2 == 0;
            if prefills {
                reading.computed += 1000.0;
                reading.first_tokens.sum += 1.0;
                reading.first_tokens.count += 1.0;
            } else {
                reading.between_tokens.sum += 0.4;
                reading.between_tokens.count += 10.0;
            }
            reporter.report(reading.clone(), Beside::default());
        }
        let learnt = reporter.coefficients();
        assert!(learnt.is_sound());
        let prefill = learnt.a + 1000.0 * learnt.b + learnt.k * 500_000.0;
        assert!((900.0..1100.0).contains(&prefill), "{learnt:?}");
        let step = learnt.d0 + learnt.d1;
        assert!((35.0..45.0).contains(&step), "{learnt:?}");
        let before = learnt.samples;
        assert!(before.prefill > 50 && before.decode > 50);
        assert_eq!(prior.samples.total(), 0);

        reading.waiting = 5.0;
        reporter.report(reading.clone(), Beside::default());
        reading.computed += 1000.0;
        reading.first_tokens.sum += 60.0;
        reading.first_tokens.count += 1.0;
        reporter.report(reading, Beside::default());
        assert_eq!(reporter.coefficients().samples, before);
    }
}
