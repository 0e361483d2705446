//! The whole way from an API server to lists and policies, against one that plays list and watch on loopback.
//!
//! - [`server`]: that server.

mod server;

use std::time::Duration;

use baton_protocol::hash::HashKey;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::task::JoinHandle;

use super::pods::tests::pod;
use super::*;
use crate::admin::readiness::Readiness;
use crate::fleet::artifacts::Artifacts;
use crate::learning::Learning;
use crate::policy::PolicyHandle;
use crate::run::{Dispatch, ModelListing, RunHandle, RunRequest, TextArtifacts};
use server::ApiServer;

/// Longer than any pause between two tries.
const SOON: Duration = Duration::from_secs(60);

/// A router's ear to the server, and what it has heard.
struct Ear {
    listed: watch::Receiver<Vec<Listed>>,
    policies: Arc<Policies>,
    readiness: Readiness,
    metrics: Arc<Metrics>,
    clock: Clock,
    stop: CancellationToken,
    task: JoinHandle<()>,
    _folder: TempDir,
}

impl Ear {
    fn at(server: &ApiServer) -> Self {
        let config = Config::new(server.address().parse().unwrap());
        let client = Client::try_from(config).unwrap();
        let levels = vec!["host".to_owned()];
        let cluster = Cluster::new(client, "n".to_owned(), levels);
        let folder = tempfile::tempdir().unwrap();
        let clock = Clock::start();
        let metrics = Arc::new(Metrics::new());
        let workers = Workers::new(
            clock,
            1,
            HashKey::from_bytes(&[0; 32]),
            Artifacts::new(folder.path().to_owned()),
            Arc::new(Learning::default()),
            metrics.clone(),
        );
        let (lists, listed) = watch::channel(Vec::new());
        let policies = Arc::new(Policies::default());
        let joining = Arc::new(Joining::default());
        let outlets = Outlets {
            lists,
            workers: Arc::new(workers),
            policies: policies.clone(),
            joining: joining.clone(),
            metrics: metrics.clone(),
            clock,
        };
        let stop = CancellationToken::new();
        Self {
            listed,
            policies,
            readiness: Readiness::Joining(joining),
            metrics,
            clock,
            task: tokio::spawn(cluster.follow(outlets, stop.clone())),
            stop,
            _folder: folder,
        }
    }

    fn workers(&self) -> Vec<String> {
        let listed = self.listed.borrow();
        listed
            .iter()
            .map(|worker| worker.name.to_string())
            .collect()
    }

    fn generation(&self, model: &str) -> Option<u64> {
        let policy = self.policies.in_force().set.of_model(model)?;
        Some(policy.generation)
    }

    fn ready(&self) -> Result<(), String> {
        self.readiness.look(&Idle, self.clock.now())
    }

    fn errors(&self, kind: &str) -> u64 {
        let name = format!("baton_cluster_watch_errors_total{{kind=\"{kind}\"}} ");
        let text = self.metrics.text().unwrap();
        let count = text.lines().find_map(|line| line.strip_prefix(&name));
        count.map_or(0, |count| count.parse().unwrap())
    }

    async fn end(self) {
        self.stop.cancel();
        self.task.await.unwrap();
    }
}

/// A router with nothing left to wait for.
#[derive(Debug)]
struct Idle;

impl Dispatch for Idle {
    fn policy(&self, _: &str) -> Option<Arc<PolicyHandle>> {
        None
    }

    fn models(&self) -> Vec<ModelListing> {
        Vec::new()
    }

    fn artifacts(&self, _: &PolicyHandle) -> Option<Arc<TextArtifacts>> {
        None
    }

    fn unserved(&self) -> Vec<String> {
        Vec::new()
    }

    fn ready(&self) -> Result<(), String> {
        Ok(())
    }

    fn start(&self, _: RunRequest) -> RunHandle {
        panic!("nothing is asked for here")
    }
}

