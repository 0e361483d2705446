//! What `make cluster` does after its build: the quickstart deployed, and reached by the lines that `make -s cluster-env` prints.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use baton_e2e::binaries::repository;
use baton_e2e::cluster::Cluster;
use baton_e2e::cluster::installed::plugin;
use baton_e2e::http::Client;
use baton_e2e::wait;
use serde_json::{Value, json};

pub(crate) const IMAGES: [&str; 3] = ["baton-operator", "baton-router", "baton-worker-smollm2"];

/// Records are written off the hot path.
const EXPLAINED: Duration = Duration::from_secs(10);

/// The images are on the nodes.
pub(crate) async fn is_served_and_reached(cluster: &Cluster) -> Result<()> {
    // The command of the build under test, which need not be the one that `make build` leaves.
    plugin(cluster)?;
    let manifest = repository().join("examples/cluster/quickstart.yaml");
    let told = cluster.program("deploy", &[&manifest.to_string_lossy()])?;
    ensure!(
        told.contains("The cluster serves smollm2-135m-instruct"),
        "{told}"
    );
    let lines = cluster.program("env", &[])?;
    let shell = |script: &str| -> Result<String> {
        // As a user's shell takes them, which knows nothing of the cluster yet.
        let output = Command::new("sh")
            .args(["-euc", &format!("eval \"$TO_EVAL\"\n{script}")])
            .env("TO_EVAL", &lines)
            .env_remove("KUBECONFIG")
            .output()?;
        let errors = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "{script}: {errors}");
        Ok(String::from_utf8(output.stdout)?.trim().to_owned())
    };

    let kubeconfig = shell("echo \"$KUBECONFIG\"")?;
    ensure!(
        cluster.kubectl().kubeconfig() == Path::new(&kubeconfig),
        "KUBECONFIG={kubeconfig}"
    );
    for name in ["kubectl", "helm", "kubectl-baton"] {
        let path = shell(&format!("command -v {name}"))?;
        let ours = cluster.programs().join(name);
        ensure!(
            ours == Path::new(&path),
            "{name} is {path}, not {}",
            ours.display()
        );
    }
    let releases = shell("helm list --namespace baton --short")?;
    ensure!(
        releases.lines().collect::<Vec<_>>() == ["baton", "baton-crds"],
        "{releases}"
    );
    let pools = shell("kubectl get pfp,dcp,rtp --output=name")?;
    ensure!(
        pools.lines().count() == 3,
        "not in the namespace of the quickstart: {pools}"
    );

    let at = |name: &str| -> Result<Client> {
        let url = shell(&format!("echo \"${name}\""))?;
        let address = url.strip_prefix("http://").context(url.clone())?;
        Ok(Client::new(address.parse()?))
    };
    at("BATON_ADMIN")?.get("/readyz").await?.well()?;
    let question = json!({
        "model": "smollm2-135m-instruct", "max_tokens": 16, "messages": [{"role": "user", "content": "List three colours."}],
    });
    let api = at("BATON_URL")?;
    let answer = api.post("/v1/chat/completions", &[], &question).await?;
    let answer = answer.well()?;
    let said = answer.json()?;
    let words = said["choices"][0]["message"]["content"].as_str();
    ensure!(words.is_some_and(|words| !words.is_empty()), "{said}");
    let run = answer.header("x-baton-run").context("no run")?;
    let explain = format!("kubectl baton explain {run} --output json");
    wait::until_blocking("the run is explained", EXPLAINED, || {
        let record = shell(&explain).map_err(|error| format!("{error:#}"))?;
        let mode = serde_json::from_str::<Value>(&record).map(|mut record| record["mode"].take());
        match mode {
            Ok(mode) if mode == "Conditional" => Ok(()),
            _ => Err(record),
        }
    })?;

    // What comes after has the nodes for itself.
    let kubectl = cluster.kubectl();
    kubectl.run(&["delete", "namespace", "baton", "--timeout=120s"])?;
    Ok(())
}
