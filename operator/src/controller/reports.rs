//! What workers said when they were last asked, and which of them have to be asked again.
//!
//! A worker is asked while its card is not known, often while it drains, and every minute otherwise: a pod at rest costs two small
//! requests a minute, and no write.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use baton_crds::labels as names;
use futures::StreamExt as _;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use parking_lot::Mutex;

use crate::pool::WorkerReport;
use crate::worker::Workers;

/// Of a registered worker.
const RE_READ: Duration = Duration::from_secs(60);
/// Of one that drains.
const WHILE_DRAINING: Duration = Duration::from_secs(1);
/// Longest pause between two tries to reach one that does not answer.
const LONGEST_PAUSE: Duration = Duration::from_secs(15);
/// Workers of one pool that are asked at a time.
const AT_A_TIME: usize = 16;
/// One look asks no longer than this, a third of its deadline. With more silent workers than that allows (2 s each, so 160), the rest is
/// asked in the next look, while these have their pause.
const WITHIN: Duration = Duration::from_secs(20);

/// Uid of a pod → what its worker said.
#[derive(Debug, Default)]
pub struct Reports {
    entries: Mutex<BTreeMap<String, Entry>>,
}

#[derive(Clone, Debug)]
struct Entry {
    report: WorkerReport,
    /// The start of the container that gave the report.
    container: String,
    read: Duration,
    /// Failures in a row, and the version of the pod at the last of them.
    failures: u32,
    version: Option<String>,
}

/// A worker's process that may answer.
#[derive(Clone, Debug)]
struct Process {
    address: IpAddr,
    container: String,
}

/// Who is asked.
#[derive(Clone, Debug)]
struct Asked {
    uid: String,
    version: Option<String>,
    process: Process,
}

impl Reports {
    /// Asks those workers of `pods` that are due at `now`, a time of the process's own clock.
    pub async fn refresh(&self, pods: &[Pod], workers: &Workers, now: Duration) {
        let ask = |address| async move {
            let (card, load) = tokio::join!(workers.card(address), workers.load(address));
            WorkerReport {
                card: card.map(Box::new).map_err(|error| error.to_string()),
                load: load.map_err(|error| error.to_string()),
            }
        };
        self.refresh_by(pods, ask, now).await;
    }

    async fn refresh_by<Asking: Future<Output = WorkerReport>>(
        &self,
        pods: &[Pod],
        ask: impl Fn(IpAddr) -> Asking,
        now: Duration,
    ) {
        let mut due: Vec<(Duration, Asked)> = {
            let entries = self.entries.lock();
            pods.iter()
                .filter_map(|pod| {
                    let process = process(pod)?;
                    let uid = pod.uid()?;
                    let due = due(pod, &process, entries.get(&uid));
                    let asked = Asked {
                        uid,
                        version: pod.resource_version(),
                        process,
                    };
                    (due <= now).then_some((due, asked))
                })
                .collect()
        };
        // Who was not asked in a look that was cut short comes before those who were.
        due.sort_by_key(|(due, _)| *due);
        let mut answers = futures::stream::iter(due)
            .map(|(_, asked)| {
                let asking = ask(asked.process.address);
                async move { (asked, asking.await) }
            })
            .buffer_unordered(AT_A_TIME);
        // Each counts as it comes: a look that is cut short has got on.
        let all = async {
            while let Some((asked, report)) = answers.next().await {
                let mut entries = self.entries.lock();
                let before = entries.remove(&asked.uid);
                entries.insert(asked.uid.clone(), next(before, asked, report, now));
            }
        };
        let _ = tokio::time::timeout(WITHIN, all).await;
    }

    /// What the workers of `pods` said, by the pod's name, and when one of them has to be asked again.
    #[must_use]
    pub fn of(&self, pods: &[Pod]) -> (BTreeMap<String, WorkerReport>, Option<Duration>) {
        let entries = self.entries.lock();
        let mut reports = BTreeMap::new();
        let mut next: Option<Duration> = None;
        for pod in pods {
            let Some(process) = process(pod) else {
                continue;
            };
            let entry = pod
                .metadata
                .uid
                .as_deref()
                .and_then(|uid| entries.get(uid))
                .filter(|entry| entry.container == process.container);
            let due = due(pod, &process, entry);
            next = Some(next.map_or(due, |known| known.min(due)));
            if let Some(entry) = entry {
                reports.insert(pod.name_any(), entry.report.clone());
            }
        }
        (reports, next)
    }

    /// Forgets pods that are not there any more. `there`: is a pod of this uid?
    pub fn retain(&self, there: impl Fn(&str) -> bool) {
        self.entries.lock().retain(|uid, _| there(uid));
    }
}

fn next(before: Option<Entry>, asked: Asked, mut report: WorkerReport, now: Duration) -> Entry {
    let container = asked.process.container;
    let before = before.filter(|entry| entry.container == container);
    let failed = report.card.is_err() || report.load.is_err();
    let failures = match &before {
        Some(before) if failed => before.failures.saturating_add(1),
        None if failed => 1,
        _ => 0,
    };
    // A card does not change while its process lives: one that was read stays.
    if let (Err(_), Some(Ok(card))) = (&report.card, before.map(|before| before.report.card)) {
        report.card = Ok(card);
    }
    Entry {
        report,
        container,
        read: now,
        failures,
        version: asked.version,
    }
}

/// When the worker has to be asked; in the past: now.
fn due(pod: &Pod, process: &Process, entry: Option<&Entry>) -> Duration {
    let Some(entry) = entry.filter(|entry| entry.container == process.container) else {
        return Duration::ZERO;
    };
    // Or it drained when it was last asked: it is told to take work again, and whether it does is to be seen soon.
    let told = entry.report.load.as_ref();
    let draining =
        pod.labels().contains_key(names::DRAINING) || told.is_ok_and(|load| load.draining);
    let pause = if entry.failures > 0 {
        // Something about the pod has changed since: it may answer now.
        if entry.version != pod.resource_version() {
            return Duration::ZERO;
        }
        (WHILE_DRAINING * 2_u32.saturating_pow(entry.failures.min(8) - 1)).min(LONGEST_PAUSE)
    } else if draining {
        WHILE_DRAINING
    } else {
        RE_READ
    };
    entry.read + pause
}

/// The worker's process, if it runs and may be reached.
fn process(pod: &Pod) -> Option<Process> {
    if pod.metadata.deletion_timestamp.is_some() {
        return None;
    }
    let status = pod.status.as_ref()?;
    // A sidecar where an engine is beside it.
    let containers = status
        .container_statuses
        .iter()
        .chain(&status.init_container_statuses);
    let running = containers
        .flatten()
        .find(|container| container.name == "worker")
        .filter(|container| {
            container
                .state
                .as_ref()
                .is_some_and(|state| state.running.is_some())
        })?;
    Some(Process {
        address: status.pod_ip.as_deref()?.parse().ok()?,
        container: running.container_id.clone().unwrap_or_default(),
    })
}

#[cfg(test)]
mod tests;
