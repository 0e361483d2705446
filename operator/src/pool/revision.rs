//! The revision: a hash of what changes a pool's pods.
//!
//! It is made over the pod as it would be created, so it changes exactly when a pod does. Left out is what does not need a new
//! process: `replicas`, the rollout's own settings (the pods' time to drain with them: a longer one is no reason to restart every
//! worker), and what policies tune. A field that is left out of the spec and one that says its default give the same pod, and
//! so the same hash. A version of the operator that makes other pods makes another revision: such a change belongs in the changelog.

use k8s_openapi::api::core::v1::Pod;
use serde_json::Value;

/// What a label may hold, lower case; of the letters and digits those that do not read as words or as each other. A name of a pod
/// has it too.
pub(crate) const ALPHABET: &[u8; 27] = b"bcdfghjklmnpqrstvwxz2456789";
const LENGTH: usize = 10;

/// Of a pod without its name, its drain settings and its policies' tuning.
pub(crate) fn of(template: &Pod) -> String {
    let mut canonical = String::new();
    match serde_json::to_value(template) {
        Ok(value) => write(&value, &mut canonical),
        // Types of Kubernetes are always representable; a constant would be wrong, their debug form is only unstable.
        Err(_) => canonical = format!("{template:?}"),
    }
    let hash = blake3::derive_key("baton pool revision v1", canonical.as_bytes());
    spelled(u128::from_le_bytes(
        hash[..16].try_into().unwrap_or([0; 16]),
    ))
}

fn spelled(mut number: u128) -> String {
    let base = ALPHABET.len() as u128;
    let mut text = String::with_capacity(LENGTH);
    for _ in 0..LENGTH {
        let digit = usize::try_from(number % base).unwrap_or_default();
        text.push(char::from(ALPHABET[digit]));
        number /= base;
    }
    text
}

/// JSON with its objects' fields in order, whatever order a build's JSON maps keep.
fn write(value: &Value, out: &mut String) {
    match value {
        Value::Object(fields) => {
            let mut fields: Vec<_> = fields.iter().collect();
            fields.sort_by_key(|(name, _)| *name);
            out.push('{');
            for (name, value) in fields {
                out.push_str(&Value::from(name.as_str()).to_string());
                out.push(':');
                write(value, out);
                out.push(',');
            }
            out.push('}');
        }
        Value::Array(items) => {
            out.push('[');
            for item in items {
                write(item, out);
                out.push(',');
            }
            out.push(']');
        }
        plain => out.push_str(&plain.to_string()),
    }
}
