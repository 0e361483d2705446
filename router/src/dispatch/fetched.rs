//! What an engine's own counter says of a hand-off that it fetched by itself: it may have given up and computed the prompt anew, and have
//! answered well all the same. Known with the worker's next reports, so a record waits for them; nobody who is served does.

use std::time::Duration;

use baton_placement::record::RunStatus;
use baton_protocol::ids::{Incarnation, WorkerId};
use tokio::time::{Instant, timeout_at};

use super::Shared;
use crate::fleet::Workers;
use crate::records::build::Material;

/// The first report after an answer may have been made before its end; daemons report once a second at least.
const REPORTS: u64 = 2;
const WITHIN: Duration = Duration::from_secs(3);
/// A worker that has not reported for as long is not waited for.
const SILENT: Duration = Duration::from_secs(2);

/// The counter as it was when the engine was sent to fetch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fetch {
    worker: WorkerId,
    incarnation: Incarnation,
    failed: u64,
}

/// A report.
#[derive(Clone, Copy, Debug)]
struct Report {
    sequence: u64,
    failed: u64,
    age: Duration,
}

impl Fetch {
    /// `None`: the worker has not reported yet.
    pub(super) fn begins(workers: &Workers, worker: &WorkerId) -> Option<Self> {
        workers.with_tracked(|tracked| {
            let tracked = tracked.get(worker)?;
            Some(Self {
                worker: worker.clone(),
                incarnation: tracked.card.as_ref()?.incarnation,
                failed: tracked.load?.failed_transfers,
            })
        })
    }

    fn report(&self, workers: &Workers) -> Option<Report> {
        let now = workers.clock.now();
        workers.with_tracked(|tracked| {
            let tracked = tracked.get(&self.worker)?;
            let same = tracked.card.as_ref()?.incarnation == self.incarnation;
            let load = tracked.load.filter(|_| same)?;
            Some(Report {
                sequence: load.load_sequence,
                failed: load.failed_transfers.saturating_sub(self.failed),
                age: now.since(tracked.load_at),
            })
        })
    }

    /// Once the answer has ended: how far the counter has risen, if the worker says so in time.
    async fn ended(&self, workers: &Workers) -> Option<u64> {
        let first = self.report(workers)?;
        let reported = workers.reported(&self.worker)?;
        let until = Instant::now() + WITHIN;
        loop {
            // Before the look: a report in between is then not waited for.
            let next = reported.notified();
            let report = self.report(workers)?;
            if report.failed > 0 || report.sequence >= first.sequence.saturating_add(REPORTS) {
                return Some(report.failed);
            }
            let silent = Instant::now() + SILENT.checked_sub(report.age)?;
            timeout_at(until.min(silent), next).await.ok()?;
        }
    }
}

/// Keeps a run's record once all is known that it says.
pub(super) async fn keep(shared: &Shared, material: Option<Material>) {
    let Some(mut material) = material else {
        return;
    };
    let completed = material.outcome.status == RunStatus::Completed;
    let fetch = material.progress.actual.fetch.take();
    if let Some(fetch) = fetch.filter(|_| completed) {
        material.progress.actual.failed_transfers = fetch.ended(&shared.workers).await;
    }
    shared.records.keep(material);
}
