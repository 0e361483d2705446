//! Manifests as kubectl and an API server take them: what is refused and why, what is filled in, what cannot be changed, what is shown.
//!
//! The bad ones are those of the reader of files (`crds/tests/bad_manifests/`): what `baton up` refuses a cluster refuses too.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use baton_e2e::binaries::repository;
use baton_e2e::cluster::Cluster;
use baton_e2e::cluster::kubectl::Kubectl;
use baton_e2e::wait;
use serde_json::{Value, json};

#[path = "../../crds/tests/bad_manifests/cases.rs"]
mod cases;

const SOON: Duration = Duration::from_secs(60);
const DRY: [&str; 3] = ["apply", "--dry-run=server", "--filename=-"];

/// One cluster for all: each part is a function, so that a failure says which.
#[test]
fn a_cluster_takes_good_manifests_and_says_what_is_wrong_with_bad_ones() -> Result<()> {
    let Some(cluster) = Cluster::api_server()? else {
        return Ok(());
    };
    let kubectl = cluster.kubectl();
    define(kubectl)?;
    bad_ones_are_refused_with_field_and_reason(kubectl)?;
    good_ones_are_taken(kubectl)?;
    defaults_are_those_of_the_types(kubectl)?;
    names_and_models_stay_what_they_are(kubectl)?;
    fields_are_explained(kubectl)?;
    what_is_there_is_shown(kubectl)?;
    scale_and_status_are_apart_from_the_spec(kubectl)?;
    Ok(())
}

/// The committed definitions, until the API server serves all that kubectl asks it about them.
fn define(kubectl: &Kubectl) -> Result<()> {
    let folder = repository().join("crds/generated");
    let file = format!("--filename={}", folder.display());
    kubectl.run(&["apply", "--server-side", &file])?;
    kubectl.definitions_are_served()?;
    wait::until_blocking("the kinds are explained", SOON, || {
        for kind in ["pfp", "dcp", "rtp"] {
            kubectl
                .run(&["explain", kind])
                .map_err(|error| format!("{error:#}"))?;
        }
        Ok(())
    })?;
    kubectl.run(&["create", "namespace", "other"])?;
    Ok(())
}

fn bad_ones_are_refused_with_field_and_reason(kubectl: &Kubectl) -> Result<()> {
    let mut failures = String::new();
    let mut refused = 0;
    for case in cases::all() {
        let manifest = changed(&case.manifest());
        if case.cluster.is_empty() {
            // What it says of other objects: in a cluster these may come later.
            if let Err(error) = kubectl.run_with(&DRY, &manifest) {
                failures += &format!("\n{:?} was to be taken: {error:#}\n", case.new);
            }
            continue;
        }
        refused += 1;
        match kubectl.refused(&DRY, &manifest) {
            Ok(said) if said.contains(case.cluster) => {}
            Ok(said) => {
                failures += &format!(
                    "\n{}, where files say {:?}: {}\n  said {said}\n",
                    case.path, case.message, case.cluster
                );
            }
            Err(error) => failures += &format!("\n{:?}: {error:#}\n", case.new),
        }
    }
    ensure!(failures.is_empty(), "{failures}");
    ensure!(refused >= 40, "only {refused} manifests were refused");
    Ok(())
}

/// Without the documents that are as in the good fleet: a hundred times they would be the larger part of the test's time.
fn changed(manifest: &str) -> String {
    let good: Vec<&str> = cases::FLEET.split("---\n").collect();
    let documents = manifest.split("---\n");
    let changed: Vec<&str> = documents.filter(|one| !good.contains(one)).collect();
    changed.join("---\n")
}

fn files(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut files: Vec<PathBuf> = std::fs::read_dir(folder)
        .with_context(|| folder.display().to_string())?
        .map(|entry| Ok(entry?.path()))
        .collect::<Result<_>>()?;
    files.retain(|path| {
        path.extension()
            .is_some_and(|extension| extension == "yaml")
    });
    files.sort();
    Ok(files)
}

