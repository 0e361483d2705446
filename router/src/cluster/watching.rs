//! One kind's objects, listed and watched for ever: what was seen last stays while the API server is away.

use std::fmt::Debug;
use std::hash::Hash;
use std::sync::Arc;
use std::time::Duration;

use futures::{Stream, StreamExt as _};
use kube::runtime::WatchStreamExt as _;
use kube::runtime::reflector::store::Writer;
use kube::runtime::utils::Backoff as _;
use kube::runtime::watcher::{self, DefaultBackoff, Event, watcher};
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
    // From 0.8 s, doubled up to 30 s, and up to as much again by chance. A list that is only begun does not end them, as it would with
    // the client's own way.
    let mut pauses = DefaultBackoff::default();
    watcher(api, config)
        // Who wrote which field is a good part of an object, and of no use here.
        .modify(|object| object.meta_mut().managed_fields = None)
        .reflect(writer)
        .filter_map(move |event| {
            let (seen, pause) = match event {
                Ok(Event::Apply(_) | Event::Delete(_) | Event::InitDone) => {
                    faults.over();
                    pauses.reset();
                    (Some(objects.state()), None)
                }
                // A list that is on its way replaces the last one when it is whole.
                Ok(Event::Init | Event::InitApply(_)) => (None, None),
                Err(error) => {
                    faults.happened(&error);
                    (None, pauses.next())
                }
            };
            async move {
                if let Some(pause) = pause {
                    tokio::time::sleep(pause).await;
                }
                seen
            }
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

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::sync::atomic::{AtomicU32, Ordering};

    use http::{Request, Response, StatusCode};
    use http_body_util::Full;
    use k8s_openapi::api::core::v1::Pod;
    use kube::Client;
    use kube::client::Body;

    use super::*;

    /// Whoever lists once a second is one of hundreds that do when an API server can bear it least.
    #[tokio::test(start_paused = true)]
    async fn lists_that_are_refused_are_tried_with_growing_pauses() {
        let count = Arc::new(AtomicU32::new(0));
        let counts = Arc::clone(&count);
        let service = tower::service_fn(move |_: Request<Body>| {
            counts.fetch_add(1, Ordering::Relaxed);
            let mut answer = Response::new(Full::new(bytes::Bytes::from("{}")));
            *answer.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
            std::future::ready(Ok::<_, Infallible>(answer))
        });
        let pods: Api<Pod> = Api::namespaced(Client::new(service, "n"), "n");
        let config = watcher::Config::default();
        let metrics = Arc::new(Metrics::new());
        let lists = watched(pods, config, (), "Pod", Arc::clone(&metrics));
        let mut lists = std::pin::pin!(lists);
        let ten_minutes = Duration::from_secs(600);
        let heard = tokio::time::timeout(ten_minutes, lists.next()).await;
        assert!(heard.is_err(), "there is nothing to tell");
        let tries = count.load(Ordering::Relaxed);
        assert!((8..40).contains(&tries), "{tries} in ten minutes");
        let counted = format!("baton_cluster_watch_errors_total{{kind=\"Pod\"}} {tries}");
        let text = metrics.text().unwrap();
        assert!(text.contains(&counted), "{text}");
    }
}
