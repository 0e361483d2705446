//! The cluster that the other tests stand on: a real API server that answers kubectl, controllers that work, an end without remains; and
//! what there is of it with programs that somebody else has chosen.

use std::path::Path;
use std::process::{Command, Output};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use baton_e2e::binaries::repository;
use baton_e2e::cluster::Cluster;
use baton_e2e::{skipped, wait};

/// An object is there, or gone, long before.
const SOON: Duration = Duration::from_secs(120);

#[test]
fn a_control_plane_serves_kubectl_and_ends_without_remains() -> Result<()> {
    let Some(cluster) = Cluster::control_plane()? else {
        return Ok(());
    };
    let kubectl = cluster.kubectl();

    // Controllers: a namespace gets its ServiceAccount, and its end takes what is in it.
    kubectl.run(&["create", "namespace", "shown"])?;
    let account = ["serviceaccount", "default", "--namespace=shown"];
    kubectl.until("the account is there", SOON, &account, |_| Ok(()))?;
    kubectl.run(&[
        "create",
        "configmap",
        "held",
        "--namespace=shown",
        "--from-literal=a=b",
    ])?;
    kubectl.run(&["delete", "namespace", "shown", "--timeout=120s"])?;

    // OpenAPI is whole: kubectl reads it to refuse a field that is not there and to explain those that are.
    let refused = kubectl.refused(
        &["apply", "--filename=-"],
        "{apiVersion: v1, kind: ConfigMap, metadata: {name: wrong, namespace: default}, dota: {}}",
    )?;
    ensure!(refused.contains("unknown field \"dota\""), "{refused}");
    let explained = kubectl.run(&["explain", "pod.spec.containers"])?;
    ensure!(explained.contains("readinessProbe"), "{explained}");

    if !cluster.is_own() {
        skipped("the scheduler and the log of writes of a cluster that exists");
        return Ok(());
    }
    // The scheduler: onto a node that is only said to be there.
    kubectl.apply(NODE)?;
    kubectl.run_with(
        &[
            "apply",
            "--server-side",
            "--subresource=status",
            "--filename=-",
        ],
        NODE_STATUS,
    )?;
    // It is not Ready yet when it comes, and that taint is the controllers' to take away.
    kubectl.apply(POD)?;
    let pod = ["pod", "placed", "--namespace=default"];
    kubectl.until(
        "the pod is bound",
        SOON,
        &pod,
        |pod| match pod["spec"]["nodeName"].as_str() {
            Some("imagined") => Ok(()),
            other => Err(format!("{other:?}")),
        },
    )?;

    let folder = cluster.folder()?;
    let audit = std::fs::read_to_string(folder.join("logs/audit.jsonl"))?;
    let written = audit
        .lines()
        .map(serde_json::from_str::<serde_json::Value>)
        .collect::<Result<Vec<_>, _>>()?;
    ensure!(
        written.iter().any(|event| event["verb"] == "create"
            && event["objectRef"]["resource"] == "configmaps"
            && event["objectRef"]["name"] == "held"),
        "the log of writes lacks one"
    );
    let ids = processes(folder)?;
    ensure!(ids.len() == 4, "four programs run: {ids:?}");
    drop(cluster);
    for id in ids {
        ensure!(!runs(id), "process {id} still runs");
    }
    Ok(())
}

#[test]
fn a_cluster_ends_when_whoever_wanted_it_was_killed() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let mut owner = Command::new("sleep").arg("600").spawn()?;
    let started = Cluster::owned_by(owner.id(), folder.path());
    if !matches!(started, Ok(true)) {
        owner.kill()?;
        owner.wait()?;
        return started.map(|_| ());
    }
    let ids = processes(folder.path())?;
    ensure!(ids.len() == 4, "four programs run: {ids:?}");
    owner.kill()?;
    owner.wait()?;
    wait::until_blocking("nothing is left but logs", SOON, || {
        let running = ids.iter().filter(|id| runs(**id));
        let known = folder.path().join("cluster.json").exists();
        match (running.count(), known) {
            (0, false) => Ok(()),
            (running, known) => Err(format!("{running} processes run, state is there: {known}")),
        }
    })
}

