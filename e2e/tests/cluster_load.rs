//! What is done to pods while clients are served by them, on real nodes: no client notices.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use baton_e2e::cluster::history::History;
use baton_e2e::cluster::installed::{Installed, NAMESPACE, SOON};
use baton_e2e::cluster::kubectl::condition;
use baton_e2e::cluster::load::{Asked, Load};
use baton_e2e::manifest::Manifest;
use baton_e2e::openai::Ask;
use baton_e2e::{scenario, skipped, wait};
use serde_json::Value;
use tokio::task::JoinSet;
use tokio_util::task::AbortOnDropHandle;

/// Long prompts, each prefilled by one worker and decoded by another. A prefill takes 2 s in two steps, so that one is always under way,
/// and an answer 4 s, longer than a worker lives that is ended without being drained.
const ASKED: Asked = Asked {
    clients: 4,
    prompt: 3000,
    tokens: 192,
    mode: Some("Disaggregated"),
};
const PREFILL: u32 = 2;
const DECODE: u32 = 3;
/// Decode workers that evictions leave: of all, one may go at a time.
const LEAST: u32 = 2;
/// Leases are 3 s, and an idle worker reports every second.
const AFTER_LEASES: Duration = Duration::from_secs(30);

/// Tokens of an answer that outlasts what is done to a pool meanwhile: 80 s at least, and a drain may take 300 s.
const LONG: u32 = 4000;
/// So many of them, at least.
const RUNS: usize = 4;
/// A run begins, or a pod is met again, long before.
const MET: Duration = Duration::from_secs(60);

/// Simulated workers, and budgets that let one pod of each pool go at a time.
fn manifest(prefill: u32, decode: u32) -> String {
    let slow = Manifest {
        prefill_replicas: prefill,
        decode_replicas: decode,
        policy: "  timeouts: {totalSeconds: 300}\n".to_owned(),
        ..Manifest::slow()
    };
    let mut text = slow.text();
    for (kind, name, least) in [
        ("PrefillPool", "prefill", 1),
        ("DecodePool", "decode", LEAST),
    ] {
        let pool = format!("kind: {kind}\nmetadata: {{name: {name}}}\nspec:\n");
        let budget = format!("{pool}  disruption: {{minAvailable: {least}}}\n");
        text = text.replace(&pool, &budget);
    }
    text
}

/// One cluster for both: the second wants more workers than the first, and keeps those that are there.
#[test]
fn what_is_done_to_pods_under_load_fails_no_request() {
    scenario(async {
        let Some(baton) = Installed::on_nodes(2, &[]).await? else {
            return Ok(());
        };
        a_scale_down_that_is_taken_back_lets_the_pod_serve_on(&baton).await?;
        scaling_draining_evicting_and_deleting_fails_no_request(&baton).await
    });
}

async fn scaling_draining_evicting_and_deleting_fails_no_request(baton: &Installed) -> Result<()> {
    baton.apply(&manifest(PREFILL, DECODE))?;
    baton.ready()?;
    let load = Load::start(baton.api, ASKED);
    handed_over(baton, &load).await?;

    for (pool, count) in [("decode", DECODE), ("prefill", PREFILL)] {
        scaled(baton, pool, 1)?;
        last_one_is_not_evicted(baton, pool)?;
        handed_over(baton, &load).await?;
        scaled(baton, pool, count)?;

        evicted(baton, pool, count)?;
        handed_over(baton, &load).await?;

        deleted(baton, pool, count)?;
        handed_over(baton, &load).await?;
    }

    if baton.cluster.is_own() {
        node_drained(baton)?;
        handed_over(baton, &load).await?;
    } else {
        skipped("the drain of a node, which others may use too");
    }
    let answered = load.all_well().await?;
    ensure!(answered >= 7 * ASKED.clients as usize, "{answered} answers");
    let what = "no worker holds anything for a hand-off";
    wait::until_blocking(what, AFTER_LEASES, || {
        let workers = [baton.workers("prefill"), baton.workers("decode")];
        let look = workers.into_iter().flatten().flatten();
        let names = names(&look.collect::<Vec<_>>());
        let all = (PREFILL + DECODE) as usize;
        if names.len() != all {
            return Err(format!("{names:?} are there, of {all}"));
        }
        let held = names.iter().try_for_each(|name| baton.holds_nothing(name));
        held.map_err(|error| format!("{error:#}"))
    })
}

/// Waits until each client may have asked once more, and reads why these runs went where they went: without a hand-off among them, the
/// load would not try what it is to try.
async fn handed_over(baton: &Installed, load: &Load) -> Result<()> {
    let mut kinds = Vec::new();
    for run in load.more(ASKED.clients as usize).await? {
        let record = baton.explain(&run)?;
        record.check_order()?;
        let remote = record.kind()? == "Remote" && record.bytes() > 0;
        kinds.push(remote);
    }
    ensure!(kinds.contains(&true), "no run was handed over: {kinds:?}");
    Ok(())
}

