//! Names on Kubernetes objects that more than one part of Baton reads: labels, annotations, conditions, Secrets.

/// Prefix of every name that is Baton's own.
pub const PREFIX: &str = "serving.baton.dev/";

// Labels that tools of the Kubernetes world know.
pub const APP_NAME: &str = "app.kubernetes.io/name";
/// The pool's name.
pub const APP_INSTANCE: &str = "app.kubernetes.io/instance";
/// `prefill` or `decode`.
pub const APP_COMPONENT: &str = "app.kubernetes.io/component";
pub const APP_PART_OF: &str = "app.kubernetes.io/part-of";
pub const APP_MANAGED_BY: &str = "app.kubernetes.io/managed-by";
/// `prefill` or `decode`, where llm-d's tools look for it.
pub const LLM_D_ROLE: &str = "llm-d.ai/role";

// Values of the labels above.
pub const WORKER_APP: &str = "baton-worker";
pub const ROUTER_APP: &str = "baton-router";
pub const OPERATOR_APP: &str = "baton-operator";
pub const PART_OF_BATON: &str = "baton";

// Labels of a worker's pod.
/// Name of the pool; every worker pod has it.
pub const POOL: &str = "serving.baton.dev/pool";
/// `prefill` or `decode`.
pub const ROLE: &str = "serving.baton.dev/role";
/// The model's name made fit for a label, see [`model_value`].
pub const MODEL: &str = "serving.baton.dev/model";
/// Hash of the pod's template.
pub const REVISION: &str = "serving.baton.dev/revision";
/// First [`KV_IDENTITY_DIGITS`] hex digits of the KV identity that the worker's card names.
pub const KV_IDENTITY: &str = "serving.baton.dev/kv-identity";
/// `"true"` from the moment that a worker is asked to drain.
pub const DRAINING: &str = "serving.baton.dev/draining";
/// Followed by a level of topology; the value is the domain in which the pod's node lies, or [`UNKNOWN_DOMAIN`].
pub const DOMAIN_PREFIX: &str = "serving.baton.dev/domain-";
/// Domain of a node that does not say.
pub const UNKNOWN_DOMAIN: &str = "unknown";
pub const KV_IDENTITY_DIGITS: usize = 32;

// Annotations of a worker's pod.
/// The model's name as clients send it.
pub const MODEL_NAME: &str = "serving.baton.dev/model-name";
/// The whole KV identity.
pub const KV_IDENTITY_DIGEST: &str = "serving.baton.dev/kv-identity-digest";
/// The worker's configuration, which its pod reads back as a file.
pub const WORKER_CONFIG: &str = "serving.baton.dev/worker-config";

/// Readiness gate and condition of a worker's pod: its card was read and does not contradict the pool.
pub const REGISTERED: &str = "serving.baton.dev/registered";

// Types of conditions in the status of pools and policies.
pub const READY: &str = "Ready";
pub const AVAILABLE: &str = "Available";
pub const PROGRESSING: &str = "Progressing";
pub const RECONCILING: &str = "Reconciling";
pub const STALLED: &str = "Stalled";
pub const COMPATIBLE: &str = "Compatible";
pub const TOKENIZER_VERIFIED: &str = "TokenizerVerified";
pub const ACCEPTED: &str = "Accepted";
pub const DISAGGREGATING: &str = "Disaggregating";

/// Secret with the key of block hashes and of prompts' fingerprints, in every namespace with workers.
pub const HASH_KEY_SECRET: &str = "baton-hash-key";
/// Its member: 64 hex digits.
pub const HASH_KEY_MEMBER: &str = "key";
/// Secret with the token of a router's admin port.
pub const ADMIN_TOKEN_SECRET: &str = "baton-admin-token";
pub const ADMIN_TOKEN_MEMBER: &str = "token";

/// Longest value of a label.
const LONGEST_VALUE: usize = 63;

/// The label that holds a pod's domain at a level of topology.
#[must_use]
pub fn domain(level: &str) -> String {
    format!("{DOMAIN_PREFIX}{level}")
}

/// The level of topology that a label is about, if it is such a label.
#[must_use]
pub fn level(label: &str) -> Option<&str> {
    label
        .strip_prefix(DOMAIN_PREFIX)
        .filter(|level| !level.is_empty())
}

/// A text made fit for a label's value: what a label cannot hold becomes `-`, the ends are letters or digits, and it has at most
/// 63 characters. Different texts may become the same value: it is for people and selectors, the text itself is an annotation.
#[must_use]
pub fn value(text: &str) -> String {
    let fit: String = text
        .chars()
        .map(|c| {
            if c.is_ascii_alphanumeric() || "-_.".contains(c) {
                c
            } else {
                '-'
            }
        })
        .skip_while(|c| !c.is_ascii_alphanumeric())
        .take(LONGEST_VALUE)
        .collect();
    fit.trim_end_matches(|c: char| !c.is_ascii_alphanumeric())
        .to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_models_name_becomes_a_labels_value() {
        assert_eq!(value("smollm2-135m-instruct"), "smollm2-135m-instruct");
        assert_eq!(
            value("meta-llama/Llama-3.1-8B:latest"),
            "meta-llama-Llama-3.1-8B-latest"
        );
        assert_eq!(value("/models/é/"), "models");
        assert_eq!(value("***"), "", "an empty value is a legal one");
        let long = value(&format!("{}/tail", "x".repeat(62)));
        assert_eq!(long, "x".repeat(62), "cut, and no dash at the end");
    }

    #[test]
    fn levels_and_their_labels_are_each_others_inverse() {
        assert_eq!(domain("rack"), "serving.baton.dev/domain-rack");
        assert_eq!(level(&domain("rack")), Some("rack"));
        assert_eq!(level(POOL), None);
        assert_eq!(level(DOMAIN_PREFIX), None);
    }
}
