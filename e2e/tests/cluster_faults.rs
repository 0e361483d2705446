//! What breaks under a running deployment on real nodes: a node's power, the operator, the API server, and the namespace itself.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use baton_e2e::cluster::installed::{Installed, NAMESPACE, SOON};
use baton_e2e::cluster::kubectl::condition;
use baton_e2e::cluster::load::{Asked, Load};
use baton_e2e::cluster::{quiet, service};
use baton_e2e::http::Client;
use baton_e2e::manifest::Manifest;
use baton_e2e::{scenario, told, wait};
use serde_json::Value;

/// The cluster gives a silent node 30 s before it says so, and what is lost on it goes some seconds after that.
const AFTER_POWER_LOSS: Duration = Duration::from_secs(180);

/// The last status follows the last pod within seconds.
const TO_REST: Duration = Duration::from_secs(60);

/// Hand-offs while a node loses power. A prefill takes 2 s, and one worker does one after the other: one of the clients always waits for KV.
const HAND_OFFS: Asked = Asked {
    clients: 3,
    prompt: 3000,
    tokens: 96,
    mode: Some("Disaggregated"),
};

/// A router knows within seconds that a worker is gone; what it plans again waits for three prefills once more.
const STREAMS_END: Duration = Duration::from_secs(90);

/// Leases are 3 s. A reader stops an eighth earlier than they end; they are looked through every 750 ms, and an idle worker reports every second.
const AFTER_LEASES: Duration = Duration::from_secs(15);

/// Two decode workers, on two nodes; pods leave a node that is gone at once instead of after five minutes.
fn manifest() -> String {
    let fleet = Manifest {
        decode_replicas: 2,
        ..Manifest::slow()
    };
    let template = "  topology: {spread: [host]}\n  template:\n    tolerations:\n    - {key: node.kubernetes.io/unreachable, operator: Exists, effect: NoExecute, tolerationSeconds: 1}\n";
    fleet
        .text()
        .replace("  engine: ", &format!("{template}  engine: "))
}

#[test]
fn what_is_lost_is_replaced_and_a_quiet_cluster_is_not_written_to() {
    scenario(async {
        // Two, one on each node: whichever node is lost, somebody is there to notice.
        let Some(baton) = Installed::to_break(2, &["operator.replicas=2"]).await? else {
            return Ok(());
        };
        baton.apply(&manifest())?;
        baton.ready()?;
        let on: BTreeSet<String> = baton
            .workers("decode")?
            .iter()
            .map(|pod| text(&pod["spec"]["nodeName"]))
            .collect();
        ensure!(
            on.len() == 2,
            "decode workers are spread over hosts: {on:?}"
        );

        nobody_writes(&baton).await?;
        operator_killed(&baton)?;
        api_server_restarted(&baton).await?;
        power_lost(&baton).await?;
        namespace_deleted(&baton)
    });
}

/// What the names of kubelets begin with.
const NODES: &str = "system:node:";

/// Writes of Baton's accounts and to Baton's objects.
struct Written {
    leases: u32,
    /// How often each other thing was written.
    others: BTreeMap<String, u32>,
    /// How long the log was.
    end: usize,
}

fn written(log: &Path, from: usize) -> Result<Written> {
    let text = std::fs::read_to_string(log)?;
    // The last line may be half written.
    let end = text.rfind('\n').map_or(0, |at| at + 1);
    let mut written = Written {
        leases: 0,
        others: BTreeMap::new(),
        end,
    };
    for line in text[from.min(end)..end].lines() {
        let event: Value = serde_json::from_str(line)?;
        let (who, what) = (&event["user"]["username"], &event["objectRef"]["resource"]);
        let ours = who
            .as_str()
            .is_some_and(|who| who.starts_with("system:serviceaccount:baton:"));
        let there = event["objectRef"]["namespace"] == NAMESPACE
            || event["objectRef"]["apiGroup"] == "serving.baton.dev";
        // A kubelet tells of a single late answer to a probe: that is how busy the machine is. What it makes of several, it writes to
        // the pod, and that is counted.
        if what == "events" && who.as_str().is_some_and(|who| who.starts_with(NODES)) {
            continue;
        }
        // Nodes renew leases of their own; asking who one is and what one may is no write.
        if what == "leases" && ours {
            written.leases += 1;
        } else if (ours || there)
            && what != "leases"
            && what != "tokenreviews"
            && what != "subjectaccessreviews"
        {
            let what = format!(
                "{who} {} {what} {}",
                event["verb"], event["objectRef"]["name"]
            );
            *written.others.entry(what).or_default() += 1;
        }
    }
    Ok(written)
}

