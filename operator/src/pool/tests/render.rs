//! The pod that a spec means.

use serde_json::{Value, json};

use super::scene::{Scene, changed, observed};
use crate::pool::Action;
use crate::pool::render::Rendered;

fn pod(change: &Value) -> Value {
    let observed = observed(&changed(change));
    serde_json::to_value(Rendered::of(&observed).unwrap().pod("chat-x-1")).unwrap()
}

fn container(change: &Value) -> Value {
    pod(change)["spec"]["containers"][0].clone()
}

/// Reason and message of the refusal.
fn refused(change: &Value) -> (&'static str, String) {
    let refusal = Rendered::of(&observed(&changed(change))).unwrap_err();
    (refusal.reason, refusal.message)
}

#[test]
fn a_pod_runs_one_worker_that_knows_where_it_is() {
    let container = container(&json!({"engine": {"args": ["--log", "debug"]}}));
    assert_eq!(container["name"], "worker");
    assert_eq!(container["image"], "worker:1");
    assert_eq!(container["command"], json!(["/usr/local/bin/baton-worker"]));
    assert_eq!(container["args"], json!(["serve", "--log", "debug"]));
    let environment = container["env"].as_array().unwrap();
    let value = |name: &str| {
        let found = environment
            .iter()
            .find(|variable| variable["name"] == name)
            .unwrap();
        found["value"].clone()
    };
    assert_eq!(value("BATON_CONFIG"), "/etc/baton/worker.json");
    assert_eq!(value("BATON_CONTROL"), "0.0.0.0:7000");
    assert_eq!(value("BATON_TRANSFER"), "0.0.0.0:7001");
    assert_eq!(value("BATON_ADMIN"), "0.0.0.0:7002");
    assert_eq!(value("BATON_ADVERTISE"), "$(POD_IP)");
    assert_eq!(value("BATON_HASH_KEY_FILE"), "/etc/baton-hash-key/key");
    let order = |name: &str| environment.iter().position(|v| v["name"] == name).unwrap();
    assert!(
        order("POD_IP") < order("BATON_ADVERTISE"),
        "a variable is expanded from earlier ones"
    );
    assert_eq!(container["readinessProbe"]["httpGet"]["path"], "/readyz");
    assert_eq!(container["livenessProbe"]["httpGet"]["path"], "/healthz");
    assert_eq!(
        container["startupProbe"]["httpGet"],
        json!({"path": "/healthz", "port": "admin"})
    );
}

#[test]
fn a_pods_configuration_is_its_own_annotation_read_as_a_file() {
    let mut observed = observed(&changed(&json!({"kvPool": {"blocks": 64}})));
    observed.policies.tpot_objective_milliseconds = Some(40);
    let rendered = Rendered::of(&observed).unwrap();
    let pod = serde_json::to_value(rendered.pod("chat-x-1")).unwrap();
    let annotations = &pod["metadata"]["annotations"];
    let text = annotations["serving.baton.dev/worker-config"]
        .as_str()
        .unwrap();
    let configuration: Value = serde_json::from_str(text).unwrap();
    assert_eq!(
        configuration,
        json!({
            "name": "chat-x-1", "pool": "chat", "role": "Decode", "revision": rendered.revision,
            "model": {"name": "tiny", "revision": "", "source": {"builtin": {"name": "tiny", "seed": 7}}},
            "engine": {"type": "Builtin", "blockSize": 16},
            "kvPool": {"blocks": 64, "leaseSeconds": 30, "transports": ["Local", "Tcp"]},
            "topology": [], "drainTimeoutSeconds": 20, "tpotObjectiveMilliseconds": 40,
        })
    );
    let volumes = pod["spec"]["volumes"].as_array().unwrap();
    let volume = volumes
        .iter()
        .find(|volume| volume["name"] == "worker-config")
        .unwrap();
    assert_eq!(
        volume["downwardAPI"]["items"],
        json!([{
            "path": "worker.json",
            "fieldRef": {"fieldPath": "metadata.annotations['serving.baton.dev/worker-config']"},
        }])
    );
}

#[test]
fn a_pod_is_found_by_its_labels_and_owned_by_its_pool() {
    let scene = Scene::new(&json!({
        "model": {"name": "org/tiny"},
        "template": {"metadata": {"labels": {
            "team": "a", "serving.baton.dev/pool": "stolen", "serving.baton.dev/draining": "true",
        }}},
    }));
    let pod = serde_json::to_value(Rendered::of(&scene.observed).unwrap().pod("p")).unwrap();
    assert_eq!(
        pod["metadata"]["labels"],
        json!({
            "team": "a",
            "app.kubernetes.io/name": "baton-worker",
            "app.kubernetes.io/instance": "chat",
            "app.kubernetes.io/component": "decode",
            "app.kubernetes.io/part-of": "baton",
            "app.kubernetes.io/managed-by": "baton-operator",
            "llm-d.ai/role": "decode",
            "serving.baton.dev/pool": "chat",
            "serving.baton.dev/role": "decode",
            "serving.baton.dev/model": "org-tiny",
            "serving.baton.dev/revision": scene.revision(),
        }),
        "Baton's names are Baton's"
    );
    assert_eq!(
        pod["metadata"]["annotations"]["serving.baton.dev/model-name"],
        "org/tiny"
    );
    assert_eq!(
        pod["metadata"]["ownerReferences"],
        json!([{
            "apiVersion": "serving.baton.dev/v1alpha1", "kind": "DecodePool", "name": "chat",
            "uid": "pool-uid", "controller": true, "blockOwnerDeletion": true,
        }])
    );
    assert_eq!(pod["metadata"]["namespace"], "serving");
}