async fn a_scale_down_that_is_taken_back_lets_the_pod_serve_on(baton: &Installed) -> Result<()> {
    baton.apply(&manifest(1, 2))?;
    baton.ready()?;
    let before = names(&baton.workers("decode")?);
    // Each pod has a run that lasts longer than what follows. One begins after the other: so it is known where.
    let mut runs: Vec<(String, AbortOnDropHandle<Result<String>>)> = Vec::new();
    let mut ran = running(baton)?;
    while runs.len() < RUNS || ran.values().any(|count| *count == 0) {
        ensure!(runs.len() < 3 * RUNS, "a pod is given none: {ran:?}");
        let ask = Ask::new("tiny", "a long answer", LONG).with("ignore_eos", true);
        let api = baton.api;
        let read = async move { ask.mode("Aggregated").stream(&api).await?.rest().await };
        let read = AbortOnDropHandle::new(tokio::spawn(read));
        let (pod, now) = wait::until("one more runs", MET, async || {
            let now = running(baton).map_err(|error| format!("{error:#}"))?;
            let more = now.iter().find(|(pod, count)| ran.get(*pod) < Some(*count));
            match more {
                Some((pod, _)) => Ok((pod.clone(), now)),
                None => Err(format!("{now:?}, as before")),
            }
        })
        .await?;
        ran = now;
        runs.push((pod, read));
    }
    baton.run(&["scale", "decodepool/decode", "--replicas=1"])?;
    let draining = ["pods", "--selector=serving.baton.dev/draining=true"];
    let name = baton.until("one drains", &draining, |list| {
        match list["items"].as_array().map(Vec::as_slice) {
            Some([pod]) => Ok(text(&pod["metadata"]["name"])),
            _ => Err("not one does".to_owned()),
        }
    })?;
    let pod = ["pod", name.as_str()];
    baton.until("it is taken out", &pod, |pod| {
        if is_ready(pod) {
            Err("it is Ready".to_owned())
        } else {
            Ok(())
        }
    })?;
    baton.run(&["scale", "decodepool/decode", "--replicas=2"])?;
    baton.until("it serves again", &pod, |pod| {
        let labels = &pod["metadata"]["labels"];
        if is_ready(pod) && labels["serving.baton.dev/draining"].is_null() {
            Ok(())
        } else {
            Err(format!("{labels}: {}", pod["status"]["conditions"]))
        }
    })?;
    // Those of the other pod are hung up on: they have kept it busy so far.
    for (pod, read) in runs {
        if pod == name || read.is_finished() {
            ensure!(!read.await??.is_empty(), "an answer without text");
        }
    }
    ensure!(
        names(&baton.workers("decode")?) == before,
        "a pod was replaced"
    );
    let what = "what was drained is given new requests";
    let mut turn = 0;
    wait::until(what, MET, async || {
        turn += 1;
        let met = decoded_by(baton, turn).await;
        let met = met.map_err(|error| format!("{error:#}"))?;
        met.contains(&name)
            .then_some(())
            .ok_or_else(|| format!("{met:?} were, and not {name}"))
    })
    .await
}

/// The decode workers of some requests that come at a time.
async fn decoded_by(baton: &Installed, turn: u32) -> Result<BTreeSet<String>> {
    let prompt: Vec<u32> = (0..400).map(|place| (place * 11) % 200 + 3).collect();
    let mut asks = JoinSet::new();
    for place in 0..4 {
        // Nothing that is there already draws them to one.
        let salt = format!("turn {turn}, request {place}");
        let ask = Ask::ids("tiny", &prompt, 16).with("cache_salt", salt);
        let (ask, api) = (ask.mode("Aggregated"), baton.api);
        asks.spawn(async move { ask.send(&api).await });
    }
    let mut workers = BTreeSet::new();
    while let Some(answer) = asks.join_next().await {
        let record = baton.explain(&answer??.run)?;
        workers.insert(text(&record.chosen()?["decode"]));
    }
    Ok(workers)
}

fn scaled(baton: &Installed, pool: &str, count: u32) -> Result<()> {
    let (kind, count_of) = (format!("{pool}pool/{pool}"), format!("--replicas={count}"));
    baton.run(&["scale", &kind, &count_of])?;
    pods(baton, pool, count)
}

/// The budget's controller follows the pods: an eviction counts by what it has said last.
fn evictions_allowed(baton: &Installed, pool: &str, count: u32) -> Result<()> {
    let what = format!("{count} evictions of {pool} are allowed");
    let name = format!("{pool}-{pool}");
    let budget = ["poddisruptionbudget", name.as_str()];
    baton.until(&what, &budget, |budget| {
        let status = &budget["status"];
        let current = status["observedGeneration"] == budget["metadata"]["generation"];
        if current && status["disruptionsAllowed"] == count {
            Ok(())
        } else {
            Err(status.to_string())
        }
    })
}

/// What asks the API server for an eviction, as an autoscaler of nodes does: the arguments of kubectl, and the body.
fn eviction(pod: &str) -> ([String; 4], String) {
    let path = format!("/api/v1/namespaces/{NAMESPACE}/pods/{pod}/eviction");
    let arguments = ["create", "--raw", &path, "--filename=-"].map(str::to_owned);
    let metadata = serde_json::json!({"name": pod, "namespace": NAMESPACE});
    let body =
        serde_json::json!({"apiVersion": "policy/v1", "kind": "Eviction", "metadata": metadata});
    (arguments, body.to_string())
}

