//! From custom resources to pods that serve, on real nodes: what a platform team sees with kubectl, and what a client gets. Then pods of
//! an engine beside them.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Stdio;

use anyhow::{Context, Result, ensure};
use baton_e2e::cluster::installed::{Installed, NAMESPACE, SOON};
use baton_e2e::cluster::kubectl::condition;
use baton_e2e::manifest::Manifest;
use baton_e2e::openai::Ask;
use baton_e2e::{scenario, wait};
use serde_json::{Value, json};

#[path = "cluster_serving/engines.rs"]
mod engines;

/// One prefill worker, some decode workers, each with a GPU where the nodes have them: those of a cluster that exists need not.
fn manifest(baton: &Installed, decode_replicas: u32) -> Result<String> {
    let fleet = Manifest {
        decode_replicas,
        ..Manifest::tiny()
    };
    let text = fleet.text();
    Ok(match gpus(baton)? {
        true => text.replace("  engine: ", "  accelerator: {count: 1}\n  engine: "),
        false => text,
    })
}

fn gpus(baton: &Installed) -> Result<bool> {
    let nodes = baton.kubectl().list(&["nodes"])?;
    let has = |node: &Value| node["status"]["allocatable"]["nvidia.com/gpu"].is_string();
    let any = nodes.iter().any(has);
    ensure!(any || !baton.cluster.is_own(), "no node has GPUs");
    Ok(any)
}

#[test]
fn pools_become_pods_that_serve_and_every_run_is_explained() {
    scenario(async {
        let Some(baton) = Installed::on_nodes(2, &[]).await? else {
            return Ok(());
        };
        // Before the pools: nothing that a pod goes through is missed.
        let seen = tempfile::NamedTempFile::new()?;
        let mut watch = baton
            .kubectl()
            .command(&[
                "get",
                "pods",
                "--watch",
                "--output=json",
                "--selector=serving.baton.dev/pool",
            ])
            .arg(format!("--namespace={NAMESPACE}"))
            .stdout(Stdio::from(seen.reopen()?))
            .spawn()?;
        baton.apply(&manifest(&baton, 2)?)?;
        baton.ready()?;
        // A watch may be behind what the pools say.
        let what = "the watch has seen all pods Ready";
        let seen_all = wait::until_blocking(what, SOON, || {
            let watched = std::fs::read(seen.path()).map_err(|error| error.to_string())?;
            let states = States::read(&watched).map_err(|error| format!("{error:#}"))?;
            match states.ready.len() {
                PODS => Ok(()),
                _ => Err(format!("{states:?}")),
            }
        });
        watch.kill()?;
        watch.wait()?;
        seen_all?;
        let states = States::read(&std::fs::read(seen.path())?)?;
        ensure!(states.count > 2 * PODS, "{states:?}");
        labels_say_what_and_where(&baton)?;
        served_and_explained(&baton).await?;
        chat_is_placed_by_cost(&baton).await?;
        what_routers_refuse_changes_nothing(&baton).await?;
        what_kubectl_shows(&baton)?;
        engines::run_as_pods(&baton).await
    });
}

/// Pods of both pools.
const PODS: usize = 3;

/// What a watch has seen so far.
#[derive(Debug, Default)]
struct States {
    count: usize,
    /// Pods that were ever Ready.
    ready: BTreeSet<String>,
}

impl States {
    /// # Errors
    /// A pod was, or might have been, Ready before it was registered.
    fn read(watched: &[u8]) -> Result<Self> {
        let mut seen = Self::default();
        for pod in serde_json::Deserializer::from_slice(watched).into_iter::<Value>() {
            // The last one may be cut off.
            let Ok(pod) = pod else { break };
            seen.count += 1;
            // Which of the two comes first is else a matter of luck.
            let gates = &pod["spec"]["readinessGates"];
            ensure!(
                gates == &json!([{"conditionType": "serving.baton.dev/registered"}]),
                "a pod may become Ready before its card is read: its readinessGates are {gates}"
            );
            if condition(&pod, "Ready").0 == "True" {
                let registered = condition(&pod, "serving.baton.dev/registered");
                ensure!(registered.0 == "True", "Ready without its card: {pod}");
                seen.ready.insert(pod["metadata"]["name"].to_string());
            }
        }
        Ok(seen)
    }
}

