//! What of a request's body only the router may say: each member, and what a client's own would do at an engine.

use super::edit::Edit;

/// Whose engine a body goes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Vllm,
    SgLang,
    Other,
}

impl Kind {
    /// As `engine.type` of a card names it.
    pub fn of(name: &str) -> Self {
        match name {
            "VLLM" => Self::Vllm,
            "SGLang" => Self::SgLang,
            _ => Self::Other,
        }
    }
}

/// A member that is taken out of each body, on each leg.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ours {
    pub name: &'static str,
    pub when: When,
    /// What a client's own would do.
    pub why: &'static str,
}

/// Where it is taken out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// Of the body.
    Always,
    /// Of the body, where API keys are in force.
    WithKeys,
    /// Of the body's `vllm_xargs`, which vLLM reads as it reads the body.
    InVllmXargs,
}

const fn ours(name: &'static str, when: When, why: &'static str) -> Ours {
    Ours { name, when, why }
}

/// All of them. Each member of a request of vLLM 0.32 and of SGLang that is not here is the client's to say.
pub const OURS: [Ours; 16] = [
    ours(
        "kv_transfer_params",
        When::Always,
        "names another request's KV, and the host it is fetched from",
    ),
    ours(
        "ec_transfer_params",
        When::Always,
        "the same for what an encoder has computed",
    ),
    ours(
        "bootstrap_host",
        When::Always,
        "the host that KV is fetched from",
    ),
    ours("bootstrap_port", When::Always, "its port"),
    ours(
        "bootstrap_room",
        When::Always,
        "names another request's KV on it",
    ),
    ours("bootstrap_pair_key", When::Always, "the same"),
    ours(
        "disagg_prefill_dp_rank",
        When::Always,
        "where a decode server looks for the KV: elsewhere than it is, it waits for minutes",
    ),
    ours(
        "routed_dp_rank",
        When::Always,
        "the rank that serves: two legs that meet by their room miss each other",
    ),
    ours("data_parallel_rank", When::Always, "its older name"),
    ours(
        "decode_tp_size",
        When::Always,
        "what a prefill server makes of the KV for its peer",
    ),
    ours(
        "rid",
        When::Always,
        "SGLang aborts by the beginning of an id: a client that leaves would end the runs of others",
    ),
    ours(
        "request_id",
        When::Always,
        "the id of a run in the engine, and of what it has stored of an answer",
    ),
    ours(
        "extra_key",
        When::WithKeys,
        "SGLang's second salt: a key without one could look for the prefixes of another",
    ),
    ours(
        "kv_transfer_params",
        When::InVllmXargs,
        "as above; what is no object there ends the engine",
    ),
    ours("ec_transfer_params", When::InVllmXargs, "as above"),
    ours(
        "kv_cache_report_mode",
        When::InVllmXargs,
        "whether the engine tells again which blocks it holds: the router's index would count them twice",
    ),
];

/// Takes all of them out.
pub(super) fn taken_out(keys_in_force: bool) -> Vec<Edit> {
    let of = |when: When| OURS.iter().filter(move |ours| ours.when == when);
    let keyed = of(When::WithKeys).filter(|_| keys_in_force);
    let within = of(When::InVllmXargs).map(|ours| ours.name).collect();
    of(When::Always)
        .chain(keyed)
        .map(|ours| Edit::Remove(ours.name))
        .chain([Edit::Strip("vllm_xargs", within)])
        .collect()
}

/// Endpoints whose requests have an `rid` at SGLang. For the others it makes one itself.
const NAMED_BY_RID: [&str; 2] = ["/v1/chat/completions", "/v1/completions"];

/// Endpoints whose requests have a `priority`.
const ORDERED: [&str; 3] = ["/v1/chat/completions", "/v1/completions", "/v1/responses"];

/// The id of the operation, for an engine that does not take it from the header.
pub(super) fn operation(kind: Kind, path: &str, operation: &str) -> Option<Edit> {
    let named = kind == Kind::SgLang && NAMED_BY_RID.contains(&path);
    let json = || serde_json::Value::from(operation).to_string();
    named.then(|| Edit::Set("rid", json()))
}

/// Why a request cannot be served under a key whose prefixes are its own, where the engine takes no salt.
pub(super) fn unsalted(kind: Kind, path: &str) -> Option<&'static str> {
    (kind == Kind::SgLang && path == "/v1/messages").then_some(
        "SGLang takes no cache_salt with /v1/messages, so that its prefixes would be shared with other API keys: \
         send /v1/chat/completions, or give the key the cacheSalt \"\"",
    )
}

/// The most urgent `priority` that a key allows, as the engine reads it.
pub(super) fn priority(kind: Kind, path: &str, allowed: i64) -> Edit {
    match kind {
        // Larger is more urgent there, but for servers that are told otherwise, and no priority at all the least urgent.
        Kind::SgLang => Edit::Remove("priority"),
        // What is left out counts as 0 there.
        _ if allowed != 0 && ORDERED.contains(&path) => Edit::Set("priority", allowed.to_string()),
        _ => Edit::Replace("priority", allowed.to_string()),
    }
}

#[cfg(test)]
mod tests;
