//! A look at a pool against an API server that refuses some of it.

use std::sync::Arc;

use baton_crds::PoolRole;
use kube::runtime::watcher::Event;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::*;
use crate::controller::caches::Caches;
use crate::controller::events::Events;
use crate::controller::imagined;
use crate::controller::reports::Reports;
use crate::controller::routers::Routers;
use crate::controller::writes::Writes;
use crate::lease::Claim;
use crate::objects::Guarded;
use crate::pool::Settings;
use crate::worker::Workers;

/// A look at a pool of two replicas and no pods. What came of it, and what was written: verb and path.
async fn looked(
    answer: impl Fn(&str, &str) -> Option<(u16, Value)> + Clone + Send + Sync + 'static,
) -> (Result<Looked, Fault>, Vec<String>, Arc<Context>, PoolKey) {
    let written = Arc::new(Mutex::new(Vec::new()));
    let writes = Arc::clone(&written);
    let client = imagined::client(move |verb, path, body| {
        writes.lock().push(format!("{verb} {path}"));
        answer(verb, path).unwrap_or_else(|| {
            let mut made = body.clone();
            made["metadata"]["uid"] = made["metadata"]["name"].clone();
            made["metadata"]["resourceVersion"] = json!("1");
            (201, made)
        })
    });
    let (caches, mut fillers) = Caches::new();
    let pool: Guarded<Pool> = serde_json::from_value(json!({
        "metadata": {"name": "d", "namespace": "n", "uid": "d", "generation": 1},
        "spec": {
            "replicas": 2, "model": {"name": "m", "source": {"uri": "builtin://tiny"}},
            "engine": {"type": "Builtin", "image": "worker:1"},
        },
    }))
    .unwrap();
    fillers.decode.apply_watcher_event(&Event::Apply(pool));
    let claim = Arc::new(Claim::default());
    claim.extend(Duration::from_secs(3600));
    let metrics = Arc::new(crate::metrics::Metrics::default());
    let context = Arc::new(Context {
        caches,
        writes: Writes::new(client, claim, Arc::clone(&metrics)),
        events: Events::new("test".to_owned()),
        metrics,
        settings: Settings {
            worker_image: None,
            levels: Vec::new(),
        },
        workers: Workers::default(),
        reports: Reports::default(),
        routers: Routers::default(),
        memory: Mutex::default(),
        unreadable_policies: Mutex::default(),
        start: Instant::now(),
    });
    let key = PoolKey {
        role: PoolRole::Decode,
        namespace: "n".to_owned(),
        name: "d".to_owned(),
    };
    let looked = look(Arc::clone(&context), key.clone()).await;
    let written = written.lock().clone();
    (looked, written, context, key)
}

fn is_status(path: &str) -> bool {
    path.ends_with("/decodepools/d/status")
}

fn pods(written: &[String]) -> usize {
    let pod = |write: &&String| *write == "POST /api/v1/namespaces/n/pods";
    written.iter().filter(pod).count()
}

#[tokio::test]
async fn a_pool_whose_status_is_refused_is_looked_after_all_the_same() {
    let (looked, written, ..) = looked(|_, path| {
        is_status(path).then(|| {
            (
                422,
                json!("status.domains: Too many: 300: must have at most 256 items"),
            )
        })
    })
    .await;
    assert_eq!(pods(&written), 2, "{written:?}");
    let fault = looked.unwrap_err().to_string();
    assert!(fault.contains("status.domains: Too many"), "{fault}");
}

#[tokio::test]
async fn nothing_is_done_for_a_pool_that_another_of_its_name_has_replaced() {
    let (looked, written, ..) =
        looked(|_, path| is_status(path).then(|| (409, json!("Precondition failed: UID")))).await;
    assert_eq!((pods(&written), looked.is_err()), (0, true), "{written:?}");
}

#[tokio::test]
async fn a_refused_creation_is_forgotten_once_no_pod_is_wanted_any_more() {
    let is_pod = |path: &str| path == "/api/v1/namespaces/n/pods";
    let (_, written, context, key) =
        looked(move |_, path| is_pod(path).then(|| (403, json!("exceeded quota")))).await;
    assert_eq!(pods(&written), 1, "what refuses one refuses the next");
    let memory = context.memory_of(&key);
    let known = memory.lock().creation_error.clone();
    assert_eq!(known.and_then(|error| error.code), Some(403));
    execute(&context, &key, Vec::new(), &memory).await.unwrap();
    assert_eq!(memory.lock().creation_error, None);
}

#[tokio::test]
async fn a_pod_of_somebody_else_under_a_name_that_was_drawn_is_not_adopted_and_another_is_drawn() {
    const PODS: &str = "/api/v1/namespaces/n/pods";
    let taken = Arc::new(Mutex::new(Vec::new()));
    let (asked, tries) = (Arc::clone(&taken), Arc::new(Mutex::new(0)));
    let created = Arc::clone(&tries);
    let (first, .., context, key) = looked(move |verb, path| {
        if verb == "POST" && path == PODS {
            *created.lock() += 1;
            return (*created.lock() == 1).then(|| (409, json!("pods already exists")));
        }
        let name = path.strip_prefix(&format!("{PODS}/"))?;
        asked.lock().push(name.to_owned());
        // With the pool's labels, and another owner.
        Some((
            200,
            json!({
                "apiVersion": "v1", "kind": "Pod",
                "metadata": {
                    "name": name, "namespace": "n", "uid": "theirs", "resourceVersion": "7",
                    "labels": {"serving.baton.dev/pool": "d", "serving.baton.dev/role": "decode"},
                    "ownerReferences": [{
                        "apiVersion": "serving.baton.dev/v1alpha1", "kind": "DecodePool", "name": "d",
                        "uid": "an earlier pool of this name", "controller": true,
                    }],
                },
            }),
        ))
    })
    .await;
    let known = || -> Vec<String> {
        let memory = context.memory_of(&key);
        let pods = memory.lock().pending.overlay(std::iter::empty());
        pods.iter().map(|pod| pod.name_any()).collect()
    };
    let counted = || {
        let current = pool_labels(&key, "current");
        context.metrics.pool_replicas.get_or_create(&current).get()
    };
    assert!(first.is_err(), "it is looked at again");
    assert_eq!((known(), *tries.lock()), (vec![], 1));

    look(Arc::clone(&context), key.clone()).await.unwrap();
    let taken = taken.lock().clone();
    assert_eq!(taken.len(), 1, "whose it is was asked once: {taken:?}");
    let made = known();
    assert_eq!((made.len(), *tries.lock()), (2, 3), "{made:?}");
    assert!(!made.contains(&taken[0]), "{taken:?} is not the pool's");
    assert_eq!(counted(), 0, "the stranger was planned with");

    look(Arc::clone(&context), key.clone()).await.unwrap();
    assert_eq!((counted(), *tries.lock()), (2, 3), "its own two are enough");
}
