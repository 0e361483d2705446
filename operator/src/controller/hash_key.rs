//! The secret that the pods of a namespace mount: the key of block hashes and fingerprints.

use baton_crds::labels as names;
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::fault::Fault;
use super::writes::Writes;
use crate::random;

/// Bytes of the key.
const BYTES: usize = 32;

/// Creates the secret where it is missing. It is never read: that one of its name exists is all that is asked.
///
/// # Errors
/// It cannot be created, or the system has no random numbers.
pub async fn ensure(writes: &Writes, namespace: &str) -> Result<(), Fault> {
    let key = random::hex::<BYTES>().map_err(|error| {
        Fault::Other(format!(
            "secret {namespace}/{}: the system gives no random numbers: {error}",
            names::HASH_KEY_SECRET
        ))
    })?;
    writes.create_secret(&secret(namespace, key)).await
}

fn secret(namespace: &str, key: String) -> Secret {
    let labels = [
        (names::APP_NAME, "baton-hash-key"),
        (names::APP_PART_OF, names::PART_OF_BATON),
        (names::APP_MANAGED_BY, names::OPERATOR_APP),
    ];
    let labels = labels
        .into_iter()
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect();
    Secret {
        metadata: ObjectMeta {
            name: Some(names::HASH_KEY_SECRET.into()),
            namespace: Some(namespace.into()),
            labels: Some(labels),
            ..ObjectMeta::default()
        },
        string_data: Some([(names::HASH_KEY_MEMBER.into(), key)].into()),
        type_: Some("Opaque".into()),
        ..Secret::default()
    }
}