/// Counted in the API server's own log of every write.
async fn nobody_writes(baton: &Installed) -> Result<()> {
    let log = baton.cluster.folder()?.join("logs/audit.jsonl");
    let mut from = usize::try_from(std::fs::metadata(&log)?.len())?;
    // What follows from the installation is told to its end first.
    wait::until("the cluster comes to rest", TO_REST, async || {
        tokio::time::sleep(Duration::from_secs(5)).await;
        let since = written(&log, from).map_err(|error| error.to_string())?;
        from = since.end;
        since
            .others
            .is_empty()
            .then_some(())
            .ok_or_else(|| format!("{:?}", since.others))
    })
    .await?;
    // The one wait for a length of time: that nothing happens cannot be seen earlier.
    tokio::time::sleep(quiet()).await;
    let Written {
        others: written,
        leases,
        ..
    } = written(&log, from)?;
    ensure!(
        written.is_empty(),
        "a quiet cluster was written to: {written:#?}"
    );
    ensure!(
        leases > 0,
        "the operator renews its lease, and the log has none of it"
    );
    let quiet = quiet();
    told(&format!(
        "at rest for {quiet:?}: 0 writes, {leases} renewals of the lease"
    ));
    Ok(())
}

/// Power off, as far as its pods know. The next one finds all as it is: nothing is made or deleted twice.
fn operator_killed(baton: &Installed) -> Result<()> {
    let before = workers(baton)?;
    let operators = "--selector=app.kubernetes.io/name=baton-operator";
    // The scale is changed while nobody looks.
    baton.run(&["delete", "pods", operators, "--grace-period=0", "--force"])?;
    baton.run(&["scale", "decodepool/decode", "--replicas=3"])?;
    baton.ready()?;
    baton.until("three serve", &["decodepool", "decode"], |pool| {
        ready_replicas(pool, 3)
    })?;
    let after = workers(baton)?;
    ensure!(
        before.is_subset(&after) && after.len() == before.len() + 1,
        "{before:?} became {after:?}"
    );
    baton.run(&["scale", "decodepool/decode", "--replicas=2"])?;
    baton.until("two serve", &["decodepool", "decode"], |pool| {
        ready_replicas(pool, 2)
    })
}

async fn api_server_restarted(baton: &Installed) -> Result<()> {
    let before = workers(baton)?;
    let load = Load::start(baton.api, Asked::short(2, 16));
    load.more(2).await?;
    baton.cluster.program("restart-api-server", &[])?;
    load.more(20).await?;
    load.all_well().await?;
    // Watches are there again: what changes is seen.
    baton.run(&["scale", "decodepool/decode", "--replicas=3"])?;
    baton.until("three serve", &["decodepool", "decode"], |pool| {
        ready_replicas(pool, 3)
    })?;
    let after = workers(baton)?;
    ensure!(before.is_subset(&after), "{before:?} became {after:?}");
    baton.run(&["scale", "decodepool/decode", "--replicas=2"])?;
    baton.until("two serve", &["decodepool", "decode"], |pool| {
        ready_replicas(pool, 2)
    })
}