async fn until(what: &str, holds: impl Fn() -> bool) {
    let looking = async {
        while !holds() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let found = tokio::time::timeout(SOON, looking).await;
    assert!(found.is_ok(), "{what}: not within {SOON:?}");
}

fn object(kind: &str, name: &str, generation: u64, spec: &Value) -> Value {
    json!({
        "apiVersion": "serving.baton.dev/v1alpha1", "kind": kind,
        "metadata": {"name": name, "namespace": "n", "generation": generation, "creationTimestamp": "2026-11-30T00:00:00Z"},
        "spec": spec,
    })
}

fn route(generation: u64, spec: &Value) -> Value {
    object("RoutePolicy", "chat", generation, spec)
}

fn good() -> Value {
    json!({"model": "m", "decodePools": [{"name": "decode"}]})
}

#[tokio::test]
async fn an_empty_cluster_is_ready_and_what_comes_into_it_is_seen() {
    let server = ApiServer::start().await;
    let ear = Ear::at(&server);
    until("the empty cluster is known", || ear.ready().is_ok()).await;
    assert_eq!((ear.workers().len(), ear.generation("m")), (0, None));

    server.put("routepolicies", &route(1, &good()));
    until("the policy is in force", || ear.generation("m") == Some(1)).await;
    server.put("pods", &pod("d-1"));
    until("the worker is listed", || ear.workers() == ["d-1"]).await;
    assert_eq!(
        ear.listed.borrow()[0].domains[0],
        ("host".to_owned(), Some("node-a".to_owned()))
    );

    let misspelt = json!({"model": "m", "decodePools": [{"name": "decode"}], "mod": "Aggregated"});
    server.put("routepolicies", &route(2, &misspelt));
    until("the policy is refused", || {
        !ear.policies.in_force().refused.is_empty()
    })
    .await;
    let in_force = ear.policies.in_force();
    let refusal = &in_force.refused[0];
    assert_eq!(
        (refusal.name.as_deref(), refusal.generation),
        (Some("chat"), Some(2))
    );
    assert!(refusal.reason.contains("spec.mod"), "{}", refusal.reason);
    assert_eq!(ear.generation("m"), Some(1), "the last good one serves");

    server.put("routepolicies", &route(3, &good()));
    until("it is mended", || ear.generation("m") == Some(3)).await;
    assert!(ear.policies.in_force().refused.is_empty());
    server.delete("routepolicies", "chat");
    until("it is gone", || ear.generation("m").is_none()).await;
    server.delete("pods", "d-1");
    until("the worker is gone", || ear.workers().is_empty()).await;
    ear.end().await;
}

#[tokio::test]
async fn what_was_seen_stays_while_the_server_is_away_and_what_was_missed_is_caught_up_with() {
    let server = ApiServer::start().await;
    server.put("routepolicies", &route(1, &good()));
    for name in ["d-1", "d-2"] {
        server.put("pods", &pod(name));
    }
    let ear = Ear::at(&server);
    until("all is known", || {
        ear.ready().is_ok() && ear.generation("m") == Some(1)
    })
    .await;
    assert_eq!(ear.workers(), ["d-1", "d-2"]);

    server.go_away();
    until("the cut is counted", || {
        ear.errors("WorkerPod") > 0 && ear.errors("RoutePolicy") > 0
    })
    .await;
    assert_eq!(ear.workers(), ["d-1", "d-2"]);
    assert_eq!((ear.generation("m"), ear.ready()), (Some(1), Ok(())));

    // Meanwhile the world goes on, and the server forgets how it came to be as it is.
    server.delete("pods", "d-1");
    server.put("pods", &pod("d-3"));
    server.put("routepolicies", &route(2, &good()));
    server.forget();
    server.come_back();
    until("the missed is seen", || ear.workers() == ["d-2", "d-3"]).await;
    until("the missed policy is in force", || {
        ear.generation("m") == Some(2)
    })
    .await;
    ear.end().await;
}

#[tokio::test]
async fn a_kind_that_may_not_be_read_keeps_the_router_from_being_ready_until_it_may() {
    let server = ApiServer::start().await;
    server.forbid("prefillpools", true);
    server.put("pods", &pod("d-1"));
    server.put("routepolicies", &route(1, &good()));
    let ear = Ear::at(&server);
    until("the refusal is counted", || ear.errors("PrefillPool") > 0).await;
    until("the others are seen all the same", || {
        ear.workers() == ["d-1"]
    })
    .await;
    let error = ear.ready().unwrap_err();
    assert!(error.contains("has not listed"), "{error}");
    assert_eq!(
        ear.generation("m"),
        None,
        "a policy is not read without its pools"
    );
    server.forbid("prefillpools", false);
    until("it is ready", || ear.ready().is_ok()).await;
    until("the policy is in force", || ear.generation("m") == Some(1)).await;
    ear.end().await;
}