#[test]
fn a_pod_may_do_nothing_that_a_worker_does_not_need() {
    let pod = pod(&json!({}));
    let spec = &pod["spec"];
    assert_eq!(spec["automountServiceAccountToken"], false);
    assert_eq!(spec["enableServiceLinks"], false);
    assert_eq!(
        spec["securityContext"],
        json!({
            "runAsNonRoot": true, "runAsUser": 65532, "runAsGroup": 65532,
            "seccompProfile": {"type": "RuntimeDefault"},
        })
    );
    assert_eq!(
        spec["containers"][0]["securityContext"],
        json!({
            "allowPrivilegeEscalation": false, "readOnlyRootFilesystem": true,
            "capabilities": {"drop": ["ALL"]},
        })
    );
}

#[test]
fn a_pod_is_given_longer_than_its_drain_and_drains_before_it_ends() {
    let pod = pod(&json!({"rollout": {"drainTimeoutSeconds": 120}}));
    assert_eq!(pod["spec"]["terminationGracePeriodSeconds"], 150);
    assert_eq!(
        pod["spec"]["containers"][0]["lifecycle"]["preStop"]["httpGet"],
        json!({"path": "/drain?waitSeconds=120", "port": "admin"})
    );
    assert_eq!(
        pod["spec"]["readinessGates"],
        json!([{"conditionType": "serving.baton.dev/registered"}])
    );
}

#[test]
fn devices_are_asked_for_and_limited_alike() {
    let pod = pod(&json!({
        "accelerator": {
            "count": 2, "rdma": {"resourceName": "rdma/hca", "count": 1},
            "resourceClaimTemplates": ["nic"], "runtimeClassName": "nvidia",
        },
        "template": {"resources": {
            "requests": {"cpu": 4, "nvidia.com/gpu": 8}, "limits": {"memory": "8Gi"},
        }},
    }));
    assert_eq!(
        pod["spec"]["containers"][0]["resources"],
        json!({
            "requests": {"cpu": "4", "nvidia.com/gpu": "2", "rdma/hca": "1"},
            "limits": {"memory": "8Gi", "nvidia.com/gpu": "2", "rdma/hca": "1"},
            "claims": [{"name": "claim-0"}],
        })
    );
    assert_eq!(
        pod["spec"]["resourceClaims"],
        json!([{"name": "claim-0", "resourceClaimTemplateName": "nic"}])
    );
    assert_eq!(pod["spec"]["runtimeClassName"], "nvidia");
    assert_eq!(
        container(&json!({}))["resources"],
        Value::Null,
        "a processor needs no device"
    );
}

#[test]
fn pods_are_spread_and_kept_together_by_the_labels_of_nodes() {
    let pod = pod(&json!({
        "topology": {"spread": ["host"], "requireSame": ["rack"]},
        "template": {"affinity": {"podAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": "zone"}],
        }}},
    }));
    let own = json!({"matchLabels": {
        "serving.baton.dev/pool": "chat", "serving.baton.dev/role": "decode",
    }});
    assert_eq!(
        pod["spec"]["topologySpreadConstraints"],
        json!([{
            "maxSkew": 1, "topologyKey": "kubernetes.io/hostname",
            "whenUnsatisfiable": "ScheduleAnyway", "labelSelector": own,
            "matchLabelKeys": ["serving.baton.dev/revision"],
        }])
    );
    assert_eq!(
        pod["spec"]["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"],
        json!([
            {"topologyKey": "zone"},
            {"topologyKey": "topology.kubernetes.io/rack", "labelSelector": own},
        ])
    );
}

