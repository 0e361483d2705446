//! What an engine's own counter says of a hand-off that it fetched by itself: it may have given up and computed the prompt anew, and have
//! answered well all the same. Known with the worker's next reports, so a record waits for them; nobody who is served does.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use baton_placement::record::RunStatus;
use baton_protocol::ids::WorkerId;
use tokio::time::{Instant, timeout_at};

use super::Shared;
use crate::fleet::Workers;
use crate::fleet::fetches::FetchTicket;
use crate::learning::LinkUse;
use crate::records::build::Material;

/// Daemons report once a second at least, and two reports settle it.
const WITHIN: Duration = Duration::from_secs(3);
/// A worker that has not reported for as long is not waited for.
const SILENT: Duration = Duration::from_secs(2);

/// A hand-off that an engine was sent to fetch; what its counter says of it is kept apart until all of these are gone.
#[derive(Clone, Debug, PartialEq)]
pub struct Fetch(Arc<Watched>);

struct Watched {
    workers: Arc<Workers>,
    worker: WorkerId,
    ticket: FetchTicket,
}

impl fmt::Debug for Watched {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Watched")
            .field("worker", &self.worker)
            .field("ticket", &self.ticket)
            .finish_non_exhaustive()
    }
}

impl PartialEq for Watched {
    fn eq(&self, other: &Self) -> bool {
        self.ticket == other.ticket
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.workers.fetch_over(&self.worker, self.ticket, false);
    }
}

impl Fetch {
    /// `None`: the worker has not reported yet.
    pub(super) fn begins(
        workers: &Arc<Workers>,
        worker: &WorkerId,
        link: Option<LinkUse>,
    ) -> Option<Self> {
        let ticket = workers.fetch_begins(worker, link)?;
        let workers = workers.clone();
        Some(Self(Arc::new(Watched {
            workers,
            worker: worker.clone(),
            ticket,
        })))
    }

    /// The answer has begun: what failed from now on was another one.
    pub(super) fn over(&self) {
        let Watched {
            workers,
            worker,
            ticket,
        } = &*self.0;
        workers.fetch_over(worker, *ticket, true);
    }

    /// It has failed, and counts against its link already, or was given up from here.
    pub(super) fn charged(&self) {
        self.0.workers.fetch_charged(&self.0.worker, self.0.ticket);
    }

    /// Once the answer has ended: how many transfers have failed, if the worker says so in time and no other can be meant.
    async fn ended(&self) -> Option<u64> {
        self.over();
        let Watched {
            workers,
            worker,
            ticket,
        } = &*self.0;
        let reported = workers.reported(worker)?;
        let until = Instant::now() + WITHIN;
        loop {
            // Before the look: a report in between is then not waited for.
            let next = reported.notified();
            let (seen, age) = workers.fetch_seen(worker, *ticket)?;
            if seen.settled || seen.failed != Some(0) {
                return seen.failed;
            }
            let silent = Instant::now() + SILENT.checked_sub(age)?;
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
        material.progress.actual.failed_transfers = fetch.ended().await;
    }
    shared.records.keep(material);
}
