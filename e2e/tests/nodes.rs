//! Real nodes: the quickstart is served as `make cluster` serves it; a worker's image runs as a pod, answers through a Service and from
//! outside, and survives its neighbour's loss of power; and nothing is left of any of it.

use std::time::Duration;

use anyhow::{Result, ensure};
use baton_e2e::cluster::helm::Helm;
use baton_e2e::cluster::kubectl::condition;
use baton_e2e::cluster::{self, Cluster, service};
use baton_e2e::{scenario, wait};
use remains::Remains;

#[path = "nodes/quickstart.rs"]
mod quickstart;
#[path = "nodes/remains.rs"]
mod remains;

/// A pod whose image is there is Ready long before.
const SOON: Duration = Duration::from_secs(90);
/// The cluster gives a silent node 30 s, and looks every few.
const GIVEN_UP: Duration = Duration::from_secs(150);

#[test]
fn workers_run_on_nodes_of_which_one_can_lose_power_and_nothing_is_left_of_them() {
    scenario(async {
        let Some(images) = cluster::images(&["baton-worker"]) else {
            return Ok(());
        };
        let Some(cluster) = Cluster::to_break(2)? else {
            return Ok(());
        };
        cluster.load(&images)?;
        let kubectl = cluster.kubectl();
        let nodes = kubectl.list(&["nodes"])?;
        ensure!(nodes.len() == 2);
        for node in &nodes {
            let labels = &node["metadata"]["labels"];
            ensure!(
                labels["topology.kubernetes.io/rack"] == "rack-1",
                "{labels}"
            );
            ensure!(
                labels["topology.kubernetes.io/zone"] == "zone-1",
                "{labels}"
            );
            ensure!(node["status"]["allocatable"]["nvidia.com/gpu"] == "8");
        }
        let helm = Helm::found(kubectl.kubeconfig())?;
        if let (Some(images), Some(_)) = (cluster::images(&quickstart::IMAGES), helm) {
            cluster.load(&images)?;
            quickstart::is_served_and_reached(&cluster).await?;
        }

        for (name, node) in [("first", "node-1"), ("second", "node-2")] {
            kubectl.apply(&worker(name, node))?;
        }
        kubectl.apply(SERVICE)?;
        for name in ["first", "second"] {
            ready(&cluster, name)?;
            // Through the API server and the node's kubelet: the pod's own port, and its log.
            let card = format!("/api/v1/namespaces/default/pods/{name}:7002/proxy/v1/card");
            let card: serde_json::Value =
                serde_json::from_str(&kubectl.run(&["get", "--raw", &card])?)?;
            ensure!(card["worker"] == name, "{card}");
            let log = kubectl.run(&["logs", name, "--namespace=default"])?;
            ensure!(log.contains("listening control 0.0.0.0:7000"), "{log}");
        }

        // From this machine through the Service, as many times as it takes to meet both of its pods.
        let client = cluster.expose("TRIED", "default/workers", "admin")?;
        let mut met = std::collections::BTreeSet::new();
        wait::until("both pods of a Service answer", SOON, async || {
            let card = service::once(client, "/v1/card").await;
            let card = card.map_err(|error| format!("{error:#}"))?;
            met.insert(card["worker"].to_string());
            match met.len() {
                2 => Ok(()),
                _ => Err(format!("only {met:?}")),
            }
        })
        .await?;

        cluster.program("node-down", &["2"])?;
        kubectl.until(
            "the node is given up",
            GIVEN_UP,
            &["node", "node-2"],
            |node| match condition(node, "Ready").0.as_str() {
                "Unknown" => Ok(()),
                other => Err(other.to_owned()),
            },
        )?;
        // The Service leads to the one that is left: soon, and with every answer of a long row.
        let left = |card: &serde_json::Value| match &card["worker"] {
            name if name == "first" => Ok(()),
            other => Err(format!("{other} answers")),
        };
        let what = "the Service leads to the living pod alone";
        service::settled(what, SOON, client, "/v1/card", left).await?;
        cluster.program("node-up", &["2"])?;
        let node = kubectl.get(&["node", "node-2"])?;
        ensure!(condition(&node, "Ready").0 == "True", "{node}");
        ensure!(node["status"]["allocatable"]["nvidia.com/gpu"] == "8");
        ready(&cluster, "second")?;

        let remains = Remains::of(&cluster)?;
        let found = remains.found();
        for kind in ["/run/netns/", "/sys/fs/cgroup/", "/proc/"] {
            ensure!(
                found.iter().any(|path| path.starts_with(kind)),
                "a cluster that runs has nothing in {kind}: it would not be noticed if it were left"
            );
        }
        drop(cluster);
        let left = remains.found();
        ensure!(left.is_empty(), "left of a cluster: {left:#?}");
        Ok(())
    });
}

fn ready(cluster: &Cluster, pod: &str) -> Result<()> {
    let what = format!("pod {pod} is Ready");
    let arguments = ["pod", pod, "--namespace=default"];
    cluster.kubectl().until(&what, SOON, &arguments, |pod| {
        match condition(pod, "Ready").0.as_str() {
            "True" => Ok(()),
            _ => Err(pod["status"].to_string()),
        }
    })
}

/// A worker as an operator would start it, with its configuration in an annotation that it reads as a file.
fn worker(name: &str, node: &str) -> String {
    let config = serde_json::json!({
        "name": name,
        "pool": "tried",
        "role": "Decode",
        "model": {"name": "tiny", "source": {"builtin": {"name": "tiny", "seed": 7}}},
        "engine": {"type": "Builtin"},
        "kvPool": {"blocks": 64},
    });
    serde_json::json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": "default",
            "labels": {"tried": "worker"},
            "annotations": {"worker-config": config.to_string()},
        },
        "spec": {
            "nodeSelector": {"kubernetes.io/hostname": node},
            "automountServiceAccountToken": false,
            "securityContext": {"runAsNonRoot": true},
            "containers": [{
                "name": "worker",
                "image": "localhost/baton-worker:dev",
                "args": ["serve"],
                "env": [
                    {"name": "BATON_CONFIG", "value": "/etc/baton/worker.json"},
                    {"name": "BATON_CONTROL", "value": "0.0.0.0:7000"},
                    {"name": "BATON_TRANSFER", "value": "0.0.0.0:7001"},
                    {"name": "BATON_ADMIN", "value": "0.0.0.0:7002"},
                    {"name": "BATON_ADVERTISE", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
                ],
                "ports": [{"name": "admin", "containerPort": 7002}],
                "readinessProbe": {"httpGet": {"path": "/readyz", "port": "admin"}, "periodSeconds": 1},
                "resources": {"limits": {"nvidia.com/gpu": "1"}},
                "securityContext": {"readOnlyRootFilesystem": true, "allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]}},
                "volumeMounts": [{"name": "config", "mountPath": "/etc/baton"}],
            }],
            "volumes": [{
                "name": "config",
                "downwardAPI": {"items": [{"path": "worker.json", "fieldRef": {"fieldPath": "metadata.annotations['worker-config']"}}]},
            }],
        },
    })
    .to_string()
}

const SERVICE: &str = r#"
apiVersion: v1
kind: Service
metadata: {name: workers, namespace: default}
spec:
  selector: {tried: worker}
  ports:
  - {name: admin, port: 80, targetPort: admin}
"#;
