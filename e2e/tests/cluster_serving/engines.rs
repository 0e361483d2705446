//! Pods of engine VLLM on real nodes: the container `engine`, with a stand-in for vLLM in it, and Baton's daemon as the native sidecar.
//! What kubelet, operator, daemon and routers do for such a pod is real; what the server says and computes is not.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use baton_e2e::cluster::installed::{Installed, NAMESPACE, SOON};
use baton_e2e::cluster::kubectl::condition;
use baton_e2e::manifest::Manifest;
use baton_e2e::openai::Ask;
use baton_e2e::stand_in::server::{self, counted};
use baton_e2e::stand_in::text;
use baton_e2e::{skipped, wait};
use serde_json::{Value, json};
use tokio::task::JoinSet;

use super::text as word;

const MODEL: &str = "words";
const IMAGE: &str = "localhost/vllm-stand-in:test";
const MAX_LENGTH: u32 = 4096;
/// Of the pools.
const PREFILL: &str = "words-prefill";
const DECODE: &str = "words-decode";
/// Ports that users of vLLM know, and the daemon's.
const HTTP: u16 = 8000;
const ADMIN: u16 = 7002;
/// Milliseconds of a token.
const PACE: &str = "100";
/// A stream of these would last for five minutes, and is hurried when all was seen that is to be seen meanwhile.
const LONG: u32 = 3000;
/// A drain ends two reports of an idle server after its last request; server and daemon end within seconds. On a machine that is busy with
/// other things this takes a minute and more, and the pod's grace is six.
const ENDED: Duration = Duration::from_secs(180);

/// One prefill and three decode servers on the nodes, besides what the cluster serves already.
pub(crate) async fn run_as_pods(baton: &Installed) -> Result<()> {
    if !baton.cluster.is_own() {
        skipped("pods of an engine: the stand-in's image is brought to nodes of the test's own");
        return Ok(());
    }
    let built = Path::new(env!("CARGO_BIN_EXE_vllm-stand-in"));
    baton
        .cluster
        .load_program(IMAGE, built, "/usr/local/bin/vllm")?;
    // Nodes see the machine's files, as those of a volume that is mounted on each.
    let folder = baton.cluster.folder()?.join(MODEL);
    text::write_folder(None, &folder, MAX_LENGTH)?;
    baton.apply(&manifest(&folder))?;
    baton.ready()?;
    let pods = [names(baton, PREFILL)?, names(baton, DECODE)?].concat();
    ensure!(pods.len() == 4, "{pods:?}");
    seen_by_routers(baton, &pods, &[("state", "Ready")])?;
    for pod in &pods {
        told_and_registered(baton, pod)?;
    }
    served(baton).await?;
    let deleted = deleted_under_a_stream(baton).await?;
    // The third one serves meanwhile.
    killed_and_back(baton, &deleted).await?;
    let what = "three decode pods are Ready, with another one for the deleted";
    let selector = format!("--selector=serving.baton.dev/pool={DECODE}");
    baton.until(what, &["pods", &selector], |list| {
        let pods = list["items"].as_array().map_or(&[][..], Vec::as_slice);
        pods.iter().try_for_each(|pod| ready(pod, "True"))?;
        let there = pods.iter().any(|pod| pod["metadata"]["name"] == deleted);
        match (pods.len(), there) {
            (3, false) => Ok(()),
            other => Err(format!("{other:?}")),
        }
    })
}

fn manifest(folder: &Path) -> String {
    let fleet = Manifest {
        model: MODEL.to_owned(),
        source: format!("hostPath: {}", folder.display()),
        engine: format!(
            "{{type: VLLM, image: '{IMAGE}', maxModelLength: {MAX_LENGTH}, args: [--max-num-seqs, '64'], env: [{{name: {}, value: '{PACE}'}}]}}",
            baton_e2e::stand_in::started::PACE
        ),
        kv_pool: "{leaseSeconds: 30}".to_owned(),
        decode_replicas: 3,
        policy: "  timeouts: {totalSeconds: 600}\n".to_owned(),
        ..Manifest::tiny()
    };
    let text = fleet.text();
    text.replace("{name: prefill}", &format!("{{name: {PREFILL}}}"))
        .replace("{name: decode}", &format!("{{name: {DECODE}}}"))
        .replace(
            "  engine: ",
            "  rollout: {drainTimeoutSeconds: 330}\n  engine: ",
        )
}

