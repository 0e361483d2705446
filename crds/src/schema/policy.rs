//! Fields of `RoutePolicy`.

use super::{FREE, Field, Form, Shape, field, integer, later, required, text};

static ALIAS: Shape = text(Form::Model, 128);
static MILLISECONDS: Shape = integer(0, 3_600_000);

static POOL_REFERENCE: Shape = Shape::Object(&[
    field("name", text(Form::Label, super::LONGEST_NAME)),
    field(
        "selector",
        Shape::Object(&[required(
            "matchLabels",
            Shape::Map {
                of: &FREE,
                longest: 16,
            },
        )]),
    ),
]);

const fn percent() -> Shape {
    integer(0, 1000)
}

const WEIGHT: Shape = integer(0, 10_000);

/// Percent over the preset's; the names are those of the cost formula.
static WEIGHTS: &[Field] = &[
    field("wq", WEIGHT),
    field("wt", WEIGHT),
    field("wm", WEIGHT),
    field("lambda", WEIGHT),
    field("wo", WEIGHT),
    field("wd", WEIGHT),
    field("v", WEIGHT),
    field("uq", WEIGHT),
];

const SECONDS: Shape = integer(1, 86_400);

static TIMEOUTS: &[Field] = &[
    field("reserveSeconds", SECONDS),
    field("prefillStartSeconds", SECONDS),
    field("prefillSeconds", SECONDS),
    field("transferSeconds", SECONDS),
    field("decodeStartSeconds", SECONDS),
    field("tokenSeconds", SECONDS),
    field("totalSeconds", SECONDS),
];

/// `spec` of `RoutePolicy`.
pub(crate) static ROUTE_POLICY: &[Field] = &[
    required("model", text(Form::Model, 128)),
    field(
        "aliases",
        Shape::List {
            of: &ALIAS,
            longest: 32,
        },
    ),
    field(
        "prefillPools",
        Shape::List {
            of: &POOL_REFERENCE,
            longest: 32,
        },
    ),
    required(
        "decodePools",
        Shape::List {
            of: &POOL_REFERENCE,
            longest: 32,
        },
    ),
    field(
        "mode",
        Shape::Choice {
            now: &["Conditional", "Aggregated", "Disaggregated", "Threshold"],
            later: &[],
        },
    ),
    field("thresholdTokens", integer(0, 16_777_216)),
    field(
        "overrides",
        Shape::Choice {
            now: &["Ignored", "Allowed"],
            later: &[],
        },
    ),
    field(
        "objective",
        Shape::Object(&[
            field("ttftMilliseconds", integer(1, 3_600_000)),
            field("tpotMilliseconds", integer(1, 3_600_000)),
            field("endToEndMilliseconds", integer(1, 86_400_000)),
            field("percentile", integer(1, 99)),
        ]),
    ),
    field(
        "pooling",
        Shape::Choice {
            now: &["Pooled", "Strict"],
            later: &[],
        },
    ),
    field(
        "cost",
        Shape::Object(&[
            field(
                "preset",
                Shape::Choice {
                    now: &["Balanced", "Latency"],
                    later: &["LookAhead"],
                },
            ),
            field("weights", Shape::Object(WEIGHTS)),
            field("marginPercent", percent()),
            field("marginMilliseconds", integer(0, 3_600_000)),
            field("temperaturePercent", percent()),
            field(
                "levelPenaltyMilliseconds",
                Shape::Map {
                    of: &MILLISECONDS,
                    longest: 8,
                },
            ),
        ]),
    ),
    field(
        "cache",
        Shape::Object(&[
            field(
                "source",
                Shape::Choice {
                    now: &["Events", "None"],
                    later: &["Approximate"],
                },
            ),
            later("ttlSeconds", integer(1, 86_400)),
            field("staleAfterMilliseconds", integer(1, 3_600_000)),
        ]),
    ),
    field(
        "topology",
        Shape::Object(&[
            field(
                "enforcement",
                Shape::Choice {
                    now: &["Required", "Preferred", "Ignored"],
                    later: &[],
                },
            ),
            field("farthestLevel", text(Form::Label, 63)),
            field(
                "breaker",
                Shape::Object(&[
                    field("failures", integer(1, 1000)),
                    field("windowSeconds", integer(1, 86_400)),
                    field("openSeconds", integer(1, 86_400)),
                    field("slowdownPercent", integer(101, 100_000)),
                ]),
            ),
        ]),
    ),
    field(
        "onNoPrefill",
        Shape::Object(&[
            required(
                "action",
                Shape::Choice {
                    now: &["Local", "Queue", "Reject"],
                    later: &[],
                },
            ),
            field("maxConcurrentPerWorker", integer(0, 10_000)),
            field("queueMilliseconds", integer(0, 3_600_000)),
        ]),
    ),
    field(
        "fallback",
        Shape::Object(&[
            field(
                "localRecompute",
                Shape::Object(&[
                    field("maxConcurrentPerWorker", integer(0, 10_000)),
                    field("maxPercent", integer(0, 100)),
                ]),
            ),
            field("replans", integer(0, 10)),
        ]),
    ),
    field(
        "firstToken",
        Shape::Choice {
            now: &["Prefill", "Decode"],
            later: &[],
        },
    ),
    field("timeouts", Shape::Object(TIMEOUTS)),
    field(
        "admission",
        Shape::Object(&[
            field("maxQueuedPerWorker", integer(1, 100_000)),
            later("priorityClasses", Shape::Foreign),
            field("retryAfterSeconds", integer(1, 3600)),
        ]),
    ),
    later("rollout", Shape::Foreign),
    field(
        "verify",
        Shape::Object(&[
            field(
                "require",
                Shape::Choice {
                    now: &["Verified", "EngineTrusted"],
                    later: &[],
                },
            ),
            field(
                "checksum",
                Shape::Choice {
                    now: &["Always", "Sampled", "Off"],
                    later: &[],
                },
            ),
        ]),
    ),
    later("scaling", Shape::Foreign),
];
