//! What is done to pods while clients are served by them, on real nodes: no client notices.

use std::time::Duration;

use anyhow::{Result, ensure};
use baton_e2e::cluster::installed::{Installed, NAMESPACE};
use baton_e2e::cluster::kubectl::condition;
use baton_e2e::cluster::load::Load;
use baton_e2e::manifest::Manifest;
use baton_e2e::openai::Ask;
use baton_e2e::{scenario, skipped, wait};
use serde_json::Value;
use tokio::task::JoinSet;

const CLIENTS: u32 = 4;
/// Of each answer: one takes 4 s, longer than a worker lives that is ended without being drained.
const TOKENS: u32 = 192;

/// Simulated workers, and a budget that lets one decode pod go at a time.
fn manifest(decode: u32) -> String {
    let slow = Manifest {
        decode_replicas: decode,
        policy: "  timeouts: {totalSeconds: 120}\n".to_owned(),
        ..Manifest::slow()
    };
    let budget = "kind: DecodePool\nmetadata: {name: decode}\nspec:\n";
    slow.text().replace(
        budget,
        &format!("{budget}  disruption: {{minAvailable: 1}}\n"),
    )
}

#[test]
fn scaling_draining_evicting_and_deleting_under_load_fails_no_request() {
    scenario(async {
        let Some(baton) = Installed::on_nodes(2, &[]).await? else {
            return Ok(());
        };
        baton.apply(&manifest(3))?;
        baton.ready()?;
        let load = Load::start(baton.api, "tiny", CLIENTS, TOKENS);
        load.more(CLIENTS).await?;

        scaled_down(&baton)?;
        last_one_is_not_evicted(&baton)?;
        load.more(CLIENTS).await?;
        baton.run(&["scale", "decodepool/decode", "--replicas=3"])?;
        decode_pods(&baton, 3)?;

        evicted(&baton)?;
        load.more(CLIENTS).await?;

        deleted(&baton)?;
        load.more(CLIENTS).await?;

        if baton.cluster.is_own() {
            let moved = node_drained(&baton)?;
            ensure!(moved > 0, "no worker was on the node that was drained");
            load.more(CLIENTS).await?;
        } else {
            skipped("the drain of a node, which others may use too");
        }
        let answered = load.all_well().await?;
        ensure!(answered > 4 * CLIENTS, "{answered} answers");
        Ok(())
    });
}

#[test]
fn a_scale_down_that_is_taken_back_lets_the_pod_serve_on() {
    scenario(async {
        let Some(baton) = Installed::on_nodes(1, &[]).await? else {
            return Ok(());
        };
        baton.apply(&manifest(2))?;
        baton.ready()?;
        let before = names(&baton.workers("decode")?);
        // Each pod has a run that lasts longer than what follows.
        let mut runs = JoinSet::new();
        for _ in 0..4 {
            let ask = Ask::new("tiny", "a long answer", 1500).with("ignore_eos", true);
            let api = baton.api;
            runs.spawn(async move { ask.mode("Aggregated").stream(&api).await?.rest().await });
        }
        wait::until(
            "all four run",
            Duration::from_secs(60),
            async || match running(&baton).map_err(|error| format!("{error:#}"))? {
                4 => Ok(()),
                other => Err(format!("{other} run")),
            },
        )
        .await?;
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
        while let Some(answer) = runs.join_next().await {
            ensure!(!answer??.is_empty(), "an answer without text");
        }
        ensure!(
            names(&baton.workers("decode")?) == before,
            "a pod was replaced"
        );
        Ok(())
    });
}

fn scaled_down(baton: &Installed) -> Result<()> {
    baton.run(&["scale", "decodepool/decode", "--replicas=1"])?;
    decode_pods(baton, 1)
}

