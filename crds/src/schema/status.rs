//! Fields of the statuses, which a cluster writes. The reader of files does not look at them.

use super::{Field, Form, Shape, choice, field, integer, keyed, list, required, text};
use crate::status::{
    LONGEST_IDENTITY, LONGEST_MESSAGE, LONGEST_PATH, MOST_DOMAINS, MOST_PAIRS, MOST_REVISIONS,
    MOST_ROUTERS,
};

const COUNT: Shape = integer(0, 100_000);
const NAME: Shape = text(Form::Any, 253);
const GENERATION: Shape = integer(0, i64::MAX);

static CONDITION: Shape = Shape::Object(&[
    required("type", "What the condition is about.", text(Form::Any, 316)),
    required(
        "status",
        "Whether it holds.",
        choice(&["True", "False", "Unknown"]),
    ),
    field(
        "observedGeneration",
        "Generation of the spec that it is about.",
        GENERATION,
    ),
    required(
        "lastTransitionTime",
        "When status last became another.",
        text(Form::Time, 64),
    ),
    required("reason", "One word, for programs.", text(Form::Any, 1024)),
    required(
        "message",
        "A sentence, for people.",
        text(Form::Any, LONGEST_MESSAGE),
    ),
]);

const CONDITIONS: Shape = keyed(&CONDITION, 16, &["type"]);

static REVISION: Shape = Shape::Object(&[
    required(
        "hash",
        "Of the pods' template; pods carry it as a label.",
        text(Form::Any, 63),
    ),
    field(
        "kvIdentity",
        "Digest of what must be equal for KV to mean the same, as the workers' cards name it.",
        text(Form::Any, LONGEST_IDENTITY),
    ),
    field("ready", "Ready pods.", COUNT),
    field("draining", "Pods that finish what they run.", COUNT),
]);

static DOMAIN: Shape = Shape::Object(&[
    required(
        "path",
        "Domains from the farthest level to the nearest.",
        text(Form::Any, LONGEST_PATH),
    ),
    field("ready", "Ready pods in it.", COUNT),
]);

/// `status` of both pool kinds.
pub(crate) static POOL_STATUS: &[Field] = &[
    field(
        "observedGeneration",
        "Generation of the spec that the rest is about.",
        GENERATION,
    ),
    field(
        "replicas",
        "Pods that are there, without those that drain.",
        COUNT,
    ),
    field("readyReplicas", "Of these: ready.", COUNT),
    field("availableReplicas", "Of these: ready and serving.", COUNT),
    field(
        "updatedReplicas",
        "Of these: of the current revision.",
        COUNT,
    ),
    field(
        "drainingReplicas",
        "Pods that finish what they run and go then.",
        COUNT,
    ),
    field("ready", "READY/WANTED, for people.", text(Form::Any, 32)),
    field(
        "selector",
        "Of the pods that replicas counts, for autoscalers.",
        text(Form::Any, 1024),
    ),
    field(
        "revisions",
        "The current one first.",
        keyed(&REVISION, MOST_REVISIONS, &["hash"]),
    ),
    field(
        "domains",
        "Where the ready pods are; of a farther level where the nearest has more than fit.",
        keyed(&DOMAIN, MOST_DOMAINS, &["path"]),
    ),
    field(
        "conditions",
        "Ready, Available, Progressing, Reconciling, Stalled, Compatible, TokenizerVerified.",
        CONDITIONS,
    ),
];

static DIFFERENCE: Shape = Shape::Object(&[
    required("field", "The field.", NAME),
    required(
        "prefill",
        "Its value on the prefill side.",
        text(Form::Any, 512),
    ),
    required(
        "decode",
        "Its value on the decode side.",
        text(Form::Any, 512),
    ),
]);

static PAIR: Shape = Shape::Object(&[
    required("prefillPool", "Name of the PrefillPool.", NAME),
    required("prefillRevision", "Hash of the revision.", NAME),
    required("decodePool", "Name of the DecodePool.", NAME),
    required("decodeRevision", "Hash of the revision.", NAME),
    required("compatible", "Whether KV can be handed over.", Shape::Bool),
    field("differences", "Why not.", list(&DIFFERENCE, 16)),
]);

static ROUTER: Shape = Shape::Object(&[
    required("pod", "Name of the router's pod.", NAME),
    field(
        "generation",
        "Generation of the policy that it serves by; absent: none.",
        GENERATION,
    ),
    field(
        "refused",
        "Why it does not take the newest one.",
        text(Form::Any, LONGEST_MESSAGE),
    ),
]);

/// `status` of `RoutePolicy`.
pub(crate) static POLICY_STATUS: &[Field] = &[
    field(
        "observedGeneration",
        "Generation of the spec that the rest is about.",
        GENERATION,
    ),
    field(
        "lastGoodGeneration",
        "The newest generation that was accepted.",
        GENERATION,
    ),
    field(
        "pairs",
        "Every prefill revision with every decode revision.",
        list(&PAIR, MOST_PAIRS),
    ),
    field(
        "routers",
        "What each router has in force.",
        keyed(&ROUTER, MOST_ROUTERS, &["pod"]),
    ),
    field(
        "conditions",
        "Accepted, Compatible, Disaggregating, Ready, Reconciling, Stalled.",
        CONDITIONS,
    ),
];