/// What the server was started with, as the container has it, and the card that the daemon made of what the server says.
fn told_and_registered(baton: &Installed, name: &str) -> Result<()> {
    let pod = pod(baton, name)?;
    let address = word(&pod["status"]["podIP"]);
    let address = address.as_str();
    let told = stand_in(baton, name, "told")?;
    let variables = &told["environment"];
    for (variable, value) in [
        ("VLLM_HOST_IP", address),
        ("VLLM_NIXL_SIDE_CHANNEL_HOST", address),
        ("VLLM_NIXL_SIDE_CHANNEL_PORT", "5600"),
        (baton_e2e::stand_in::started::PACE, PACE),
    ] {
        ensure!(
            variables[variable] == value,
            "{name}: {variable} is {}, not {value}",
            variables[variable]
        );
    }
    let arguments = told["arguments"].as_array().context("no arguments")?;
    let arguments: Vec<&str> = arguments.iter().filter_map(Value::as_str).collect();
    ensure!(
        arguments.starts_with(&["serve", &format!("/model/{MODEL}"), "--host", "0.0.0.0"])
            && arguments.ends_with(&["--max-num-seqs", "64"]),
        "{name}: {arguments:?}"
    );
    let config = |flag: &str| -> Result<Value> {
        let pair = arguments.windows(2).find(|pair| pair[0] == flag);
        let pair = pair.with_context(|| format!("no {flag} among {arguments:?}"))?;
        Ok(serde_json::from_str(pair[1])?)
    };
    let events = config("--kv-events-config")?;
    ensure!(
        events["topic"] == format!("kv@{address}:{HTTP}@{MODEL}"),
        "{name}: {events}"
    );
    let prefills = name.starts_with(PREFILL);
    let role = if prefills {
        "kv_producer"
    } else {
        "kv_consumer"
    };
    let transfer = config("--kv-transfer-config")?;
    ensure!(transfer["kv_role"] == role, "{name}: {transfer}");
    // The image's own user, which is root's here: `template.securityContext` says nothing.
    ensure!(told["user"] == 0, "{name}: user {}", told["user"]);
    let metrics = baton.of(name, HTTP, "metrics")?;
    ensure!(metrics.contains("vllm:num_requests_running"), "{metrics}");

    let card = card(baton, name)?;
    for (pointer, value) in [
        ("/worker", json!(name)),
        ("/engine/type", json!("VLLM")),
        ("/engine/version", json!(server::VERSION)),
        ("/engine/connector", json!("Nixl")),
        ("/capacity/blockSize", json!(16)),
        ("/capacity/maxContext", json!(MAX_LENGTH)),
        ("/dispatch/url", json!(format!("http://{address}:{HTTP}"))),
        ("/controlAddress", json!(format!("{address}:7000"))),
        ("/transports/0/address", json!(format!("{address}:5600"))),
        ("/layout/engineHash/source", json!("Observed")),
        // Its tokens were compared with those of the folder that both containers see.
        ("/text/type", json!("Verified")),
    ] {
        ensure!(
            card.pointer(pointer) == Some(&value),
            "{name}: {pointer} is not {value} in {card}"
        );
    }
    let notices = card["notices"].to_string();
    ensure!(
        !notices.contains("events:") && !notices.contains("declared is"),
        "{name}: {notices}"
    );
    restarts(&pod, (0, 0))
}

