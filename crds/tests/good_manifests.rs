//! Manifests that are read: what becomes of them, and what is said as a warning.

use baton_crds::policy::{Mode, Overrides, Pooling};
use baton_crds::pool::{EngineType, Transport};
use baton_crds::{ModelLocation, PoolRole, Resources, read_documents, read_fleet};

const POOLS: &str = r#"
apiVersion: serving.baton.dev/v1alpha1
kind: PrefillPool
metadata: {name: prefill, labels: {tier: small}}
spec:
  model: {name: tiny, source: {uri: "builtin://tiny?seed=3"}}
  engine: {type: Simulated, blockSize: 32, simulated: {prefillBaseMicroseconds: 2000, decodePerSequenceNanoseconds: 150000}}
  topology: {domain: {rack: r, host: a}}
---
apiVersion: serving.baton.dev/v1alpha1
kind: DecodePool
metadata: {name: decode, labels: {tier: small}}
spec:
  replicas: 2
  model: {name: tiny, source: {uri: "builtin://tiny?seed=3"}}
  engine: {type: Simulated, blockSize: 32}
"#;

const POLICY: &str = r#"
apiVersion: serving.baton.dev/v1alpha1
kind: RoutePolicy
metadata: {name: tiny}
spec:
  model: tiny
  prefillPools: [{name: prefill}]
  decodePools: [{selector: {matchLabels: {tier: small}}}]
  pooling: Strict
  overrides: Allowed
"#;

fn fleet(files: &[(&str, &str)]) -> Resources {
    match read_fleet(files.iter().copied()) {
        Ok(resources) => resources,
        Err(problems) => {
            let lines: Vec<String> = problems.iter().map(ToString::to_string).collect();
            panic!("{}", lines.join("\n"))
        }
    }
}

#[test]
fn several_files_make_one_fleet() {
    let resources = fleet(&[("pools.yaml", POOLS), ("policy.yaml", POLICY)]);
    assert_eq!(resources.warnings, [] as [&str; 0]);
    assert_eq!(resources.pools.len(), 2);
    let prefill = &resources.pools[0];
    assert_eq!(
        (prefill.role, prefill.spec.replicas),
        (PoolRole::Prefill, 1)
    );
    assert_eq!(
        prefill.spec.model.source.location(),
        Ok(ModelLocation::Tiny { seed: 3 })
    );
    assert_eq!(prefill.spec.engine.engine_type, EngineType::Simulated);
    assert_eq!(prefill.spec.engine.block_size, 32);
    let timing = prefill.spec.engine.simulated.as_ref().unwrap();
    assert_eq!(timing.prefill_base_microseconds, Some(2000));
    let path: Vec<_> = prefill.spec.topology.path().collect();
    assert_eq!(
        path,
        [("host", "a"), ("rack", "r")],
        "nearest first, in whatever order they are written"
    );
    assert_eq!(resources.pools[1].spec.replicas, 2);

    let policy = &resources.policies[0];
    assert_eq!(policy.spec.overrides, Overrides::Allowed);
    assert_eq!(policy.spec.pooling, Pooling::Strict);
    let names = |role| -> Vec<&str> {
        policy
            .pools(role, &resources)
            .iter()
            .map(|pool| pool.metadata.name.as_str())
            .collect()
    };
    assert_eq!(names(PoolRole::Prefill), ["prefill"]);
    assert_eq!(
        names(PoolRole::Decode),
        ["decode"],
        "a selector takes pools of its own kind only"
    );
}

#[test]
fn what_is_left_out_has_the_default_of_the_design() {
    let resources = fleet(&[("pools.yaml", POOLS), ("policy.yaml", POLICY)]);
    let pool = &resources.pools[1].spec;
    assert_eq!(
        pool.kv_pool.transports,
        [Transport::Local, Transport::Shm, Transport::Tcp]
    );
    assert_eq!(pool.kv_pool.lease_seconds, 30);
    let policy =
        read_documents([("p.yaml", &*POLICY.replace("  overrides: Allowed\n", ""))]).unwrap();
    assert_eq!(policy.policies[0].spec.overrides, Overrides::Ignored);
    assert_eq!(policy.policies[0].spec.mode, Mode::Conditional);
}

