//! Fields of `PrefillPool` and `DecodePool`.

use super::{FREE, Field, Form, Shape, cluster, field, integer, later, required, text};

static ADAPTER: Shape = Shape::Object(&[
    required("name", text(Form::Model, 128)),
    required("revision", text(Form::Free, 128)),
]);

static ENVIRONMENT: Shape = Shape::Object(&[
    required("name", text(Form::Free, 256)),
    field("value", text(Form::Free, 4096)),
    field("valueFrom", Shape::Foreign),
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
    field("prefillFloorMicroseconds", integer(0, 10_000_000)),
    field("prefillBaseMicroseconds", integer(0, 10_000_000)),
    field("prefillPerTokenNanoseconds", integer(0, 100_000_000)),
    field("prefillPerTokenPairPicoseconds", integer(0, 100_000_000)),
    field("decodeBaseMicroseconds", integer(0, 10_000_000)),
    field("decodePerSequenceNanoseconds", integer(0, 1_000_000_000)),
    field(
        "decodePerContextTokenPicoseconds",
        integer(0, 1_000_000_000),
    ),
    field("jitterPercent", integer(0, 100)),
    field("seed", integer(0, i64::MAX)),
];

static TEMPLATE: &[Field] = &[
    field("metadata", Shape::Foreign),
    field("spec", Shape::Foreign),
    field("nodeSelector", Shape::Foreign),
    field("tolerations", Shape::Foreign),
    field("affinity", Shape::Foreign),
    field("priorityClassName", Shape::Foreign),
    field("serviceAccountName", Shape::Foreign),
    field("volumes", Shape::Foreign),
    field("volumeMounts", Shape::Foreign),
    field("resources", Shape::Foreign),
];

/// `spec.model`.
static MODEL: &[Field] = &[
    required("name", text(Form::Model, 128)),
    field(
        "source",
        Shape::Object(&[
            field("hostPath", text(Form::AbsolutePath, 4096)),
            field("uri", text(Form::Free, 2048)),
            cluster("image", text(Form::Free, 512)),
            cluster("persistentVolumeClaim", text(Form::Free, 512)),
        ]),
    ),
    field("revision", text(Form::Free, 128)),
    later("tokenizer", text(Form::Free, 2048)),
    later("chatTemplate", text(Form::Free, 65536)),
];

/// `spec.engine`.
static ENGINE: &[Field] = &[
    required(
        "type",
        Shape::Choice {
            now: &["Builtin", "Simulated"],
            later: &["VLLM", "SGLang"],
        },
    ),
    cluster("image", text(Form::Free, 512)),
    cluster(
        "args",
        Shape::List {
            of: &FREE,
            longest: 128,
        },
    ),
    cluster(
        "env",
        Shape::List {
            of: &ENVIRONMENT,
            longest: 128,
        },
    ),
    field(
        "dtype",
        Shape::Choice {
            now: &["Auto"],
            later: &["F16", "BF16", "F32"],
        },
    ),
    field(
        "kvCacheDtype",
        Shape::Choice {
            now: &["Auto", "F16"],
            later: &["F32", "BF16", "F8E4M3", "F8E5M2"],
        },
    ),
    field(
        "quantization",
        Shape::Choice {
            now: &["Auto"],
            later: &["None", "Q8_0", "Q4_1", "Fp8", "Awq", "Gptq"],
        },
    ),
    field("blockSize", integer(2, 1024)),
    field("maxModelLength", integer(16, 16_777_216)),
    field(
        "connector",
        Shape::Choice {
            now: &["Baton"],
            later: &["Nixl", "Mooncake", "None"],
        },
    ),
    field("simulated", Shape::Object(SIMULATED)),
    later(
        "adapters",
        Shape::List {
            of: &ADAPTER,
            longest: 64,
        },
    ),
];

/// `spec` of both pool kinds.
pub(crate) static POOL: &[Field] = &[
    field("replicas", integer(0, 1024)),
    required("model", Shape::Object(MODEL)),
    required("engine", Shape::Object(ENGINE)),
    field(
        "parallelism",
        Shape::Object(&[
            field("tensor", integer(1, 1024)),
            field("pipeline", integer(1, 1024)),
            field("expert", integer(1, 1024)),
            field("data", integer(1, 1024)),
            field("nodesPerReplica", integer(1, 1024)),
        ]),
    ),
    field(
        "accelerator",
        Shape::Object(&[
            cluster("resourceName", text(Form::Free, 253)),
            cluster("count", integer(0, 1024)),
            cluster(
                "rdma",
                Shape::Object(&[
                    required("resourceName", text(Form::Free, 253)),
                    field("count", integer(1, 1024)),
                ]),
            ),
            cluster(
                "resourceClaimTemplates",
                Shape::List {
                    of: &RESOURCE_CLAIM,
                    longest: 16,
                },
            ),
            cluster("runtimeClassName", text(Form::Free, 253)),
        ]),
    ),
    field(
        "kvPool",
        Shape::Object(&[
            field("bytes", integer(1 << 16, 1 << 50)),
            field("blocks", integer(2, 1 << 30)),
            later(
                "tiers",
                Shape::List {
                    of: &TIER,
                    longest: 8,
                },
            ),
            field("leaseSeconds", integer(1, 3600)),
            field(
                "transports",
                Shape::List {
                    of: &TRANSPORT,
                    longest: 8,
                },
            ),
        ]),
    ),
    field(
        "topology",
        Shape::Object(&[
            cluster(
                "spread",
                Shape::List {
                    of: &LEVEL,
                    longest: 8,
                },
            ),
            cluster(
                "requireSame",
                Shape::List {
                    of: &LEVEL,
                    longest: 8,
                },
            ),
            field(
                "domain",
                Shape::Map {
                    of: &DOMAIN,
                    longest: 8,
                },
            ),
        ]),
    ),
    cluster(
        "rollout",
        Shape::Object(&[
            field("maxSurge", integer(0, 1024)),
            field("maxUnavailable", integer(0, 1024)),
            field("drainTimeoutSeconds", integer(0, 86_400)),
            field("paused", Shape::Bool),
        ]),
    ),
    cluster(
        "disruption",
        Shape::Object(&[field("minAvailable", integer(0, 1024))]),
    ),
    cluster("template", Shape::Object(TEMPLATE)),
];
