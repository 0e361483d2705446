//! Resources for `baton up`, as text: fleets of the tiny model and of simulated workers.

use std::fmt::Write as _;

/// What a fleet of one prefill pool and one decode pool is made of. One policy joins them, with `overrides: Allowed`.
#[derive(Clone, Debug)]
pub struct Manifest {
    pub model: String,
    /// `uri: …` or `hostPath: …`.
    pub source: String,
    /// Flow mapping after `engine:`.
    pub engine: String,
    /// The same for the prefill pool, where it differs.
    pub prefill_engine: Option<String>,
    pub prefill_source: Option<String>,
    /// Flow mapping after `kvPool:`.
    pub kv_pool: String,
    pub prefill_replicas: u32,
    pub decode_replicas: u32,
    /// More lines under the policy's `spec`, indented by two.
    pub policy: String,
}

impl Manifest {
    /// The tiny model: real arithmetic over random weights, fast enough to be waited for. Leases are short, so that a test sees
    /// them end.
    pub fn tiny() -> Self {
        Self {
            model: "tiny".to_owned(),
            source: "uri: \"builtin://tiny?seed=7\"".to_owned(),
            engine: "{type: Builtin}".to_owned(),
            prefill_engine: None,
            prefill_source: None,
            kv_pool: "{blocks: 512, leaseSeconds: 3}".to_owned(),
            prefill_replicas: 1,
            decode_replicas: 1,
            policy: String::new(),
        }
    }

    /// Simulated workers whose steps last: a prompt token takes seven tenths of a millisecond, a decode step twenty
    /// milliseconds. What happens during prefill, transfer or decode can be watched without a fast enough eye. A prompt of more
    /// than 2048 tokens takes two steps, so its lease is open for one of them at least.
    pub fn slow() -> Self {
        let timing = "prefillBaseMicroseconds: 1000, prefillPerTokenNanoseconds: 700000, decodeBaseMicroseconds: 20000, seed: 1";
        Self {
            engine: format!("{{type: Simulated, simulated: {{{timing}}}}}"),
            kv_pool: "{blocks: 2048, leaseSeconds: 3}".to_owned(),
            ..Self::tiny()
        }
    }

    /// The documents, in one file.
    pub fn text(&self) -> String {
        let mut text = String::new();
        let prefill_source = self.prefill_source.as_ref().unwrap_or(&self.source);
        let prefill_engine = self.prefill_engine.as_ref().unwrap_or(&self.engine);
        for (kind, name, replicas, source, engine) in [
            (
                "PrefillPool",
                "prefill",
                self.prefill_replicas,
                prefill_source,
                prefill_engine,
            ),
            (
                "DecodePool",
                "decode",
                self.decode_replicas,
                &self.source,
                &self.engine,
            ),
        ] {
            // Writing to a string does not fail.
            let _ = write!(
                text,
                "apiVersion: serving.baton.dev/v1alpha1\nkind: {kind}\nmetadata: {{name: {name}}}\nspec:\n  \
                 replicas: {replicas}\n  model: {{name: {model}, source: {{{source}}}}}\n  engine: {engine}\n  \
                 kvPool: {kv_pool}\n---\n",
                model = self.model,
                kv_pool = self.kv_pool,
            );
        }
        let _ = write!(
            text,
            "apiVersion: serving.baton.dev/v1alpha1\nkind: RoutePolicy\nmetadata: {{name: {model}}}\nspec:\n  \
             model: {model}\n  prefillPools: [{{name: prefill}}]\n  decodePools: [{{name: decode}}]\n  \
             pooling: Strict\n  overrides: Allowed\n{policy}",
            model = self.model,
            policy = self.policy,
        );
        text
    }
}
