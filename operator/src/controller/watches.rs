//! Watches: each fills a cache and tells what has changed. A watch that is cut is opened anew with a growing pause; meanwhile the cache
//! keeps what it had.

use std::fmt::Debug;
use std::hash::Hash;
use std::sync::Arc;

use futures::StreamExt as _;
use kube::runtime::WatchStreamExt as _;
use kube::runtime::reflector::store::Writer;
use kube::runtime::reflector::{ObjectRef, Store};
use kube::runtime::watcher::{self, Event};
use kube::{Api, Resource, ResourceExt as _};
use serde::de::DeserializeOwned;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::cause::innermost;
use crate::metrics::{KindLabels, Metrics};

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
    let mut events = std::pin::pin!(
        kube::runtime::watcher(api, config)
            .modify(|object| {
                object.managed_fields_mut().clear();
            })
            .default_backoff()
    );
    let mut faulty = false;
    loop {
        let event = tokio::select! {
            () = stop.cancelled() => return,
            event = events.next() => event,
        };
        match event {
            // The stream of a watcher does not end.
            None => return,
            Some(Err(error)) => {
                metrics
                    .watch_errors
                    .get_or_create(&KindLabels { kind })
                    .inc();
                if !std::mem::replace(&mut faulty, true) {
                    warn!(
                        kind,
                        error = innermost(&error),
                        "watch is cut, trying on: check the API server, the operator's ClusterRole and that the chart baton-crds is installed"
                    );
                }
            }
            Some(Ok(event)) => {
                if std::mem::take(&mut faulty) {
                    info!(kind, "watch is open again");
                }
                take(&store, &mut writer, &types, &event, &mut changed);
            }
        }
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