fn labels_say_what_and_where(baton: &Installed) -> Result<()> {
    let mut nodes = BTreeMap::new();
    for node in baton.kubectl().list(&["nodes"])? {
        nodes.insert(
            text(&node["metadata"]["name"]),
            node["metadata"]["labels"].clone(),
        );
    }
    let gpus = gpus(baton)?;
    let mut identities = BTreeSet::new();
    for (pool, role) in [("prefill", "prefill"), ("decode", "decode")] {
        for pod in baton.workers(pool)? {
            let labels = &pod["metadata"]["labels"];
            let revision = text(&labels["serving.baton.dev/revision"]);
            let name = text(&pod["metadata"]["name"]);
            ensure!(name.starts_with(&format!("{pool}-{revision}-")), "{name}");
            let on = &nodes[&text(&pod["spec"]["nodeName"])];
            // Nodes of a cluster that exists need not say where they are.
            let level = |label: &str| match &on[label] {
                Value::Null if !baton.cluster.is_own() => json!("unknown"),
                domain => domain.clone(),
            };
            for (label, value) in [
                ("app.kubernetes.io/name", Value::from("baton-worker")),
                ("app.kubernetes.io/instance", Value::from(pool)),
                ("app.kubernetes.io/component", Value::from(role)),
                ("app.kubernetes.io/part-of", Value::from("baton")),
                (
                    "app.kubernetes.io/managed-by",
                    Value::from("baton-operator"),
                ),
                ("llm-d.ai/role", Value::from(role)),
                ("serving.baton.dev/pool", Value::from(pool)),
                ("serving.baton.dev/role", Value::from(role)),
                ("serving.baton.dev/model", Value::from("tiny")),
                (
                    "serving.baton.dev/domain-nvlink",
                    level("nvidia.com/gpu.clique"),
                ),
                (
                    "serving.baton.dev/domain-host",
                    level("kubernetes.io/hostname"),
                ),
                (
                    "serving.baton.dev/domain-rack",
                    level("topology.kubernetes.io/rack"),
                ),
                (
                    "serving.baton.dev/domain-zone",
                    level("topology.kubernetes.io/zone"),
                ),
            ] {
                ensure!(
                    labels[label] == value,
                    "{name}: {label} is {}, not {value}",
                    labels[label]
                );
            }
            let short = text(&labels["serving.baton.dev/kv-identity"]);
            let whole =
                text(&pod["metadata"]["annotations"]["serving.baton.dev/kv-identity-digest"]);
            ensure!(
                short.len() == 32 && whole.starts_with(&short),
                "{name}: {short} {whole}"
            );
            identities.insert(whole);
            let limits = &pod["spec"]["containers"][0]["resources"]["limits"];
            let wanted = if gpus { json!("1") } else { Value::Null };
            ensure!(limits["nvidia.com/gpu"] == wanted, "{name}: {limits}");
        }
    }
    ensure!(
        identities.len() == 1,
        "one model, and its KV means the same everywhere: {identities:?}"
    );
    Ok(())
}

/// Aggregated and disaggregated runs, through one Service with two routers behind it.
async fn served_and_explained(baton: &Installed) -> Result<()> {
    let prompt: Vec<u32> = (0..600).map(|place| (place * 11) % 200 + 3).collect();
    let ask = Ask::ids("tiny", &prompt, 24).with("ignore_eos", true);
    let reference = ask.clone().mode("Aggregated").send(&baton.api).await?;
    let mut routers = BTreeSet::new();
    // Which router is met is chance: of 40 turns, one in 10^11 rows meets only one.
    for turn in 0..40 {
        if turn >= 10 && routers.len() == 2 {
            break;
        }
        // A salt of its own: no run finds another's blocks.
        let salted = ask.clone().with("cache_salt", format!("turn {turn}"));
        let (mode, kind) = [("Aggregated", "Local"), ("Disaggregated", "Remote")][turn % 2];
        let answer = salted.mode(mode).send(&baton.api).await?;
        ensure!(
            answer.output == reference.output,
            "{mode}: {:?}",
            answer.output
        );
        let record = baton.explain(&answer.run)?;
        ensure!(record.kind()? == kind, "{mode}: {}", record.0);
        record.check_order()?;
        ensure!((record.bytes() > 0) == (kind == "Remote"), "{}", record.0);
        // A run's id begins with the router that it went through.
        let (router, _) = answer
            .run
            .rsplit_once('-')
            .context("a run without a router")?;
        routers.insert(router.to_owned());
    }
    ensure!(
        routers.len() == 2,
        "two routers, and these answered: {routers:?}"
    );
    Ok(())
}

/// As clients ask, with nothing said of where: the policy decides, and says so.
async fn chat_is_placed_by_cost(baton: &Installed) -> Result<()> {
    let body = json!({
        "model": "tiny", "max_tokens": 24, "ignore_eos": true, "messages": [{"role": "user", "content": "What is the capital of France?"}],
    });
    let answer = baton.api.post("/v1/chat/completions", &[], &body).await?;
    let answer = answer.well()?;
    let said = answer.json()?;
    ensure!(
        said["choices"][0]["message"]["content"].is_string()
            && said["usage"]["completion_tokens"] == 24,
        "{said}"
    );
    let run = answer.header("x-baton-run").context("no run")?;
    let record = baton.explain(run)?;
    ensure!(record.text("mode") == "Conditional", "{}", record.0);
    ensure!(
        record.0["candidates"]
            .as_array()
            .is_some_and(|all| all.len() >= 2),
        "{}",
        record.0
    );
    ensure!(!record.text("explanation").is_empty(), "{}", record.0);
    record.check_order()
}

