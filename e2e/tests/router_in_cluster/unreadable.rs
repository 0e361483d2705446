//! Objects that were stored under other rules than today's, and that no type of ours can hold: their status says so, once, and operator
//! and router go on with all others.

use anyhow::{Context, Result, ensure};
use baton_e2e::binaries::repository;
use baton_e2e::cluster::kubectl::condition;
use serde_json::{Value, json};

use super::{NAMESPACE, SOON, Scene, ask, generation};

/// Kind, its plural, a spec that nobody can read, and the field that is to be named.
fn cases() -> [(&'static str, &'static str, Value, &'static str); 3] {
    let pool = |engine: &str, blocks: Value| json!({"model": {"name": "old"}, "engine": {"type": engine}, "kvPool": {"blocks": blocks}});
    [
        (
            "DecodePool",
            "decodepools",
            pool("Ancient", json!(64)),
            "spec.engine.type",
        ),
        (
            "PrefillPool",
            "prefillpools",
            pool("Simulated", json!("many")),
            "spec.kvPool.blocks",
        ),
        (
            "RoutePolicy",
            "routepolicies",
            json!({"model": "old", "mode": "Sometimes", "decodePools": [{"name": "old"}]}),
            "spec.mode",
        ),
    ]
}

pub(super) async fn is_said_and_disturbs_nobody(scene: &Scene) -> Result<()> {
    let kubectl = scene.baton.kubectl();
    let (_, from) = scene.baton.writes(0)?;
    store(scene)?;
    for (kind, _, _, field) in cases() {
        let object = [kind, "old", "--namespace=tried"];
        kubectl.until(
            &format!("{kind} old is called unreadable"),
            SOON,
            &object,
            |object| {
                let (status, reason, message) = condition(object, "Stalled");
                let current =
                    object["status"]["observedGeneration"] == object["metadata"]["generation"];
                let said = message.contains(field) && message.contains("CustomResourceDefinition");
                if status == "True" && reason == "SpecUnreadable" && said && current {
                    Ok(())
                } else {
                    Err(object["status"].to_string())
                }
            },
        )?;
    }
    // The router refuses the policy by name, and serves by the others.
    let seen = scene
        .policies("the policy that cannot be read is refused", |seen| {
            seen["refused"][0]["name"] == "old"
        })
        .await?;
    let reason = seen["refused"][0]["reason"].as_str().unwrap_or_default();
    ensure!(reason.contains("spec.mode"), "{seen}");
    ensure!(generation(&seen) == Some(4), "{seen}");
    ask("g").send(&scene.api).await?;

    // Others are looked after as ever.
    let scale = |replicas: &str| {
        let all = [
            "scale",
            "prefillpool/prefill",
            "--namespace=tried",
            replicas,
        ];
        kubectl.run(&all)
    };
    scale("--replicas=2")?;
    let pool = ["prefillpool/prefill", "--namespace=tried"];
    kubectl.until("the other pool has two", SOON, &pool, |pool| {
        let ready = &pool["status"]["readyReplicas"];
        (ready == 2)
            .then_some(())
            .ok_or_else(|| pool["status"].to_string())
    })?;
    scale("--replicas=1")?;
    // Said once: whoever tries for ever would still be at it.
    scene.baton.at_rest(SOON).await?;
    let (writes, _) = scene.baton.writes(from)?;
    let told = writes
        .iter()
        .filter(|write| write.is_the_operators() && write.name == "old");
    let told: Vec<_> = told.collect();
    ensure!(
        told.len() == 3 && told.iter().all(|write| write.has_succeeded()),
        "three objects were written of: {told:#?}"
    );

    mended(scene)
}

/// Puts the objects there, under definitions that let anything pass; from then on the real ones count.
fn store(scene: &Scene) -> Result<()> {
    let kubectl = scene.baton.kubectl();
    for (kind, plural, spec, _) in cases() {
        let name = format!("{plural}.serving.baton.dev");
        let real = repository().join("crds/generated");
        let mut lax = kubectl.get(&["customresourcedefinition", &name])?;
        let version = lax["spec"]["versions"][0].as_object_mut();
        let version = version.context("a definition without a version")?;
        version.remove("selectableFields");
        let schema = &mut version["schema"]["openAPIV3Schema"];
        schema["x-kubernetes-validations"] = json!([]);
        schema["properties"]["spec"] =
            json!({"type": "object", "x-kubernetes-preserve-unknown-fields": true});
        let replace = ["replace", "--filename=-"];
        kubectl.run_with(&replace, &lax.to_string())?;
        let object = json!({
            "apiVersion": "serving.baton.dev/v1alpha1", "kind": kind,
            "metadata": {"name": "old", "namespace": NAMESPACE}, "spec": spec,
        });
        // The rules of before count for a moment longer.
        baton_e2e::wait::until_blocking(&format!("{kind} is taken"), SOON, || {
            let stored = kubectl.run_with(&["create", "--filename=-"], &object.to_string());
            stored.map_err(|error| format!("{error:#}"))
        })?;
        let file = real.join(format!("{plural}.yaml"));
        kubectl.run(&["replace", "--filename", &file.to_string_lossy()])?;
    }
    Ok(())
}

/// Written as it should be, it is an object like any other.
fn mended(scene: &Scene) -> Result<()> {
    let kubectl = scene.baton.kubectl();
    let spec = json!({"replicas": 0, "engine": {"type": "Simulated"}, "kvPool": null});
    let patch = format!("--patch={}", json!({"spec": spec}));
    for kind in ["decodepool", "prefillpool"] {
        let object = format!("{kind}/old");
        kubectl.run(&[
            "patch",
            &object,
            "--namespace=tried",
            "--type=merge",
            &patch,
        ])?;
        kubectl.until(
            &format!("{object} is read"),
            SOON,
            &[&object, "--namespace=tried"],
            |pool| match condition(pool, "Ready") {
                (status, reason, _) if status == "True" && reason == "ScaledToZero" => Ok(()),
                other => Err(format!("{other:?}")),
            },
        )?;
    }
    for (kind, ..) in cases() {
        kubectl.run(&["delete", kind, "old", "--namespace=tried"])?;
    }
    Ok(())
}