/// Whole on a decode server, as a stream and at once, and over two servers.
async fn served(baton: &Installed) -> Result<()> {
    let ask = Ask::new(MODEL, "How many?", 5);
    let whole = ask.clone().mode("Aggregated").send(&baton.api).await?;
    ensure!(whole.output.text == counted(5), "{:?}", whole.output);
    let record = baton.explain(&whole.run)?;
    ensure!(record.kind()? == "Local", "{}", record.0);
    let stream = ask.clone().mode("Aggregated").stream(&baton.api).await?;
    let text = stream.rest().await?;
    ensure!(text == counted(5), "{text}");

    let split = ask.mode("Disaggregated").send(&baton.api).await?;
    ensure!(split.output.text == counted(5), "{:?}", split.output);
    let record = baton.explain(&split.run)?;
    record.check_order()?;
    ensure!(
        record.kind()? == "Remote"
            && record.text("assurance") == "EngineTrusted"
            && record.0["fallback"].is_null(),
        "{}",
        record.0
    );
    let chosen = record.chosen()?;
    let (prefill, decode) = (word(&chosen["prefill"]), word(&chosen["decode"]));
    let (from, to) = (
        stand_in(baton, &prefill, "told")?,
        stand_in(baton, &decode, "told")?,
    );
    // The decode server has asked at the side channel of the other's pod, where the answer of the first leg said it is.
    ensure!(from["prefills"] == 1 && to["pulls"] == 1, "{from} {to}");
    Ok(())
}

/// `kubectl delete pod`: its `preStop` drains it, so the stream goes on to its end, and the pod goes soon after that. Returns
/// its name.
async fn deleted_under_a_stream(baton: &Installed) -> Result<String> {
    let ask = Ask::new(MODEL, "How many are there in all?", LONG).mode("Aggregated");
    let mut stream = ask.stream(&baton.api).await?;
    let first = stream.text().await?.context("an answer without text")?;
    let name = busy(baton)?;
    let taken = stand_in(baton, &name, "told")?["taken"].clone();
    let mut reading = JoinSet::new();
    reading.spawn(stream.rest());

    baton.run(&["delete", "pod", &name, "--wait=false"])?;
    seen_by_routers(baton, std::slice::from_ref(&name), &[("state", "Draining")])?;
    wait::until_blocking("the daemon drains", SOON, || {
        let load = baton.load(&name).map_err(|error| format!("{error:#}"))?;
        match load["draining"] == true {
            true => Ok(()),
            false => Err(load.to_string()),
        }
    })?;
    placed_elsewhere(baton, &name).await?;
    let pod = pod(baton, &name)?;
    ensure!(
        pod["metadata"]["deletionTimestamp"].is_string()
            && pod["status"]["containerStatuses"][0]["state"]["running"].is_object(),
        "{}",
        pod["status"]
    );
    let told = stand_in(baton, &name, "told")?;
    ensure!(
        told["running"] == 1 && told["taken"] == taken,
        "{name} was to go, and to take nothing more than the {taken} requests before: {told}"
    );

    stand_in(baton, &name, "hurry")?;
    let rest = reading.join_next().await.context("no reader")???;
    let text = first + &rest;
    ensure!(
        text == counted(LONG),
        "the stream is not whole: {} bytes of {}",
        text.len(),
        counted(LONG).len()
    );
    let what = format!("{name} goes soon after its last request");
    wait::until_blocking(&what, ENDED, || {
        let left = baton.run(&["get", "pod", &name, "--ignore-not-found", "--output=name"]);
        match left.map_err(|error| format!("{error:#}"))?.trim() {
            "" => Ok(()),
            left => Err(left.to_owned()),
        }
    })?;
    let failed = "--field-selector=reason=FailedPreStopHook";
    let failed = baton.list(&["events", failed])?;
    ensure!(failed.is_empty(), "{failed:?}");

    Ok(name)
}

/// The server's process ends: the daemon beside it goes on, routers send it nothing until kubelet's next one serves, and that is another
/// incarnation.
async fn killed_and_back(baton: &Installed, deleted: &str) -> Result<()> {
    let all = baton.workers(DECODE)?;
    let serving = all.iter().find(|pod| ready(pod, "True").is_ok());
    let serving = serving.context("no decode pod is Ready")?;
    let name = &word(&serving["metadata"]["name"]);
    ensure!(name != deleted, "{name} was deleted, and is there");
    let before = word(&card(baton, name)?["incarnation"]);
    stand_in(baton, name, "exit")?;
    seen_by_routers(baton, std::slice::from_ref(name), &[("state", "Lost")])?;
    let arguments = ["pod", name.as_str()];
    baton.until("it is not Ready", &arguments, |pod| ready(pod, "False"))?;
    placed_elsewhere(baton, name).await?;
    // The next process is there, and waits for this as one does that loads its weights.
    wait::until_blocking("the next process is told to serve", SOON, || {
        let told = stand_in(baton, name, "serve");
        told.map(|_| ()).map_err(|error| format!("{error:#}"))
    })?;
    baton.until("it is Ready again", &arguments, |pod| ready(pod, "True"))?;
    let after = word(&card(baton, name)?["incarnation"]);
    ensure!(after != before, "{name} is still {before}");
    seen_by_routers(
        baton,
        std::slice::from_ref(name),
        &[("state", "Ready"), ("incarnation", &after)],
    )?;
    let pod = pod(baton, name)?;
    let last = &pod["status"]["containerStatuses"][0]["lastState"]["terminated"];
    ensure!(last["exitCode"] == server::EXIT, "{last}");
    restarts(&pod, (1, 0))
}