#[test]
fn fields_for_a_cluster_are_one_warning() {
    let text = POOLS
        .replacen("  topology:", "  accelerator: {resourceName: nvidia.com/gpu, count: 1}\n  rollout: {maxSurge: 1}\n  template: {serviceAccountName: w, nodeSelector: {a: b}}\n  topology:", 1)
        .replace("  replicas: 2", "  replicas: 2\n  disruption: {minAvailable: 1}");
    let resources = fleet(&[("pools.yaml", &text), ("policy.yaml", POLICY)]);
    assert_eq!(
        resources.warnings,
        [
            "only a cluster can honour these fields, they have no effect here: \
          PrefillPool prefill spec.accelerator.resourceName, PrefillPool prefill spec.accelerator.count, \
          PrefillPool prefill spec.rollout, PrefillPool prefill spec.template, DecodePool decode spec.disruption"
        ]
    );
}

#[test]
fn a_volume_claim_is_a_source_for_a_cluster() {
    let text = POOLS.replace(
        "{uri: \"builtin://tiny?seed=3\"}",
        "{persistentVolumeClaim: weights}",
    );
    let resources = fleet(&[("pools.yaml", &text), ("policy.yaml", POLICY)]);
    assert_eq!(
        resources.pools[0].spec.model.source.location(),
        Ok(ModelLocation::Cluster)
    );
    assert_eq!(resources.warnings.len(), 1);
    assert!(
        resources.warnings[0]
            .contains("PrefillPool prefill spec.model.source.persistentVolumeClaim")
    );
}

#[test]
fn pools_that_cannot_pair_are_named_with_the_fields_that_differ() {
    let text = POOLS.replacen("blockSize: 32", "blockSize: 16", 1);
    let resources = fleet(&[("pools.yaml", &text), ("policy.yaml", POLICY)]);
    assert_eq!(
        resources.warnings,
        [
            "RoutePolicy tiny: PrefillPool prefill and DecodePool decode will not pair, no KV is handed over between them: \
          spec.engine.blockSize is 16 for prefill and 32 for decode"
        ]
    );
}

#[test]
fn images_and_claims_are_the_same_source_when_their_names_are() {
    let source = "uri: \"builtin://tiny?seed=3\"";
    for (prefill, decode, same) in [
        ("persistentVolumeClaim: a", "persistentVolumeClaim: a", true),
        (
            "persistentVolumeClaim: a",
            "persistentVolumeClaim: b",
            false,
        ),
        ("persistentVolumeClaim: a", "image: a", false),
        ("image: a", "image: b", false),
        ("hostPath: /m.gguf", "uri: \"file:///m.gguf\"", true),
    ] {
        let text = POOLS
            .replacen(source, prefill, 1)
            .replacen(source, decode, 1);
        let resources = fleet(&[("pools.yaml", &text), ("policy.yaml", POLICY)]);
        let differs = "spec.model.source differs (pools.yaml:6, pools.yaml:15)";
        let named = resources
            .warnings
            .iter()
            .any(|warning| warning.contains(differs));
        assert_eq!(
            named, !same,
            "{prefill}, {decode}: {:?}",
            resources.warnings
        );
    }
}

#[test]
fn a_pool_that_no_policy_names_is_a_warning() {
    let policy = POLICY.replace("  prefillPools: [{name: prefill}]\n", "");
    let resources = fleet(&[("pools.yaml", POOLS), ("policy.yaml", &policy)]);
    assert_eq!(
        resources.warnings,
        ["PrefillPool prefill is named by no RoutePolicy: its workers will serve nothing"]
    );
}

#[test]
fn a_policy_can_be_read_alone() {
    let resources = read_documents([("policy.yaml", POLICY)]).unwrap();
    assert_eq!(resources.policies.len(), 1);
}

#[test]
fn an_object_read_back_from_a_cluster_is_read() {
    let text = POLICY
        .replace("metadata: {name: tiny}", "metadata: {name: tiny, uid: x, generation: 3, creationTimestamp: \"2026-11-29T00:00:00Z\", managedFields: []}\nstatus: {conditions: []}");
    assert!(read_documents([("policy.yaml", text.as_str())]).is_ok());
}

#[test]
fn a_null_is_a_field_left_out() {
    let text = POLICY.replace("  overrides: Allowed", "  overrides: null\n  timeouts: ~");
    let resources = read_documents([("policy.yaml", text.as_str())]).unwrap();
    assert_eq!(resources.policies[0].spec.overrides, Overrides::Ignored);
}

#[test]
fn simulated_workers_need_no_weights() {
    let text = POOLS.replace(", source: {uri: \"builtin://tiny?seed=3\"}", "");
    let resources = fleet(&[("pools.yaml", &text), ("policy.yaml", POLICY)]);
    assert_eq!(resources.pools.len(), 2);
}