/// The examples, and manifests with every field; each is read by `baton up`'s reader too.
fn good_ones_are_taken(kubectl: &Kubectl) -> Result<()> {
    let mut all = files(&repository().join("examples"))?;
    all.extend(files(&repository().join("examples/cluster"))?);
    all.extend(files(&repository().join("e2e/tests/manifests"))?);
    ensure!(all.len() >= 5, "{all:?}");
    for path in all {
        let name = path.display().to_string();
        let text = std::fs::read_to_string(&path)?;
        let said = kubectl.run_with(&DRY, &text).context(name.clone())?;
        ensure!(said.contains("created (server dry run)"), "{name}: {said}");
        if let Err(problems) = baton_crds::read_documents([(name.as_str(), text.as_str())]) {
            let lines: Vec<String> = problems.iter().map(ToString::to_string).collect();
            anyhow::bail!("{}", lines.join("\n"));
        }
    }
    Ok(())
}

const SMALLEST: &str = "
apiVersion: serving.baton.dev/v1alpha1
kind: PrefillPool
metadata: {name: smallest, namespace: default}
spec:
  model: {name: tiny}
  engine: {type: Simulated}
  kvPool: {}
  rollout: {}
---
apiVersion: serving.baton.dev/v1alpha1
kind: RoutePolicy
metadata: {name: smallest, namespace: default}
spec:
  model: tiny
  decodePools: [{name: later}]
";

fn defaults_are_those_of_the_types(kubectl: &Kubectl) -> Result<()> {
    kubectl.apply(SMALLEST)?;
    let pool = kubectl.get(&["pfp/smallest", "--namespace=default"])?;
    let spec = &pool["spec"];
    ensure!(spec["replicas"] == 1, "{spec}");
    ensure!(spec["engine"]["blockSize"] == 16, "{spec}");
    ensure!(
        spec["kvPool"] == json!({"leaseSeconds": 30, "transports": ["Local", "Shm", "Tcp"]}),
        "{spec}"
    );
    ensure!(
        spec["rollout"]
            == json!({"maxSurge": 0, "maxUnavailable": 1, "drainTimeoutSeconds": 300, "paused": false}),
        "{spec}"
    );
    // Filled in or left out: to the types it is the same.
    let typed: baton_crds::PoolSpec = serde_json::from_value(spec.clone())?;
    let written: baton_crds::PoolSpec = serde_json::from_value(
        json!({"model": {"name": "tiny"}, "engine": {"type": "Simulated"}}),
    )?;
    ensure!(typed == written, "{typed:?}");
    let policy = kubectl.get(&["rtp/smallest", "--namespace=default"])?;
    ensure!(policy["spec"]["mode"] == "Conditional", "{policy}");
    for object in [pool, policy] {
        let problems = baton_crds::check_object(&object);
        ensure!(problems.is_empty(), "{problems:?}");
    }
    // A second time nothing changes: GitOps tools compare.
    let said = kubectl.apply(SMALLEST)?;
    ensure!(said.matches("unchanged").count() == 2, "{said}");
    Ok(())
}

fn names_and_models_stay_what_they_are(kubectl: &Kubectl) -> Result<()> {
    let pool = SMALLEST.replacen("name: tiny", "name: other", 1);
    let said = kubectl.refused(&["apply", "--filename=-"], &pool)?;
    ensure!(
        said.contains("spec.model.name: Invalid value: \"other\": must not be changed: make another pool for another model"),
        "{said}"
    );
    let policy = SMALLEST.replacen("  model: tiny\n", "  model: other\n", 1);
    let said = kubectl.refused(&["apply", "--filename=-"], &policy)?;
    ensure!(
        said.contains("spec.model: Invalid value: \"other\": must not be changed: make another policy for another model"),
        "{said}"
    );
    // What makes another revision is changed in place.
    let pool = SMALLEST.replacen("type: Simulated", "type: Simulated, blockSize: 32", 1);
    let said = kubectl.apply(&pool)?;
    ensure!(said.contains("smallest configured"), "{said}");
    Ok(())
}

fn fields_are_explained(kubectl: &Kubectl) -> Result<()> {
    let said = kubectl.run(&["explain", "pfp.spec.engine"])?;
    for part in [
        "blockSize\t<integer>",
        "Tokens of a KV block, a power of two",
        "Default 16.",
        "enum: Builtin, Simulated, VLLM, SGLang\n",
        "Not supported yet. LoRA adapters that the engine serves beside the model.",
    ] {
        ensure!(said.contains(part), "{part} is not in {said}");
    }
    let said = kubectl.run(&["explain", "rtp.spec.onNoPrefill.action"])?;
    ensure!(said.contains("Reject: answered 503."), "{said}");
    let said = kubectl.run(&["explain", "dcp.status.conditions.reason"])?;
    ensure!(said.contains("One word, for programs."), "{said}");
    Ok(())
}

