//! In which fields the declarations of two pools contradict each other: no hand-off between them can ever be good, which is said
//! before anything runs, by `baton up` and by a cluster alike.
//!
//! Only what both declare is compared. `Auto` is decided by the worker, whose card says what it has decided.

use std::fmt::Debug;

use crate::pool::{Connector, Dtype, KvCacheDtype, ModelSource, PoolSpec, Quantization};
use crate::source::ModelLocation;
use crate::status::Difference;

/// Every difference, in the order of the fields.
#[must_use]
pub fn of(prefill: &PoolSpec, decode: &PoolSpec) -> Vec<Difference> {
    let mut found = Vec::new();
    let mut compare = |field: &str, prefill: Option<String>, decode: Option<String>| {
        if let (Some(prefill), Some(decode)) = (prefill, decode)
            && prefill != decode
        {
            found.push(Difference {
                field: field.to_owned(),
                prefill,
                decode,
            });
        }
    };
    let mut both = |field: &str, value: fn(&PoolSpec) -> Option<String>| {
        compare(field, value(prefill), value(decode));
    };
    both("spec.model.name", |pool| Some(pool.model.name.clone()));
    if have_other_weights(&prefill.model.source, &decode.model.source) {
        both("spec.model.source", |pool| written(&pool.model.source));
    }
    both("spec.model.revision", |pool| pool.model.revision.clone());
    both("spec.engine.type", |pool| {
        Some(pool.engine.engine_type.word().to_owned())
    });
    both("spec.engine.dtype", |pool| {
        decided(pool.engine.dtype, &Dtype::Auto)
    });
    both("spec.engine.kvCacheDtype", |pool| {
        decided(pool.engine.kv_cache_dtype, &KvCacheDtype::Auto)
    });
    both("spec.engine.quantization", |pool| {
        decided(pool.engine.quantization, &Quantization::Auto)
    });
    both("spec.engine.blockSize", |pool| {
        Some(pool.engine.block_size.to_string())
    });
    both("spec.engine.connector", |pool| {
        word(pool.engine.connector())
    });
    // Layouts have to be equal: no rule turns one into another yet.
    both("spec.parallelism.tensor", |pool| {
        Some(pool.parallelism.tensor.to_string())
    });
    both("spec.parallelism.pipeline", |pool| {
        Some(pool.parallelism.pipeline.to_string())
    });
    if have_no_transport(prefill, decode) {
        both("spec.kvPool.transports", |pool| {
            word(&pool.kv_pool.transports)
        });
    }
    found
}

/// `FIELD is VALUE for prefill and VALUE for decode`, joined.
#[must_use]
pub fn sentence(differences: &[Difference]) -> String {
    let said: Vec<String> = differences
        .iter()
        .map(|difference| {
            format!(
                "{} is {} for prefill and {} for decode",
                difference.field, difference.prefill, difference.decode
            )
        })
        .collect();
    said.join(", ")
}

/// Whether two sources are one: a file is one however it is written, an image or a claim is its name.
pub(crate) fn is_one_source(prefill: &ModelSource, decode: &ModelSource) -> bool {
    match (prefill.location(), decode.location()) {
        (Ok(ModelLocation::Cluster), Ok(ModelLocation::Cluster)) => prefill == decode,
        (prefill, decode) => prefill == decode,
    }
}

/// Weights that are made up from a number are the same where the number is. What files, images, claims and hubs hold is known once
/// it is loaded: two of them may well hold the same. A source that cannot be read is refused elsewhere.
fn have_other_weights(prefill: &ModelSource, decode: &ModelSource) -> bool {
    let (Ok(left), Ok(right)) = (prefill.location(), decode.location()) else {
        return false;
    };
    let is_made_up = |location: &ModelLocation| matches!(location, ModelLocation::Tiny { .. });
    !is_one_source(prefill, decode) && (is_made_up(&left) || is_made_up(&right))
}

/// As the author wrote it.
fn written(source: &ModelSource) -> Option<String> {
    let given = [
        &source.uri,
        &source.host_path,
        &source.image,
        &source.persistent_volume_claim,
    ];
    given.into_iter().flatten().next().cloned()
}

/// Engines that move KV themselves do not go by them.
fn have_no_transport(prefill: &PoolSpec, decode: &PoolSpec) -> bool {
    let is_moved_by_baton = |pool: &PoolSpec| pool.engine.connector() == Connector::Baton;
    let theirs = &decode.kv_pool.transports;
    let mut ours = prefill.kv_pool.transports.iter();
    is_moved_by_baton(prefill)
        && is_moved_by_baton(decode)
        && !ours.any(|transport| theirs.contains(transport))
}

fn word(value: impl Debug) -> Option<String> {
    Some(format!("{value:?}"))
}