/// As developers of operators have them: `setup-envtest` brings these three and no more.
#[test]
fn with_the_programs_of_envtest_objects_are_served_and_the_rest_is_said_to_be_missing() -> Result<()>
{
    if std::env::var_os("BATON_E2E_KUBECONFIG").is_some() {
        skipped("BATON_E2E_KUBECONFIG is set, and this test starts an API server");
        return Ok(());
    }
    let here = program(&["can", "api-server"], None)?;
    if !here.status.success() {
        skipped(&format!(
            "no API server on this machine: {}",
            text(&here.stdout)
        ));
        return Ok(());
    }
    let built = well(&program(&["build"], None)?)?;
    let assets = tempfile::tempdir()?;
    for name in ["etcd", "kube-apiserver", "kubectl"] {
        let program = Path::new(built.trim()).join(name);
        std::os::unix::fs::symlink(program, assets.path().join(name))?;
    }
    let asked = |arguments: &[&str]| program(arguments, Some(assets.path()));

    well(&asked(&["can", "api-server"])?)?;
    for kind in ["control-plane", "nodes"] {
        let refused = asked(&["can", kind])?;
        let said = text(&refused.stdout);
        ensure!(
            refused.status.code() == Some(1) && said.lines().count() == 1,
            "{kind}: {} {said}{}",
            refused.status,
            text(&refused.stderr)
        );
        for word in [
            "KUBEBUILDER_ASSETS",
            "kube-controller-manager",
            "kube-scheduler",
        ] {
            ensure!(said.contains(word), "{kind} does not name {word}: {said}");
        }
    }

    // What runs with them: whoever asks for nodes all the same is told, and objects are served.
    let state = tempfile::tempdir()?;
    let (folder, owner) = (
        state.path().to_string_lossy(),
        std::process::id().to_string(),
    );
    let up = ["up", "--directory", &folder, "--owner", &owner];
    let nodes = asked(&[&up[..], &["--nodes", "1"]].concat())?;
    let said = text(&nodes.stderr);
    ensure!(
        nodes.status.code() == Some(1) && said.lines().count() == 1 && said.contains("has no kube"),
        "{said}"
    );
    let kubeconfig = well(&asked(&up)?)?;
    let made = Command::new(assets.path().join("kubectl"))
        .args(["create", "namespace", "tried", "--output=name"])
        .env("KUBECONFIG", kubeconfig.trim())
        .output()?;
    ensure!(well(&made)?.trim() == "namespace/tried");
    let ids = processes(state.path())?;
    ensure!(ids.len() == 2, "two programs run: {ids:?}");
    well(&asked(&["down", "--directory", &folder])?)?;
    for id in ids {
        ensure!(!runs(id), "process {id} still runs");
    }
    Ok(())
}

/// What the program that makes clusters is asked; with that folder of programs, if any.
fn program(arguments: &[&str], assets: Option<&Path>) -> Result<Output> {
    let mut command = Command::new(repository().join("e2e/cluster/cluster"));
    if let Some(assets) = assets {
        command.env("KUBEBUILDER_ASSETS", assets);
    }
    Ok(command.args(arguments).output()?)
}

fn well(output: &Output) -> Result<String> {
    let (said, errors) = (text(&output.stdout), text(&output.stderr));
    ensure!(output.status.success(), "{}: {said}{errors}", output.status);
    Ok(said)
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// One that has ended and waits for its parent to notice does not.
fn runs(id: u64) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{id}/stat")).unwrap_or_default();
    stat.rsplit_once(')')
        .is_some_and(|(_, rest)| !rest.trim_start().starts_with(['Z', 'X']))
}

/// Ids of the processes that a cluster consists of.
fn processes(folder: &Path) -> Result<Vec<u64>> {
    std::fs::read_to_string(folder.join("processes.jsonl"))?
        .lines()
        .map(|line| {
            let entry: serde_json::Value = serde_json::from_str(line)?;
            entry["id"].as_u64().context("a process without an id")
        })
        .collect()
}

const NODE: &str = "{apiVersion: v1, kind: Node, metadata: {name: imagined}}";

const NODE_STATUS: &str = r#"
apiVersion: v1
kind: Node
metadata: {name: imagined}
status:
  capacity: {cpu: "4", memory: 8Gi, pods: "10", nvidia.com/gpu: "8"}
  allocatable: {cpu: "4", memory: 8Gi, pods: "10", nvidia.com/gpu: "8"}
  conditions:
  - {type: Ready, status: "True", reason: Imagined, message: "", lastHeartbeatTime: null, lastTransitionTime: null}
"#;

const POD: &str = r#"
apiVersion: v1
kind: Pod
metadata: {name: placed, namespace: default}
spec:
  containers:
  - name: one
    image: localhost/none:1
    resources: {limits: {nvidia.com/gpu: 8}}
"#;