/// Of the two nodes that which has no prefill worker, while KV is on its way to a decode worker there.
async fn power_lost(baton: &Installed) -> Result<()> {
    let prefill = baton.workers("prefill")?;
    let prefill = prefill.first().context("no prefill worker")?;
    let kept = text(&prefill["spec"]["nodeName"]);
    let lost = if kept == "node-2" { "1" } else { "2" };
    let gone: BTreeSet<String> = baton
        .workers("decode")?
        .iter()
        .filter(|pod| pod["spec"]["nodeName"] != kept.as_str())
        .map(|pod| text(&pod["metadata"]["name"]))
        .collect();
    ensure!(!gone.is_empty(), "all decode workers are on {kept}");
    let prefill = text(&prefill["metadata"]["name"]);

    let load = Load::start(router_on(baton, &kept).await?, HAND_OFFS);
    kv_on_its_way(baton, &prefill, &gone).await?;
    baton.cluster.program("node-down", &[lost])?;
    // It may go on elsewhere or end with an error. That it ends is what counts.
    let failed = tokio::time::timeout(STREAMS_END, load.end()).await;
    let failed = failed.context("a stream that was under way has no end")??;
    told(&format!(
        "when a node was lost, {} requests ended with an error: {failed:#?}",
        failed.len()
    ));
    let what = "nothing is held for a reader that is gone";
    wait::until_blocking(what, AFTER_LEASES, || {
        let held = baton.holds_nothing(&prefill);
        held.map_err(|error| format!("{error:#}"))
    })?;

    wait::until("its pods are replaced", AFTER_POWER_LOSS, async || {
        let pods = baton
            .workers("decode")
            .map_err(|error| format!("{error:#}"))?;
        let serving: Vec<_> = pods
            .iter()
            .filter(|pod| condition(pod, "Ready").0 == "True")
            .collect();
        if serving.len() == 2
            && serving
                .iter()
                .all(|pod| pod["spec"]["nodeName"] == kept.as_str())
        {
            Ok(())
        } else {
            Err(format!(
                "{} of {} decode pods are Ready",
                serving.len(),
                pods.len()
            ))
        }
    })
    .await?;
    // Routers know it too by now: nothing is sent to what is gone. One of them may have been there itself.
    baton.reachable().await?;
    let load = Load::start(baton.api, Asked::short(2, 16));
    load.more(10).await?;
    load.all_well().await?;
    let names = workers(baton)?;
    ensure!(
        names.is_disjoint(&gone),
        "a name was used again: {names:?} {gone:?}"
    );
    baton.cluster.program("node-up", &[lost])?;
    baton.ready()
}

/// A client of the router on that node alone: what is asked through another that is lost says nothing about workers.
async fn router_on(baton: &Installed, node: &str) -> Result<Client> {
    let routers = baton.list(&["pods", "--selector=app.kubernetes.io/name=baton-router"])?;
    let router = routers.iter().find(|pod| pod["spec"]["nodeName"] == node);
    let router = router.with_context(|| format!("no router is on {node}"))?;
    let pod = format!("pod/{}", text(&router["metadata"]["name"]));
    baton.run(&["label", &pod, "tried=stays"])?;
    baton.apply(STAYS)?;
    let stays = baton
        .cluster
        .expose("STAYS", &format!("{NAMESPACE}/stays"), "http")?;
    let what = "a Service leads to the router that stays";
    service::settled(what, SOON, stays, "/v1/models", |_| Ok(())).await?;
    Ok(stays)
}

const STAYS: &str = "{apiVersion: v1, kind: Service, metadata: {name: stays}, \
     spec: {selector: {tried: stays}, ports: [{name: http, port: 80, targetPort: http}]}}";

/// Waits until the prefill worker holds KV for others, and one that will be lost has a run.
async fn kv_on_its_way(baton: &Installed, prefill: &str, gone: &BTreeSet<String>) -> Result<()> {
    wait::until("KV is on its way to who will be lost", SOON, async || {
        let count = |worker: &str, field: &str| match baton.load(worker) {
            Ok(load) => Ok(load[field].as_u64().unwrap_or(0)),
            Err(error) => Err(format!("{error:#}")),
        };
        let leases = count(prefill, "leasesOpen")?;
        let mut runs = 0;
        for worker in gone {
            runs += count(worker, "runningSequences")?;
        }
        if leases > 0 && runs > 0 {
            Ok(())
        } else {
            Err(format!("{leases} leases, {runs} runs on {gone:?}"))
        }
    })
    .await
}

/// Nothing holds its end up, not even with nobody there to take anything back: no operator runs when it begins.
fn namespace_deleted(baton: &Installed) -> Result<()> {
    let operator = baton.list(&[
        "deployments",
        "--selector=app.kubernetes.io/name=baton-operator",
    ])?;
    let name = operator.first().context("no operator")?["metadata"]["name"]
        .as_str()
        .unwrap_or_default();
    baton.run(&["scale", &format!("deployment/{name}"), "--replicas=0"])?;
    baton
        .kubectl()
        .run(&["delete", "namespace", NAMESPACE, "--timeout=120s"])?;
    Ok(())
}

fn ready_replicas(pool: &Value, count: u64) -> Result<(), String> {
    if pool["status"]["readyReplicas"] == count
        && pool["status"]["replicas"] == count
        && pool["status"]["drainingReplicas"].as_u64().unwrap_or(0) == 0
    {
        Ok(())
    } else {
        Err(pool["status"].to_string())
    }
}

/// Names of all workers.
fn workers(baton: &Installed) -> Result<BTreeSet<String>> {
    let mut all = baton.workers("decode")?;
    all.extend(baton.workers("prefill")?);
    Ok(all
        .iter()
        .map(|pod| text(&pod["metadata"]["name"]))
        .collect())
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}