/// Some requests, all answered, none by that worker.
async fn placed_elsewhere(baton: &Installed, name: &str) -> Result<()> {
    for turn in 0..4 {
        let ask = Ask::new(MODEL, &format!("question {turn}"), 2).mode("Aggregated");
        let answer = ask.send(&baton.api).await?;
        ensure!(answer.output.text == counted(2), "{:?}", answer.output);
        let record = baton.explain(&answer.run)?;
        let decode = &record.chosen()?["decode"];
        ensure!(decode.is_string() && decode != name, "{}", record.0);
    }
    Ok(())
}

/// The one decode server that runs something.
fn busy(baton: &Installed) -> Result<String> {
    for name in names(baton, DECODE)? {
        if stand_in(baton, &name, "told")?["running"] == 1 {
            return Ok(name);
        }
    }
    anyhow::bail!("no decode server runs anything")
}

/// Waits until both routers list each of the workers with these fields.
fn seen_by_routers(baton: &Installed, names: &[String], fields: &[(&str, &str)]) -> Result<()> {
    let what = format!("both routers have {names:?} with {fields:?}");
    let arguments = ["top", "--namespace", NAMESPACE, "--output", "json"];
    wait::until_blocking(&what, SOON, || {
        let told = baton
            .baton(&arguments)
            .map_err(|error| format!("{error:#}"))?;
        let routers: Vec<Value> = serde_json::from_str(&told).map_err(|error| error.to_string())?;
        let sees = |router: &&Value| {
            let workers = router["fleet"]["workers"].as_array();
            let workers = workers.map_or(&[][..], Vec::as_slice);
            names.iter().all(|name| {
                let worker = workers.iter().find(|worker| worker["id"] == *name);
                worker.is_some_and(|worker| {
                    fields.iter().all(|(field, value)| worker[field] == *value)
                })
            })
        };
        match routers.iter().filter(sees).count() {
            2 => Ok(()),
            _ => Err(told),
        }
    })
}

fn ready(pod: &Value, wanted: &str) -> Result<(), String> {
    match condition(pod, "Ready").0 == wanted {
        true => Ok(()),
        false => Err(pod["status"].to_string()),
    }
}

/// Of the containers `engine` and `worker`.
fn restarts(pod: &Value, wanted: (u64, u64)) -> Result<()> {
    let status = &pod["status"];
    let count = |of: &str| status[of][0]["restartCount"].as_u64();
    let found = (count("containerStatuses"), count("initContainerStatuses"));
    ensure!(
        found == (Some(wanted.0), Some(wanted.1)),
        "{found:?} restarts: {status}"
    );
    Ok(())
}

fn names(baton: &Installed, pool: &str) -> Result<Vec<String>> {
    let pods = baton.workers(pool)?;
    Ok(pods
        .iter()
        .map(|pod| word(&pod["metadata"]["name"]))
        .collect())
}

fn pod(baton: &Installed, name: &str) -> Result<Value> {
    let namespace = format!("--namespace={NAMESPACE}");
    baton.kubectl().get(&["pod", name, &namespace])
}

fn card(baton: &Installed, name: &str) -> Result<Value> {
    Ok(serde_json::from_str(&baton.of(name, ADMIN, "v1/card")?)?)
}

/// What tests ask the stand-in for.
fn stand_in(baton: &Installed, name: &str, order: &str) -> Result<Value> {
    let said = baton.of(name, HTTP, &format!("stand-in/{order}"))?;
    serde_json::from_str(&said).context(said)
}