fn decided<T: Debug + PartialEq>(value: T, auto: &T) -> Option<String> {
    if value == *auto { None } else { word(value) }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    /// A pool with one field (`spec.…`) set.
    fn pool(field: &str, value: &Value) -> PoolSpec {
        let mut spec = json!({
            "model": {"name": "m", "source": {"uri": "builtin://tiny"}}, "engine": {"type": "Builtin"},
        });
        let mut place = &mut spec;
        for step in field.split('.').skip(1) {
            place = &mut place[step];
        }
        *place = value.clone();
        serde_json::from_value(spec).unwrap()
    }

    #[test]
    fn each_field_that_must_agree_is_named_alone_with_both_values() {
        let claim = |name: &str| json!({"persistentVolumeClaim": name});
        let tiny = |seed: u8| json!({"uri": format!("builtin://tiny?seed={seed}")});
        let cases = [
            ("spec.model.name", json!("m"), json!("x"), "m", "x"),
            ("spec.model.revision", json!("a"), json!("b"), "a", "b"),
            (
                "spec.engine.type",
                json!("Builtin"),
                json!("Simulated"),
                "Builtin",
                "Simulated",
            ),
            (
                "spec.engine.dtype",
                json!("BF16"),
                json!("F16"),
                "BF16",
                "F16",
            ),
            (
                "spec.engine.kvCacheDtype",
                json!("F8E4M3"),
                json!("F8E5M2"),
                "F8E4M3",
                "F8E5M2",
            ),
            (
                "spec.engine.quantization",
                json!("Fp8"),
                json!("None"),
                "Fp8",
                "None",
            ),
            ("spec.engine.blockSize", json!(16), json!(32), "16", "32"),
            (
                "spec.engine.connector",
                json!("Nixl"),
                json!("Baton"),
                "Nixl",
                "Baton",
            ),
            ("spec.parallelism.tensor", json!(2), json!(1), "2", "1"),
            ("spec.parallelism.pipeline", json!(1), json!(4), "1", "4"),
            (
                "spec.model.source",
                tiny(1),
                tiny(2),
                "builtin://tiny?seed=1",
                "builtin://tiny?seed=2",
            ),
            (
                "spec.model.source",
                claim("models"),
                tiny(2),
                "models",
                "builtin://tiny?seed=2",
            ),
            (
                "spec.kvPool.transports",
                json!(["Local", "Tcp"]),
                json!(["Shm"]),
                "[Local, Tcp]",
                "[Shm]",
            ),
        ];
        for (field, prefill, decode, left, right) in cases {
            let found = of(&pool(field, &prefill), &pool(field, &decode));
            let difference = Difference {
                field: field.to_owned(),
                prefill: left.to_owned(),
                decode: right.to_owned(),
            };
            assert_eq!(found, [difference]);
            assert_eq!(
                sentence(&found),
                format!("{field} is {left} for prefill and {right} for decode")
            );
            let same = of(&pool(field, &prefill), &pool(field, &prefill));
            assert_eq!(same, [], "{field}");
        }
    }

    #[test]
    fn what_one_side_leaves_open_or_nobody_knows_yet_is_no_difference() {
        let cases = [
            ("spec.model.revision", Value::Null, json!("a")),
            ("spec.engine.dtype", json!("Auto"), json!("F16")),
            ("spec.engine.kvCacheDtype", json!("F16"), json!("Auto")),
            ("spec.engine.quantization", json!("Auto"), json!("Awq")),
            (
                "spec.model.source",
                json!({"hostPath": "/a.gguf"}),
                json!({"hostPath": "/b.gguf"}),
            ),
            (
                "spec.model.source",
                json!({"persistentVolumeClaim": "a"}),
                json!({"image": "a"}),
            ),
            (
                "spec.model.source",
                json!({"uri": "builtin://tiny"}),
                json!({"uri": "builtin://tiny?seed=0"}),
            ),
            (
                "spec.model.source",
                json!({}),
                json!({"uri": "builtin://tiny"}),
            ),
            (
                "spec.kvPool.transports",
                json!(["Shm", "Tcp"]),
                json!(["Tcp"]),
            ),
            ("spec.replicas", json!(1), json!(7)),
            ("spec.kvPool.blocks", json!(5), json!(6)),
        ];
        for (field, prefill, decode) in cases {
            let found = of(&pool(field, &prefill), &pool(field, &decode));
            assert_eq!(found, [], "{field}: {prefill} and {decode}");
        }
    }

    #[test]
    fn a_source_is_one_however_it_is_written_and_a_name_of_a_cluster_is_of_its_kind() {
        let source = |json: Value| serde_json::from_value::<ModelSource>(json).unwrap();
        let is_one = |left: Value, right: Value| is_one_source(&source(left), &source(right));
        let path = || json!({"hostPath": "/a.gguf"});
        let image = || json!({"image": "a"});
        assert!(is_one(path(), json!({"uri": "file:///a.gguf"})));
        assert!(is_one(
            json!({"uri": "builtin://tiny"}),
            json!({"uri": "builtin://tiny?seed=0"})
        ));
        assert!(is_one(image(), image()));
        for other in [
            json!({"image": "b"}),
            json!({"persistentVolumeClaim": "a"}),
            path(),
            json!({}),
        ] {
            assert!(!is_one(image(), other.clone()), "{other}");
        }
    }

    #[test]
    fn engines_that_move_kv_themselves_need_no_transport_of_batons() {
        let nixl = |transport: &str| {
            let mut pool = pool("spec.engine.connector", &json!("Nixl"));
            pool.kv_pool.transports = serde_json::from_value(json!([transport])).unwrap();
            pool
        };
        assert_eq!(of(&nixl("Shm"), &nixl("Tcp")), []);
    }
}
