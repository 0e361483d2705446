//! Pods of vLLM and SGLang on a real API server: it takes them as the operator makes them. No node runs them: the machine has no image
//! of these engines. Pods of VLLM with a stand-in in them run in `cluster_serving`.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use baton_e2e::binaries::repository;
use baton_e2e::cluster::kubectl::condition;
use baton_e2e::cluster::operated::Operated;
use baton_e2e::scenario;
use serde_json::{Value, json};

const SOON: Duration = Duration::from_secs(60);

/// What the examples do not have: Baton's connector, devices of several kinds, an image as the model's source.
const MORE: &str = "
apiVersion: serving.baton.dev/v1alpha1
kind: DecodePool
metadata: {name: verified}
spec:
  model: {name: m, source: {image: 'localhost/models/m:1'}}
  engine: {type: VLLM, image: 'localhost/vllm:1', connector: Baton}
  kvPool: {bytes: 1073741824}
---
apiVersion: serving.baton.dev/v1alpha1
kind: PrefillPool
metadata: {name: wide}
spec:
  model: {name: m, source: {uri: 'hf://org/m'}}
  engine: {type: VLLM, image: 'localhost/vllm:1', env: [{name: HF_TOKEN, valueFrom: {secretKeyRef: {name: hub, key: token}}}]}
  parallelism: {tensor: 4, pipeline: 2, expert: 4}
  accelerator: {rdma: {resourceName: rdma/hca}, resourceClaimTemplates: [nic]}
";

#[test]
fn an_api_server_takes_the_pods_of_engines() {
    scenario(async {
        let Some(baton) = Operated::start()? else {
            return Ok(());
        };
        let operator = baton.operator("operator", "one")?;
        operator.leads(SOON).await?;
        let examples = repository().join("examples/cluster");
        for (namespace, manifest) in [
            ("vllm", read(&examples.join("vllm.yaml"))?),
            ("sglang", read(&examples.join("sglang.yaml"))?),
            ("more", MORE.to_owned()),
        ] {
            let kubectl = baton.kubectl();
            kubectl.run(&["create", "namespace", namespace])?;
            let file = ["apply", "--filename=-", "--namespace", namespace];
            kubectl.run_with(&file, &manifest)?;
            let pools = pools(&baton, namespace)?;
            ensure!(pools.len() == 2, "{namespace} has {} pools", pools.len());
            for pool in pools {
                pods_are_there(&baton, namespace, &pool)?;
            }
        }
        Ok(())
    });
}

fn read(file: &Path) -> Result<String> {
    std::fs::read_to_string(file).with_context(|| file.display().to_string())
}

fn pools(baton: &Operated, namespace: &str) -> Result<Vec<Value>> {
    let of = |kind: &str| {
        let namespace = format!("--namespace={namespace}");
        baton.kubectl().list(&[kind, &namespace])
    };
    Ok([of("prefillpools")?, of("decodepools")?].concat())
}

/// As many as the pool has replicas, each as an API server has taken it; what it may have dropped without a word is looked at.
fn pods_are_there(baton: &Operated, namespace: &str, pool: &Value) -> Result<()> {
    let name = pool["metadata"]["name"].as_str().unwrap_or_default();
    let kind = pool["kind"].as_str().unwrap_or_default().to_lowercase();
    let wanted = pool["spec"]["replicas"].as_u64().unwrap_or_default();
    let at = format!("--namespace={namespace}");
    let object = format!("{kind}/{name}");
    let kubectl = baton.kubectl();
    kubectl.until(
        &format!("{object} has its pods"),
        SOON,
        &[&object, &at],
        |pool| {
            let told = pool["status"]["replicas"].as_u64();
            if told == Some(wanted) {
                return Ok(());
            }
            Err(format!("{:?}", condition(pool, "Reconciling")))
        },
    )?;
    let selector = format!("--selector=serving.baton.dev/pool={name}");
    let pods = kubectl.list(&["pods", &at, &selector])?;
    ensure!(pods.len() as u64 == wanted, "{object}: {} pods", pods.len());
    for pod in pods {
        let spec = &pod["spec"];
        let (daemon, engine) = (&spec["initContainers"][0], &spec["containers"][0]);
        ensure!(
            daemon["name"] == "worker" && engine["name"] == "engine",
            "{spec}"
        );
        ensure!(daemon["restartPolicy"] == "Always", "no sidecar: {daemon}");
        let drain = &engine["lifecycle"]["preStop"]["httpGet"];
        ensure!(drain["port"] == json!(7002), "{drain}");
        let ports = engine["ports"].as_array().context("no ports")?;
        ensure!(ports.len() == 4 && ports[0]["name"] == "http", "{ports:?}");
        ensure!(spec["readinessGates"][0]["conditionType"] == "serving.baton.dev/registered");
        if name == "verified" {
            let volumes = spec["volumes"].as_array().context("no volumes")?;
            let images: Vec<&Value> = volumes
                .iter()
                .map(|volume| &volume["image"]["reference"])
                .collect();
            for image in ["localhost/models/m:1", "localhost/baton-worker:none"] {
                ensure!(
                    images.contains(&&json!(image)),
                    "the cluster has no image volumes: {volumes:?}"
                );
            }
        }
        if name == "wide" {
            ensure!(
                engine["resources"]["limits"]["nvidia.com/gpu"] == "8",
                "{engine}"
            );
            ensure!(
                spec["resourceClaims"][0]["resourceClaimTemplateName"] == "nic",
                "{spec}"
            );
        }
    }
    Ok(())
}