fn what_is_there_is_shown(kubectl: &Kubectl) -> Result<()> {
    let condition = |kind: &str, status: &str| {
        json!({
            "type": kind, "status": status, "reason": "Shown", "message": "for the columns", "observedGeneration": 1,
            "lastTransitionTime": "2026-11-30T00:00:00Z",
        })
    };
    let status = json!({"status": {
        "observedGeneration": 1, "replicas": 2, "readyReplicas": 1, "availableReplicas": 1, "updatedReplicas": 2, "drainingReplicas": 3,
        "ready": "1/2", "selector": "serving.baton.dev/pool=smallest", "revisions": [{"hash": "abc123", "ready": 1, "draining": 3}],
        "domains": [{"path": "zone-a/rack-1", "ready": 1}], "conditions": [condition("Ready", "False")],
    }});
    patch(kubectl, "pfp/smallest", &status)?;
    let status = json!({"status": {"conditions": [condition("Ready", "True"), condition("Disaggregating", "False")]}});
    patch(kubectl, "rtp/smallest", &status)?;

    let table = |arguments: &[&str]| -> Result<Vec<Vec<String>>> {
        let all = [arguments, &["--namespace=default"]].concat();
        let said = kubectl.run(&all)?;
        let words = |line: &str| line.split_whitespace().map(str::to_owned).collect();
        Ok(said.lines().map(words).collect())
    };
    let shown = table(&["get", "pfp"])?;
    let header = "NAME READY UP-TO-DATE DRAINING MODEL REVISION AGE";
    ensure!(shown[0].join(" ") == header, "{shown:?}");
    ensure!(
        shown[1][..6] == ["smallest", "1/2", "2", "3", "tiny", "abc123"],
        "{shown:?}"
    );
    let shown = table(&["get", "rtp"])?;
    let header = "NAME MODEL MODE READY DISAGGREGATING AGE";
    ensure!(shown[0].join(" ") == header, "{shown:?}");
    ensure!(
        shown[1][..5] == ["smallest", "tiny", "Conditional", "True", "False"],
        "{shown:?}"
    );
    let wide = kubectl.run(&["get", "pfp", "--namespace=default", "--output=wide"])?;
    ensure!(wide.contains("for the columns"), "{wide}");
    // One word for all three kinds, and a field to look for.
    let said = kubectl.run(&["get", "baton", "--namespace=default", "--output=name"])?;
    ensure!(
        said == "prefillpool.serving.baton.dev/smallest\nroutepolicy.serving.baton.dev/smallest\n",
        "{said}"
    );
    let found = kubectl.list(&[
        "pfp",
        "--all-namespaces",
        "--field-selector=spec.model.name=tiny",
    ])?;
    ensure!(found.len() == 1, "{found:?}");
    Ok(())
}

fn scale_and_status_are_apart_from_the_spec(kubectl: &Kubectl) -> Result<()> {
    kubectl.run(&[
        "scale",
        "pfp/smallest",
        "--replicas=3",
        "--namespace=default",
    ])?;
    let path = "/apis/serving.baton.dev/v1alpha1/namespaces/default/prefillpools/smallest/scale";
    let scale: Value = serde_json::from_str(&kubectl.run(&["get", "--raw", path])?)?;
    ensure!(scale["spec"]["replicas"] == 3, "{scale}");
    ensure!(
        scale["status"] == json!({"replicas": 2, "selector": "serving.baton.dev/pool=smallest"}),
        "{scale}"
    );
    // A status in a manifest has no effect, and one that does not fit is refused.
    let manifest = SMALLEST.replacen("spec:\n", "status: {replicas: 9}\nspec:\n", 1);
    kubectl.apply(&manifest)?;
    let pool = kubectl.get(&["pfp/smallest", "--namespace=default"])?;
    ensure!(pool["status"]["replicas"] == 2, "{pool}");
    let error = patch(
        kubectl,
        "pfp/smallest",
        &json!({"status": {"replicas": -1}}),
    );
    let error = format!("{:#}", error.err().context("a negative count was taken")?);
    ensure!(error.contains("status.replicas"), "{error}");
    Ok(())
}

fn patch(kubectl: &Kubectl, object: &str, patch: &Value) -> Result<String> {
    kubectl.run(&[
        "patch",
        object,
        "--namespace=default",
        "--subresource=status",
        "--type=merge",
        &format!("--patch={patch}"),
    ])
}