/// A version that names pools which are not there: both routers serve on by the one before, and the policy's status says so of each.
async fn what_routers_refuse_changes_nothing(baton: &Installed) -> Result<()> {
    let good = manifest(baton, 2)?;
    let pools = "decodePools: [{name: decode}]";
    let none = "decodePools: [{selector: {matchLabels: {tier: none}}}]";
    ensure!(good.contains(pools), "{good}");
    let policy = ["routepolicy", "tiny"];
    let served = baton.until("both routers have the good version", &policy, |policy| {
        let generation = policy["metadata"]["generation"].clone();
        let all = routers(policy)
            .iter()
            .filter(|one| one["generation"] == generation);
        let good = all.count() == 2 && policy["status"]["lastGoodGeneration"] == generation;
        good.then_some(generation)
            .ok_or_else(|| policy["status"].to_string())
    })?;
    baton.apply(&good.replace(pools, none))?;
    baton.until("both routers refuse the next one", &policy, |policy| {
        let status = &policy["status"];
        let refusing = routers(policy).iter().filter(|one| {
            let why = one["refused"].as_str().unwrap_or_default();
            one["generation"] == served && why.contains("spec.decodePools[0]")
        });
        let refused = refusing.count() == 2
            && status["lastGoodGeneration"] == served
            && status["observedGeneration"] == policy["metadata"]["generation"]
            && status["observedGeneration"] != served;
        refused.then_some(()).ok_or_else(|| status.to_string())
    })?;
    // Whichever router is met.
    for turn in 0..10 {
        let ask = Ask::new("tiny", "a question", 4).with("cache_salt", format!("refused {turn}"));
        let record = baton.explain(&ask.send(&baton.api).await?.run)?;
        ensure!(
            record.0["policy"]["generation"] == served,
            "{}",
            record.0["policy"]
        );
    }
    baton.apply(&good)?;
    baton.ready()
}

fn routers(policy: &Value) -> &[Value] {
    policy["status"]["routers"]
        .as_array()
        .map_or(&[], Vec::as_slice)
}

fn what_kubectl_shows(baton: &Installed) -> Result<()> {
    let table = baton.run(&["get", "pfp,dcp,rtp"])?;
    for word in [
        "prefillpool.serving.baton.dev/prefill",
        "decodepool.serving.baton.dev/decode",
        "routepolicy.serving.baton.dev/tiny",
        "READY",
        "1/1",
        "2/2",
    ] {
        ensure!(table.contains(word), "{word} is missing in\n{table}");
    }
    let explained = baton.run(&["explain", "pfp.spec.engine"])?;
    ensure!(explained.contains("blockSize"), "{explained}");
    for kind in [
        "prefillpool/prefill",
        "decodepool/decode",
        "routepolicy/tiny",
    ] {
        baton.run(&["wait", "--for=condition=Ready", kind, "--timeout=10s"])?;
    }

    // Nothing has changed: no difference. Something would: the difference and a status of its own, and nothing is done.
    let namespace = format!("--namespace={NAMESPACE}");
    baton
        .kubectl()
        .run_with(&["diff", &namespace, "--filename=-"], &manifest(baton, 2)?)?;
    let three = tempfile::NamedTempFile::new()?;
    std::fs::write(three.path(), manifest(baton, 3)?)?;
    let file = three.path().to_string_lossy();
    let diff = baton
        .kubectl()
        .command(&["diff", &namespace, "--filename", &file])
        .output()?;
    let shown = String::from_utf8_lossy(&diff.stdout);
    ensure!(
        diff.status.code() == Some(1)
            && shown.contains("-  replicas: 2")
            && shown.contains("+  replicas: 3"),
        "{}: {shown}{}",
        diff.status,
        String::from_utf8_lossy(&diff.stderr)
    );
    let server_side = [
        "apply",
        "--server-side",
        "--dry-run=server",
        "--force-conflicts",
        &namespace,
        "--filename=-",
    ];
    let said = baton
        .kubectl()
        .run_with(&server_side, &manifest(baton, 3)?)?;
    ensure!(
        said.contains("serverside-applied (server dry run)"),
        "{said}"
    );
    let pool = baton.kubectl().get(&["decodepool", "decode", &namespace])?;
    ensure!(
        pool["spec"]["replicas"] == 2,
        "a dry run did something: {}",
        pool["spec"]
    );

    baton.run(&["scale", "decodepool/decode", "--replicas=3"])?;
    let three = ["decodepool", "decode"];
    baton.until("the pool has three", &three, |pool| {
        match &pool["status"]["readyReplicas"] {
            ready if ready == 3 => Ok(()),
            ready => Err(ready.to_string()),
        }
    })?;
    // What autoscalers read.
    let scale: Value = serde_json::from_str(&baton.kubectl().run(&[
        "get",
        "--raw",
        &format!(
            "/apis/serving.baton.dev/v1alpha1/namespaces/{NAMESPACE}/decodepools/decode/scale"
        ),
    ])?)?;
    let selector = scale["status"]["selector"]
        .as_str()
        .context("no selector")?;
    ensure!(scale["status"]["replicas"] == 3, "{scale}");
    let selected = baton.list(&["pods", &format!("--selector={selector}")])?;
    ensure!(selected.len() == 3, "{selector} selects {}", selected.len());
    Ok(())
}

pub(crate) fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}
