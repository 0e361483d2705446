//! An API server on loopback that plays list and watch: versions, label selectors, watches from a version, 410 for a forgotten one.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::{Query, State};
use axum::http::{StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use futures::stream;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;

/// Everything that the server holds.
#[derive(Debug, Default)]
struct Store {
    version: u64,
    /// By plural, by name.
    objects: BTreeMap<(String, String), Value>,
    /// Plural, version, event.
    log: Vec<(String, u64, Value)>,
    /// Watches from before this version are told 410.
    oldest: u64,
    away: bool,
    forbidden: BTreeSet<String>,
}

pub(super) struct ApiServer {
    address: String,
    shared: Arc<Shared>,
    _task: AbortOnDropHandle<()>,
}

#[derive(Debug)]
struct Shared {
    store: Mutex<Store>,
    /// Rises with each change of the store.
    changes: watch::Sender<u64>,
}

impl ApiServer {
    pub(super) async fn start() -> Self {
        let shared = Arc::new(Shared {
            store: Mutex::default(),
            changes: watch::Sender::new(0),
        });
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let routes = Router::new().fallback(answer).with_state(shared.clone());
        let task = tokio::spawn(async move { axum::serve(listener, routes).await.unwrap() });
        Self {
            address,
            shared,
            _task: AbortOnDropHandle::new(task),
        }
    }

    pub(super) fn address(&self) -> &str {
        &self.address
    }

    fn change<T>(&self, change: impl FnOnce(&mut Store) -> T) -> T {
        let changed = change(&mut self.shared.store.lock());
        self.shared.changes.send_modify(|count| *count += 1);
        changed
    }

    pub(super) fn put(&self, plural: &str, object: &Value) {
        self.change(|store| {
            store.version += 1;
            let mut object = object.clone();
            object["metadata"]["resourceVersion"] = json!(store.version.to_string());
            let name = object["metadata"]["name"].as_str().unwrap().to_owned();
            let known = store
                .objects
                .insert((plural.to_owned(), name), object.clone());
            let kind = if known.is_some() { "MODIFIED" } else { "ADDED" };
            let event = json!({"type": kind, "object": object});
            store.log.push((plural.to_owned(), store.version, event));
        });
    }

    pub(super) fn delete(&self, plural: &str, name: &str) {
        self.change(|store| {
            store.version += 1;
            let key = (plural.to_owned(), name.to_owned());
            let mut object = store.objects.remove(&key).unwrap();
            object["metadata"]["resourceVersion"] = json!(store.version.to_string());
            let event = json!({"type": "DELETED", "object": object});
            store.log.push((plural.to_owned(), store.version, event));
        });
    }

    /// Every watch is cut and every request fails.
    pub(super) fn go_away(&self) {
        self.change(|store| store.away = true);
    }

    pub(super) fn come_back(&self) {
        self.change(|store| store.away = false);
    }

    /// As etcd's compaction: only the present is known.
    pub(super) fn forget(&self) {
        self.change(|store| {
            store.log.clear();
            store.oldest = store.version;
        });
    }

    pub(super) fn forbid(&self, plural: &str, forbidden: bool) {
        self.change(|store| {
            if forbidden {
                store.forbidden.insert(plural.to_owned());
            } else {
                store.forbidden.remove(plural);
            }
        });
    }
}

fn failure(code: u16, reason: &str) -> Response {
    let status = json!({
        "kind": "Status", "apiVersion": "v1", "status": "Failure", "message": format!("{reason} here"), "reason": reason, "code": code,
    });
    (StatusCode::from_u16(code).unwrap(), axum::Json(status)).into_response()
}

async fn answer(
    State(shared): State<Arc<Shared>>,
    uri: Uri,
    Query(query): Query<HashMap<String, String>>,
) -> Response {
    let (folder, plural) = uri.path().rsplit_once('/').unwrap();
    let expected = match plural {
        "pods" => "/api/v1/namespaces/n",
        "routepolicies" | "prefillpools" | "decodepools" => {
            "/apis/serving.baton.dev/v1alpha1/namespaces/n"
        }
        _ => return failure(404, "NotFound"),
    };
    assert_eq!(folder, expected, "{plural}");
    let selector = query.get("labelSelector").cloned().unwrap_or_default();
    let store = shared.store.lock();
    if store.away {
        return failure(500, "InternalError");
    }
    if store.forbidden.contains(plural) {
        return failure(403, "Forbidden");
    }
    if query.contains_key("watch") {
        let from = query["resourceVersion"].parse().unwrap();
        drop(store);
        return watching(shared, plural.to_owned(), selector, from);
    }
    let items: Vec<&Value> = store
        .objects
        .iter()
        .filter(|((of, _), object)| of == plural && selected(object, &selector))
        .map(|(_, object)| object)
        .collect();
    let version = store.version.to_string();
    axum::Json(json!({"kind": "List", "apiVersion": "v1", "metadata": {"resourceVersion": version}, "items": items}))
        .into_response()
}

/// `name` or `name=value`.
fn selected(object: &Value, selector: &str) -> bool {
    if selector.is_empty() {
        return true;
    }
    let (name, value) = selector.split_once('=').unwrap_or((selector, ""));
    let found = object["metadata"]["labels"][name].as_str();
    found.is_some_and(|found| value.is_empty() || found == value)
}

/// Events from a version on, one line each, until the server goes away.
fn watching(shared: Arc<Shared>, plural: String, selector: String, from: u64) -> Response {
    let changes = shared.changes.subscribe();
    let lines = stream::unfold((changes, from, false), move |(mut changes, from, over)| {
        let (shared, plural, selector) = (shared.clone(), plural.clone(), selector.clone());
        async move {
            loop {
                if over {
                    return None;
                }
                let next = {
                    let store = shared.store.lock();
                    if store.away {
                        return None;
                    }
                    if from < store.oldest {
                        let status = json!({"kind": "Status", "status": "Failure", "code": 410, "reason": "Expired", "message": "too old"});
                        let line = format!("{}\n", json!({"type": "ERROR", "object": status}));
                        return Some((Ok::<_, std::io::Error>(line), (changes, from, true)));
                    }
                    let mut log = store.log.iter();
                    log.find(|(of, version, event)| {
                        *of == plural && *version > from && selected(&event["object"], &selector)
                    })
                    .cloned()
                };
                if let Some((_, version, event)) = next {
                    return Some((Ok(format!("{event}\n")), (changes, version, false)));
                }
                if changes.changed().await.is_err() {
                    return None;
                }
            }
        }
    });
    Body::from_stream(lines).into_response()
}