/// The budget's controller follows the pods: an eviction counts by what it has said last.
fn evictions_allowed(baton: &Installed, count: u64) -> Result<()> {
    let what = format!("{count} evictions are allowed");
    let budget = ["poddisruptionbudget", "decode-decode"];
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

fn last_one_is_not_evicted(baton: &Installed) -> Result<()> {
    evictions_allowed(baton, 0)?;
    let name = names(&baton.workers("decode")?)[0].clone();
    let (arguments, body) = eviction(&name);
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let refused = baton.kubectl().refused(&arguments, &body)?;
    ensure!(
        refused.contains("TooManyRequests") || refused.contains("disruption budget"),
        "{refused}"
    );
    ensure!(
        names(&baton.workers("decode")?) == [name],
        "it was taken all the same"
    );
    Ok(())
}

/// One may go: it ends what it runs, and another takes its place.
fn evicted(baton: &Installed) -> Result<()> {
    evictions_allowed(baton, 2)?;
    let gone = names(&baton.workers("decode")?)[0].clone();
    let (arguments, body) = eviction(&gone);
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    baton.kubectl().run_with(&arguments, &body)?;
    replaced(baton, &gone)
}

/// As a person does who does not know what runs on it.
fn deleted(baton: &Installed) -> Result<()> {
    let gone = names(&baton.workers("decode")?)[0].clone();
    baton.run(&["delete", "pod", &gone, "--wait", "--timeout=120s"])?;
    replaced(baton, &gone)
}

fn replaced(baton: &Installed, gone: &str) -> Result<()> {
    let what = format!("{gone} is replaced");
    let pods = ["pods", "--selector=serving.baton.dev/pool=decode"];
    baton.until(&what, &pods, |list| {
        let items = list["items"].as_array().cloned().unwrap_or_default();
        let now = names(&items);
        let ready = items.iter().filter(|pod| is_ready(pod)).count();
        if ready == 3 && now.len() == 3 && !now.iter().any(|name| name == gone) {
            Ok(())
        } else {
            Err(format!("{ready} of {now:?} are Ready"))
        }
    })
}

/// Takes all pods of Baton off the second node; returns how many workers that were.
fn node_drained(baton: &Installed) -> Result<usize> {
    let there = |pods: Vec<Value>| {
        pods.iter()
            .filter(|pod| pod["spec"]["nodeName"] == "node-2")
            .count()
    };
    let before = there(baton.workers("decode")?) + there(baton.workers("prefill")?);
    let kubectl = baton.kubectl();
    kubectl.run(&[
        "drain",
        "node-2",
        "--ignore-daemonsets",
        "--delete-emptydir-data",
        "--timeout=240s",
    ])?;
    decode_pods(baton, 3)?;
    let after = there(baton.workers("decode")?) + there(baton.workers("prefill")?);
    ensure!(after == 0, "{after} workers are left on a drained node");
    kubectl.run(&["uncordon", "node-2"])?;
    Ok(before)
}

/// Waits until the pool has so many Ready pods and no other.
fn decode_pods(baton: &Installed, count: usize) -> Result<()> {
    let what = format!("{count} decode pods");
    let pods = ["pods", "--selector=serving.baton.dev/pool=decode"];
    baton.until(&what, &pods, |list| {
        let items = list["items"].as_array().cloned().unwrap_or_default();
        let ready = items.iter().filter(|pod| is_ready(pod)).count();
        if ready == count && items.len() == count {
            Ok(())
        } else {
            Err(format!("{ready} of {} are Ready", items.len()))
        }
    })
}

fn is_ready(pod: &Value) -> bool {
    condition(pod, "Ready").0 == "True"
}

/// Sequences that the decode pods compute, by their own word.
fn running(baton: &Installed) -> Result<u64> {
    let mut sum = 0;
    for name in names(&baton.workers("decode")?) {
        let path = format!("/api/v1/namespaces/baton/pods/{name}:7002/proxy/v1/load");
        let load: Value = serde_json::from_str(&baton.kubectl().run(&["get", "--raw", &path])?)?;
        sum += load["runningSequences"].as_u64().unwrap_or(0);
    }
    Ok(sum)
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
