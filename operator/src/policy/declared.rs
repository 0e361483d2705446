//! In which fields the declarations of two pools contradict each other: no hand-off between them can ever be good, which is said
//! before any pod runs.
//!
//! Only what both declare is compared. `Auto` is decided by the worker, whose card says what it has decided.

use std::fmt::Debug;

use baton_crds::PoolSpec;
use baton_crds::pool::{Dtype, KvCacheDtype, Quantization};
use baton_crds::status::Difference;

/// Every difference, in the order of the fields.
#[must_use]
pub fn differences(prefill: &PoolSpec, decode: &PoolSpec) -> Vec<Difference> {
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
    found
}

fn word(value: impl Debug) -> Option<String> {
    Some(format!("{value:?}"))
}

fn decided<T: Debug + PartialEq>(value: T, auto: &T) -> Option<String> {
    if value == *auto { None } else { word(value) }
}

/// `FIELD is VALUE there and VALUE here`, joined.
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
