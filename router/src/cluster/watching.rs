//! One kind's objects, listed and watched for ever: what was seen last stays while the API server is away.

use std::fmt::Debug;
use std::hash::Hash;
use std::sync::Arc;
use std::time::Duration;

use futures::{Stream, StreamExt as _};
use kube::runtime::WatchStreamExt as _;
use kube::runtime::reflector::store::Writer;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Resource};
use serde::de::DeserializeOwned;
use tokio::time::Instant;
use tracing::{debug, info, warn};

use crate::causes::with_causes;
use crate::metrics::{KindLabels, Metrics};

/// HTTP's Gone.
const EXPIRED: u16 = 410;
/// A fault that comes again after so long without it is said again: longer than the longest pause between two tries.
const SAID_AGAIN_AFTER: Duration = Duration::from_secs(120);

/// All objects of a kind, after each change. `kind` is for logs and a metric's label.
pub(super) fn watched<K>(
    api: Api<K>,
    config: watcher::Config,
    dynamic: K::DynamicType,
    kind: &'static str,
    metrics: Arc<Metrics>,
) -> impl Stream<Item = Vec<Arc<K>>> + Send + 'static
where
    K: Resource + Clone + DeserializeOwned + Debug + Send + Sync + 'static,
    K::DynamicType: Eq + Hash + Clone + Send + Sync,
{
    let writer = Writer::new(dynamic);
    let objects = writer.as_reader();
    let mut faults = Faults::new(kind, metrics);
    watcher(api, config)
        .default_backoff()
        // Who wrote which field is a good part of an object, and of no use here.
        .modify(|object| object.meta_mut().managed_fields = None)
        .reflect(writer)
        .filter_map(move |event| {
            let seen = match event {
                Ok(Event::Apply(_) | Event::Delete(_) | Event::InitDone) => {
                    faults.over();
                    Some(objects.state())
                }
                // A list that is on its way replaces the last one when it is whole.
                Ok(Event::Init | Event::InitApply(_)) => None,
                Err(error) => {
                    faults.happened(&error);
                    None
                }
            };
            std::future::ready(seen)
        })
}

/// What keeps a kind from being watched: each try counts, and each reason is logged once.
struct Faults {
    kind: &'static str,
    metrics: Arc<Metrics>,
    said: Option<(String, Instant)>,
}

impl Faults {
    fn new(kind: &'static str, metrics: Arc<Metrics>) -> Self {
        Self {
            kind,
            metrics,
            said: None,
        }
    }

    fn happened(&mut self, error: &watcher::Error) {
        if code(error) == Some(EXPIRED) {
            // The server no longer knows how its objects came to be as they are: they are listed anew, and nobody has to mend anything.
            debug!(kind = self.kind, "the watch is too old: listing anew");
            return;
        }
        let labels = KindLabels { kind: self.kind };
        self.metrics.watch_errors.get_or_create(&labels).inc();
        let reason = with_causes(&error.to_string(), error);
        let now = Instant::now();
        let known = self.said.as_ref().is_some_and(|(said, last)| {
            *said == reason && now.duration_since(*last) < SAID_AGAIN_AFTER
        });
        if !known {
            let next_step = next_step(error);
            warn!(
                kind = self.kind,
                reason,
                "the API server cannot be watched: what it said last stays in force, it is tried again{next_step}"
            );
        }
        self.said = Some((reason, now));
    }

    fn over(&mut self) {
        if self.said.take().is_some() {
            info!(kind = self.kind, "the API server is watched again");
        }
    }
}

/// What a person can do about it; nothing where only waiting helps.
fn next_step(error: &watcher::Error) -> &'static str {
    match code(error) {
        Some(401 | 403) => ": give the router's service account get, list and watch of this kind",
        Some(404) => ": install the chart baton-crds",
        _ => "",
    }
}

fn code(error: &watcher::Error) -> Option<u16> {
    match error {
        watcher::Error::InitialListFailed(kube::Error::Api(status))
        | watcher::Error::WatchStartFailed(kube::Error::Api(status))
        | watcher::Error::WatchFailed(kube::Error::Api(status))
        | watcher::Error::WatchError(status) => Some(status.code),
        _ => None,
    }
}
