//! What a policy says of pools that contradict each other before any pod runs.

use super::*;

#[test]
fn declarations_that_differ_are_said_with_both_values_before_any_pod_runs() {
    let mut observed = good();
    observed.pools = vec![
        pool(PoolRole::Prefill, "p", |spec| {
            spec["engine"]["blockSize"] = json!(32);
            spec["model"]["revision"] = json!("a");
            spec["parallelism"] = json!({"tensor": 2});
        }),
        pool(PoolRole::Decode, "d", |spec| {
            spec["model"]["revision"] = json!("b");
        }),
    ];
    let plan = plan(&observed);
    let (status, reason, message) = of(&plan, "Compatible");
    assert_eq!((status, reason), ("False", "DeclarationsDiffer"));
    for part in [
        "PrefillPool p and DecodePool d cannot be paired",
        "spec.engine.blockSize is 32 for prefill and 16 for decode",
        "spec.model.revision is a for prefill and b for decode",
        "spec.parallelism.tensor is 2 for prefill and 1 for decode",
    ] {
        assert!(message.contains(part), "{part} in {message}");
    }
    assert_eq!(word(&plan, "Stalled"), ("True", "DeclarationsDiffer"));
    assert_eq!(word(&plan, "Ready"), ("False", "DeclarationsDiffer"));
    assert_eq!(word(&plan, "Reconciling").0, "False");
    assert_eq!(word(&plan, "Disaggregating"), ("False", "Incompatible"));
    let reasons: Vec<&str> = plan.notes.iter().map(|note| note.reason).collect();
    assert_eq!(reasons, ["Incompatible", "NotDisaggregating", "Stalled"]);
}

/// What a policy says of two pools without workers that declare one field (`spec.…`) each in their own way.
fn declared(field: &str, prefill: &Value, decode: &Value) -> Plan {
    let declaring = |role, name, value: &Value| {
        pool(role, name, |spec| {
            let steps = field.split('.').skip(1);
            *steps.fold(spec, |place, step| &mut place[step]) = value.clone();
        })
    };
    let mut observed = good();
    observed.pools = vec![
        declaring(PoolRole::Prefill, "p", prefill),
        declaring(PoolRole::Decode, "d", decode),
    ];
    plan(&observed)
}

#[test]
fn each_field_that_must_agree_is_compared_and_what_is_left_to_the_worker_is_not() {
    let fields = [
        ("spec.model.name", json!("m"), json!("x")),
        ("spec.model.revision", json!("a"), json!("b")),
        ("spec.engine.type", json!("Builtin"), json!("Simulated")),
        ("spec.engine.dtype", json!("BF16"), json!("F16")),
        ("spec.engine.kvCacheDtype", json!("F8E4M3"), json!("BF16")),
        ("spec.engine.quantization", json!("Fp8"), json!("Awq")),
        ("spec.engine.blockSize", json!(16), json!(64)),
        ("spec.engine.connector", json!("Baton"), json!("Nixl")),
        ("spec.parallelism.tensor", json!(4), json!(2)),
        ("spec.parallelism.pipeline", json!(1), json!(4)),
    ];
    for (field, prefill, decode) in fields {
        let plan = declared(field, &prefill, &decode);
        let (status, reason, message) = of(&plan, "Compatible");
        assert_eq!((status, reason), ("False", "DeclarationsDiffer"), "{field}");
        let text = |value: &Value| value.as_str().map_or(value.to_string(), str::to_owned);
        let (prefill, decode) = (text(&prefill), text(&decode));
        let said = format!("{field} is {prefill} for prefill and {decode} for decode");
        assert!(message.ends_with(&said), "{message} should say {said}");
        assert_eq!(message.matches("for prefill").count(), 1, "{message}");
    }
    for (field, prefill, decode) in [
        ("spec.engine.kvCacheDtype", json!("F16"), json!("Auto")),
        ("spec.engine.dtype", json!("Auto"), json!("F16")),
        ("spec.model.revision", json!("a"), Value::Null),
        ("spec.replicas", json!(7), json!(1)),
        ("spec.kvPool.blocks", json!(5), json!(6)),
    ] {
        let plan = declared(field, &prefill, &decode);
        let said = word(&plan, "Compatible");
        assert_eq!(said, ("Unknown", "DeclarationsAgree"), "{field}");
    }
}

#[test]
fn a_long_declaration_that_differs_fits_into_the_status() {
    let mut observed = good();
    let path = format!("/{}", "x".repeat(4000));
    observed.pools[0].spec.model.source =
        serde_json::from_value(json!({"hostPath": path})).unwrap();
    let plan = plan(&observed);
    assert_eq!(word(&plan, "Compatible"), ("False", "DeclarationsDiffer"));
    let difference = &plan.status.pairs[0].differences[0];
    assert_eq!(difference.field, "spec.model.source");
    assert_eq!(difference.prefill, path[..512]);
    assert_eq!(difference.decode, "builtin://tiny");
}
