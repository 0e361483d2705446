//! Watches: each fills a cache and tells what has changed. A watch that is cut is opened anew with a growing pause; meanwhile the cache
//! keeps what it had.
//!
//! The pause shrinks again once the API server has answered: with a whole list, or with a change. The client's own stream of events tells
//! of the intention to list, too, before it asks; the pauses that it offers shrink with that, and never grow.

use std::fmt::Debug;
use std::hash::Hash;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use kube::runtime::WatchStreamExt as _;
use kube::runtime::reflector::store::Writer;
use kube::runtime::reflector::{ObjectRef, Store};
use kube::runtime::utils::Backoff as _;
use kube::runtime::watcher::{self, DefaultBackoff, Event};
use kube::{Api, Resource, ResourceExt as _};
use serde::de::DeserializeOwned;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use crate::cause::innermost;
use crate::metrics::{KindLabels, Metrics};

/// HTTP's Gone.
const EXPIRED: u16 = 410;
/// A watch that is cut after so long without a fault is said to be. It may have been open meanwhile, and have had nothing to tell; the
/// pauses between two tries are shorter.
const SAID_AGAIN_AFTER: Duration = Duration::from_secs(120);

/// What a watch tells.
#[derive(Debug)]
pub enum Change<'a, K> {
    /// An object is new, has changed, or is gone (`now` is none).
    One {
        before: Option<Arc<K>>,
        now: Option<&'a K>,
        object: &'a K,
    },
    /// The cache was filled anew: what went meanwhile is in no other change.
    All,
}

/// What a watch has of its process: where faults are counted, and when to end.
#[derive(Clone, Debug)]
pub struct Process {
    pub metrics: Arc<Metrics>,
    pub stop: CancellationToken,
}

/// Fills the cache behind `writer` until the process stops.
pub async fn follow<K>(
    kind: &'static str,
    api: Api<K>,
    config: watcher::Config,
    mut writer: Writer<K>,
    types: K::DynamicType,
    process: Process,
    mut changed: impl FnMut(Change<'_, K>),
) where
    K: Resource + Clone + DeserializeOwned + Debug + Send + Sync + 'static,
    K::DynamicType: Eq + Hash + Clone,
{
    let Process { metrics, stop } = process;
    let store = writer.as_reader();
    let mut events = std::pin::pin!(kube::runtime::watcher(api, config).modify(|object| {
        object.managed_fields_mut().clear();
    }));
    // From 0.8 s, doubled up to 30 s, and up to as much again by chance.
    let mut pauses = DefaultBackoff::default();
    let mut fault: Option<Instant> = None;
    loop {
        let event = tokio::select! {
            () = stop.cancelled() => return,
            event = events.next() => event,
        };
        match event {
            // The stream of a watcher does not end.
            None => return,
            Some(Err(error)) => {
                if is_expired(&error) {
                    // The server no longer knows how its objects came to be as they are: nobody has to mend anything.
                    debug!(kind, "the watch is too old: listing anew");
                } else {
                    metrics
                        .watch_errors
                        .get_or_create(&KindLabels { kind })
                        .inc();
                    let now = Instant::now();
                    let before = fault.replace(now);
                    if before.is_none_or(|last| now.duration_since(last) > SAID_AGAIN_AFTER) {
                        warn!(
                            kind,
                            error = innermost(&error),
                            "watch is cut, trying on: check the API server, the operator's ClusterRole and that the chart baton-crds is installed"
                        );
                    }
                }
                let pause = pauses.next().unwrap_or_default();
                tokio::select! {
                    () = stop.cancelled() => return,
                    () = tokio::time::sleep(pause) => {}
                }
            }
            Some(Ok(event)) => {
                if !matches!(event, Event::Init | Event::InitApply(_)) {
                    pauses.reset();
                    if fault.take().is_some() {
                        info!(kind, "watch is open again");
                    }
                }
                take(&store, &mut writer, &types, &event, &mut changed);
            }
        }
    }
}

fn is_expired(error: &watcher::Error) -> bool {
    match error {
        watcher::Error::InitialListFailed(kube::Error::Api(status))
        | watcher::Error::WatchStartFailed(kube::Error::Api(status))
        | watcher::Error::WatchFailed(kube::Error::Api(status))
        | watcher::Error::WatchError(status) => status.code == EXPIRED,
        _ => false,
    }
}

fn take<K>(
    store: &Store<K>,
    writer: &mut Writer<K>,
    types: &K::DynamicType,
    event: &Event<K>,
    changed: &mut impl FnMut(Change<'_, K>),
) where
    K: Resource + Clone + 'static,
    K::DynamicType: Eq + Hash + Clone,
{
    let before = match event {
        Event::Apply(object) | Event::Delete(object) => {
            store.get(&ObjectRef::from_obj_with(object, types.clone()))
        }
        Event::Init | Event::InitApply(_) | Event::InitDone => None,
    };
    writer.apply_watcher_event(event);
    match event {
        Event::Apply(object) => changed(Change::One {
            before,
            now: Some(object),
            object,
        }),
        Event::Delete(object) => changed(Change::One {
            before,
            now: None,
            object,
        }),
        Event::InitDone => changed(Change::All),
        Event::Init | Event::InitApply(_) => {}
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use k8s_openapi::api::core::v1::Pod;
    use serde_json::json;

    use super::*;
    use crate::controller::imagined;

    /// How often the API server is asked in so long where it answers so, and how many of those count as errors.
    async fn tries(within: Duration, answer: fn() -> (u16, serde_json::Value)) -> (u32, u64) {
        let count = Arc::new(AtomicU32::new(0));
        let counts = Arc::clone(&count);
        let client = imagined::client(move |_, _, _| {
            counts.fetch_add(1, Ordering::Relaxed);
            answer()
        });
        let metrics: Arc<Metrics> = Arc::default();
        let process = Process {
            metrics: Arc::clone(&metrics),
            stop: CancellationToken::new(),
        };
        let pods: Api<Pod> = Api::all(client);
        let config = watcher::Config::default();
        let follow = follow("Pod", pods, config, Writer::new(()), (), process, |_| {});
        let ended = tokio::time::timeout(within, follow).await;
        assert!(ended.is_err(), "a watch does not end by itself");
        let errors = metrics
            .watch_errors
            .get_or_create(&KindLabels { kind: "Pod" })
            .get();
        (count.load(Ordering::Relaxed), errors)
    }

    /// Whoever lists once a second is one of hundreds that do when an API server can bear it least.
    #[tokio::test(start_paused = true)]
    async fn lists_that_are_refused_are_tried_with_growing_pauses() {
        let refused = || {
            (
                404,
                json!("the server could not find the requested resource"),
            )
        };
        let (tries, errors) = tries(Duration::from_secs(600), refused).await;
        assert!((8..40).contains(&tries), "{tries} in ten minutes");
        assert_eq!(errors, u64::from(tries));
    }

    /// An etcd that was compacted is no fault of anybody's.
    #[tokio::test(start_paused = true)]
    async fn a_watch_that_is_too_old_is_no_error() {
        let expired = || {
            let status = json!({"kind": "Status", "status": "Failure", "code": 410, "reason": "Expired", "message": "too old"});
            (410, status)
        };
        let (tries, errors) = tries(Duration::from_secs(600), expired).await;
        assert!((8..40).contains(&tries), "{tries} in ten minutes");
        assert_eq!(errors, 0);
    }
}