#[test]
fn a_models_file_is_in_the_image_on_the_node_in_a_claim_or_in_another_image() {
    let of = |source: &Value| {
        let mut scene = Scene::new(&json!({}));
        scene.observed.pool.spec.model.source = serde_json::from_value(source.clone()).unwrap();
        let pod = Rendered::of(&scene.observed).unwrap().pod("p");
        let pod = serde_json::to_value(pod).unwrap();
        let text = pod["metadata"]["annotations"]["serving.baton.dev/worker-config"].as_str();
        let configuration: Value = serde_json::from_str(text.unwrap()).unwrap();
        let find = |list: &Value| {
            let list = list.as_array().unwrap();
            list.iter()
                .find(|item| item["name"] == "model")
                .cloned()
                .unwrap_or_default()
        };
        (
            configuration["model"]["source"]["path"].clone(),
            find(&pod["spec"]["volumes"]),
            find(&pod["spec"]["containers"][0]["volumeMounts"])["mountPath"].clone(),
        )
    };
    assert_eq!(
        of(&json!({"uri": "file:///models/m.gguf"})),
        (json!("/models/m.gguf"), Value::Null, Value::Null)
    );
    assert_eq!(
        of(&json!({"hostPath": "/data/m.gguf"})),
        (
            json!("/model/m.gguf"),
            json!({"name": "model", "hostPath": {"path": "/data/m.gguf", "type": "File"}}),
            json!("/model/m.gguf")
        )
    );
    assert_eq!(
        of(&json!({"persistentVolumeClaim": "weights/llama/m.gguf"})),
        (
            json!("/model/llama/m.gguf"),
            json!({"name": "model", "persistentVolumeClaim": {"claimName": "weights", "readOnly": true}}),
            json!("/model")
        )
    );
    assert_eq!(
        of(&json!({"image": "models/tiny:1"})),
        (
            json!("/model/model.gguf"),
            json!({"name": "model", "image": {"reference": "models/tiny:1"}}),
            json!("/model")
        )
    );
}

#[test]
fn the_operators_image_is_for_pools_that_name_none() {
    let mut scene = Scene::new(&json!({}));
    scene.observed.pool.spec.engine.image = None;
    let refusal = Rendered::of(&scene.observed).unwrap_err();
    assert_eq!(refusal.reason, "NoImage");
    scene.observed.settings.worker_image = Some("default:1".to_owned());
    let pod = Rendered::of(&scene.observed).unwrap().pod("p");
    assert_eq!(
        pod.spec.unwrap().containers[0].image.as_deref(),
        Some("default:1")
    );
}

#[test]
fn a_spec_that_no_pod_follows_from_is_refused_by_its_field() {
    let cases = [
        (
            json!({"model": {"source": {"uri": "pypi://p==1/m.gguf"}}}),
            "ModelSourceUnsupported",
            "pods do not fetch models from package indexes: put the file into an image or a volume",
        ),
        (
            json!({"model": {"source": {"uri": null, "persistentVolumeClaim": "weights"}}}),
            "InvalidSpec",
            "spec.model.source.persistentVolumeClaim is \"weights\", must be CLAIM/PATH",
        ),
        (
            json!({"model": {"source": {"uri": null, "persistentVolumeClaim": "weights/../x"}}}),
            "InvalidSpec",
            "must stay inside the claim",
        ),
        (
            json!({"parallelism": {"nodesPerReplica": 2}}),
            "MultiNodeReplicasUnsupported",
            "spec.parallelism.nodesPerReplica is 2",
        ),
        (
            json!({"topology": {"spread": ["planet"]}}),
            "UnknownTopologyLevel",
            "spec.topology.spread[0] is planet, must be a level of the operator's --topology-levels: host, rack",
        ),
        (
            json!({"engine": {"env": [{"name": "BATON_CONFIG", "value": "x"}]}}),
            "InvalidSpec",
            "spec.engine.env[0].name is BATON_CONFIG",
        ),
        (
            json!({"template": {"tolerations": [{"key": 5}]}}),
            "InvalidTemplate",
            "spec.template.tolerations[0]: ",
        ),
        (
            json!({"template": {"volumes": [{"name": "tmp"}]}}),
            "InvalidTemplate",
            "spec.template.volumes[0].name is tmp",
        ),
        (
            json!({"template": {"volumeMounts": [{"name": "x", "mountPath": "/etc/baton/"}]}}),
            "InvalidTemplate",
            "spec.template.volumeMounts[0].mountPath is /etc/baton",
        ),
    ];
    for (change, reason, said) in cases {
        let (refused, message) = refused(&change);
        assert_eq!(refused, reason, "{message}");
        assert!(message.contains(said), "{message} should say {said}");
    }
}

#[test]
fn a_refused_spec_changes_no_pod_and_stalls_the_pool() {
    let mut scene = Scene::new(&json!({"replicas": 1})).with([super::scene::ready("a").old()]);
    scene.observed.refusals = vec!["spec.x: must be y".to_owned()];
    let plan = scene.plan();
    let moved = plan.actions.iter().any(|action| {
        matches!(
            action,
            Action::CreatePod(_) | Action::DeletePod { .. } | Action::Drain { .. }
        )
    });
    assert!(!moved, "{:?}", plan.actions);
    let stalled = plan
        .status
        .conditions
        .iter()
        .find(|c| c.condition_type == "Stalled")
        .unwrap();
    assert_eq!(
        (stalled.status.as_str(), stalled.reason.as_str()),
        ("True", "InvalidSpec")
    );
    assert_eq!(plan.notes.len(), 1, "said once: {:?}", plan.notes);
    scene.observed.pool.status = Some(plan.status);
    assert_eq!(scene.plan().notes, []);
}
