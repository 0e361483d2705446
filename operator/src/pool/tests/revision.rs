//! What makes a new revision, and what does not.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use baton_crds::PoolRole;

use super::scene::{Scene, changed, observed};
use crate::pool::render::{Rendered, selector};
use crate::pool::{Action, Level, disruption};

fn revision(change: &Value) -> String {
    Scene::new(change).revision()
}

#[test]
fn a_revision_fits_a_label_and_a_host_name() {
    let revision = revision(&json!({}));
    assert_eq!(revision.len(), 10);
    assert!(
        revision
            .chars()
            .all(|c| c.is_ascii_lowercase() || c.is_ascii_digit())
    );
}

#[test]
fn what_changes_the_pod_changes_the_revision() {
    let changes = [
        json!({}),
        json!({"model": {"name": "other"}}),
        json!({"model": {"revision": "r2"}}),
        json!({"model": {"source": {"uri": "builtin://tiny?seed=8"}}}),
        json!({"engine": {"image": "worker:2"}}),
        json!({"engine": {"blockSize": 32}}),
        json!({"engine": {"maxModelLength": 512}}),
        json!({"engine": {"args": ["--verbose"]}}),
        json!({"engine": {"env": [{"name": "A", "value": "1"}]}}),
        json!({"kvPool": {"blocks": 100}}),
        json!({"kvPool": {"leaseSeconds": 31}}),
        json!({"accelerator": {"count": 1}}),
        json!({"accelerator": {"count": 1, "resourceName": "amd.com/gpu"}}),
        json!({"accelerator": {"runtimeClassName": "nvidia"}}),
        json!({"accelerator": {"resourceClaimTemplates": ["gpu"]}}),
        json!({"topology": {"spread": ["host"]}}),
        json!({"topology": {"requireSame": ["rack"]}}),
        json!({"template": {"metadata": {"labels": {"team": "a"}}}}),
        json!({"template": {"metadata": {"annotations": {"team": "a"}}}}),
        json!({"template": {"nodeSelector": {"gpu": "h200"}}}),
        json!({"template": {"tolerations": [{"key": "gpu"}]}}),
        json!({"template": {"priorityClassName": "high"}}),
        json!({"template": {"serviceAccountName": "a"}}),
        json!({"template": {"resources": {"limits": {"memory": "1Gi"}}}}),
    ];
    let revisions: BTreeSet<String> = changes.iter().map(revision).collect();
    assert_eq!(revisions.len(), changes.len(), "each is another");
}

#[test]
fn what_needs_no_new_process_does_not() {
    let usual = revision(&json!({}));
    for change in [
        json!({"replicas": 7}),
        json!({"rollout": {"paused": true}}),
        json!({"rollout": {"maxSurge": 1, "maxUnavailable": 2}}),
        json!({"rollout": {"drainTimeoutSeconds": 3000}}),
        json!({"disruption": {"minAvailable": 1}}),
        // Said and left out are the same.
        json!({"engine": {"blockSize": 16, "dtype": "Auto"}, "parallelism": {"tensor": 1}}),
        json!({"kvPool": {"leaseSeconds": 30}}),
        // Pods offer no Shm.
        json!({"kvPool": {"transports": ["Local", "Tcp"]}}),
    ] {
        assert_eq!(revision(&change), usual, "{change}");
    }
}

#[test]
fn who_owns_the_pool_and_what_policies_tune_make_no_revision() {
    let usual = revision(&json!({}));
    let mut observed = observed(&changed(&json!({})));
    observed.pool.uid = "made-anew".to_owned();
    observed.pool.generation = 9;
    observed.policies.tpot_objective_milliseconds = Some(40);
    observed.settings.levels.push(Level {
        name: "zone".to_owned(),
        node_label: "zone".to_owned(),
    });
    assert_eq!(Rendered::of(&observed).unwrap().revision, usual);
}

/// A new version of the operator that makes the same pods restarts nobody: these hashes are those of the version that knew engines inside
/// the worker only. Who changes the pod on purpose changes them here and says so in the changelog.
#[test]
fn pods_of_engines_inside_the_worker_have_the_revisions_that_they_had() {
    let everything = json!({
        "model": {"revision": "r1", "source": {"uri": null, "persistentVolumeClaim": "weights/m.gguf"}},
        "engine": {"args": ["--verbose"], "env": [{"name": "A", "value": "1"}], "maxModelLength": 512},
        "kvPool": {"blocks": 100},
        "accelerator": {"count": 1, "rdma": {"resourceName": "rdma/hca"}, "resourceClaimTemplates": ["nic"]},
        "topology": {"spread": ["host"], "requireSame": ["rack"]},
        "template": {"volumes": [{"name": "v", "emptyDir": {}}], "volumeMounts": [{"name": "v", "mountPath": "/v"}],
                     "resources": {"requests": {"cpu": 1}}, "tolerations": [{"key": "gpu"}]},
    });
    assert_eq!(revision(&json!({})), "lkvrcmqc69");
    assert_eq!(
        revision(&json!({"engine": {"type": "Simulated"}})),
        "zkjvfv9zsv"
    );
    assert_eq!(revision(&everything), "krxtpd92gl");
}

#[test]
fn pools_of_both_kinds_may_share_a_name_and_never_a_pod() {
    let of = |role: PoolRole| {
        let mut scene = Scene::new(&json!({}));
        scene.observed.pool.role = role;
        let name = match &scene.plan().actions[0] {
            Action::CreatePod(pod) => pod.metadata.name.clone().unwrap(),
            other => panic!("{other:?}"),
        };
        let budget = disruption::name(&scene.observed.pool);
        (scene.revision(), name, selector("chat", role), budget)
    };
    let (prefill, decode) = (of(PoolRole::Prefill), of(PoolRole::Decode));
    assert_ne!(prefill.0, decode.0, "a revision covers the role");
    assert_ne!(prefill.1, decode.1, "and a pod's name its revision");
    assert_ne!(prefill.2, decode.2);
    assert_ne!(prefill.3, decode.3);
}