fn last_one_is_not_evicted(baton: &Installed, pool: &str) -> Result<()> {
    evictions_allowed(baton, pool, 0)?;
    let name = names(&baton.workers(pool)?)[0].clone();
    let (arguments, body) = eviction(&name);
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let refused = baton.kubectl().refused(&arguments, &body)?;
    ensure!(
        refused.contains("TooManyRequests") || refused.contains("disruption budget"),
        "{refused}"
    );
    ensure!(
        names(&baton.workers(pool)?) == [name],
        "it was taken all the same"
    );
    Ok(())
}

/// One may go: it ends what it runs, and another takes its place.
fn evicted(baton: &Installed, pool: &str, count: u32) -> Result<()> {
    evictions_allowed(baton, pool, 1)?;
    let gone = names(&baton.workers(pool)?)[0].clone();
    let (arguments, body) = eviction(&gone);
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    baton.kubectl().run_with(&arguments, &body)?;
    replaced(baton, pool, count, &gone)
}

/// As a person does who does not know what runs on it.
fn deleted(baton: &Installed, pool: &str, count: u32) -> Result<()> {
    let gone = names(&baton.workers(pool)?)[0].clone();
    baton.run(&["delete", "pod", &gone, "--wait", "--timeout=120s"])?;
    replaced(baton, pool, count, &gone)
}

fn replaced(baton: &Installed, pool: &str, count: u32, gone: &str) -> Result<()> {
    pods(baton, pool, count)?;
    let now = names(&baton.workers(pool)?);
    ensure!(
        !now.iter().any(|name| name == gone),
        "{gone} is there again: {now:?}"
    );
    Ok(())
}

/// Takes all pods of Baton off the node with most decode workers, of which there are more than the budget lets go at a time.
fn node_drained(baton: &Installed) -> Result<()> {
    let nodes = |pool: &str| -> Result<Vec<String>> {
        let pods = baton.workers(pool)?;
        Ok(pods
            .iter()
            .map(|pod| text(&pod["spec"]["nodeName"]))
            .collect())
    };
    let on = nodes("decode")?;
    let count = |node: &String| on.iter().filter(|other| *other == node).count();
    let node = on.iter().max_by_key(|node| count(node));
    let node = node.context("no decode worker")?;
    ensure!(
        count(node) > (DECODE - LEAST) as usize,
        "of three workers on two nodes, two share one: {on:?}"
    );
    evictions_allowed(baton, "decode", DECODE - LEAST)?;
    let history = History::start(baton.kubectl(), NAMESPACE, "decode")?;
    history.has_seen(DECODE as usize, SOON)?;
    let kubectl = baton.kubectl();
    kubectl.run(&[
        "drain",
        node,
        "--ignore-daemonsets",
        "--delete-emptydir-data",
        "--timeout=240s",
    ])?;
    pods(baton, "decode", DECODE)?;
    pods(baton, "prefill", PREFILL)?;
    let taken = history.floor_kept(DECODE as usize, LEAST as usize)?;
    ensure!(
        taken >= count(node),
        "{taken} of {on:?} were seen to leave {node}"
    );
    let left = [nodes("decode")?, nodes("prefill")?].concat();
    ensure!(
        !left.contains(node),
        "workers are left on {node}, which was drained: {left:?}"
    );
    kubectl.run(&["uncordon", node])?;
    Ok(())
}

/// Waits until the pool has so many Ready pods and no other.
fn pods(baton: &Installed, pool: &str, count: u32) -> Result<()> {
    let what = format!("{count} {pool} pods");
    let selector = format!("--selector=serving.baton.dev/pool={pool}");
    baton.until(&what, &["pods", &selector], |list| {
        let items = list["items"].as_array().cloned().unwrap_or_default();
        let stays = |pod: &&Value| pod["metadata"]["deletionTimestamp"].is_null();
        let ready = items
            .iter()
            .filter(stays)
            .filter(|pod| is_ready(pod))
            .count();
        if ready == count as usize && items.len() == ready {
            Ok(())
        } else {
            Err(format!("{ready} of {} are Ready", items.len()))
        }
    })
}

fn is_ready(pod: &Value) -> bool {
    condition(pod, "Ready").0 == "True"
}

/// Sequences that each decode pod computes, by its own word.
fn running(baton: &Installed) -> Result<BTreeMap<String, u64>> {
    let mut running = BTreeMap::new();
    for name in names(&baton.workers("decode")?) {
        let count = baton.load(&name)?["runningSequences"].as_u64();
        running.insert(name, count.unwrap_or(0));
    }
    Ok(running)
}

fn names(pods: &[Value]) -> Vec<String> {
    let mut names: Vec<String> = pods
        .iter()
        .map(|pod| text(&pod["metadata"]["name"]))
        .collect();
    names.sort();
    names
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}
