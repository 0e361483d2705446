//! Fields of `RoutePolicy`.

use super::{
    Field, Form, LABEL_VALUE, Shape, choice, field, integer, later, list, map, required, set, text,
};

static ALIAS: Shape = text(Form::Model, 128);
static MILLISECONDS: Shape = integer(0, 3_600_000);

static POOL_REFERENCE: Shape = Shape::Object(&[
    field(
        "name",
        "One pool, by its name.",
        text(Form::Label, super::LONGEST_NAME),
    ),
    field(
        "selector",
        "All pools of the kind in this namespace with these labels.",
        Shape::Object(&[required(
            "matchLabels",
            "All of them have to be on the pool; at least one.",
            map(&LABEL_VALUE, 16),
        )]),
    ),
]);

const fn percent() -> Shape {
    integer(0, 1000)
}

const WEIGHT: Shape = integer(0, 10_000);

/// Percent over the preset's; the names are those of the cost formula.
static WEIGHTS: &[Field] = &[
    field("wq", "A millisecond in the queue.", WEIGHT),
    field(
        "wt",
        "A millisecond of prefill, of exposed transfer and of what comes before the first token.",
        WEIGHT,
    ),
    field("wm", "A millisecond of machine time taken.", WEIGHT),
    field(
        "lambda",
        "A millisecond that a stream on the worker waits because of this prefill.",
        WEIGHT,
    ),
    field("wo", "A millisecond of the request's own decode.", WEIGHT),
    field(
        "wd",
        "A millisecond by which its decode slows the streams beside it.",
        WEIGHT,
    ),
    field("v", "Missing an objective.", WEIGHT),
    field(
        "uq",
        "How often the queue counts in the check of the objective for the first token.",
        WEIGHT,
    ),
];

const SECONDS: Shape = integer(1, 86_400);

static TIMEOUTS: &[Field] = &[
    field(
        "reserveSeconds",
        "From dispatch to the reservation on the decode worker. Default 30.",
        SECONDS,
    ),
    field(
        "prefillStartSeconds",
        "From dispatch to the first prefill step. Default 60.",
        SECONDS,
    ),
    field(
        "prefillSeconds",
        "From the first prefill step to the last block. Default 120.",
        SECONDS,
    ),
    field(
        "transferSeconds",
        "From the last block computed to the last block verified. Default 30.",
        SECONDS,
    ),
    field(
        "decodeStartSeconds",
        "From the KV being there to the first decode step. Default 30.",
        SECONDS,
    ),
    field("tokenSeconds", "Between two tokens. Default 60.", SECONDS),
    field(
        "totalSeconds",
        "From acceptance to the end. Default 600.",
        SECONDS,
    ),
];

static ROLLOUT: &[Field] = &[
    field(
        "shadow",
        "Decides beside, is recorded, and does nothing.",
        Shape::Object(&[field(
            "mode",
            "Of the second policy.",
            choice(&["Conditional", "Aggregated", "Disaggregated", "Threshold"]),
        )]),
    ),
    field(
        "canary",
        "The share of requests that the second policy decides.",
        Shape::Object(&[
            field("percent", "Of requests.", integer(0, 100)),
            field("maxInFlight", "Requests at once.", integer(0, 100_000)),
        ]),
    ),
    field(
        "analysis",
        "What ends the canary by itself.",
        Shape::Object(&[
            field("maxErrorPercent", "Requests that fail.", integer(0, 100)),
            field(
                "maxTtftRegressionPercent",
                "By how much the time to the first token may grow.",
                integer(0, 1000),
            ),
            field(
                "windowSeconds",
                "What is looked back on.",
                integer(1, 86_400),
            ),
        ]),
    ),
];

/// `spec` of `RoutePolicy`.
pub(crate) static ROUTE_POLICY: &[Field] = &[
    required("model", "As clients ask for it; its pools have the same in model.name. It cannot be changed: another model is another policy. One policy per model and namespace.", text(Form::Model, 128)),
    field(
        "aliases", "Other names that clients may use for the model.",
set(&ALIAS, 32),
    ),
    field(
        "prefillPools", "PrefillPools that may prefill for this model, each by name or by labels. None: every request runs whole on a decode worker.",
list(&POOL_REFERENCE, 32),
    ),
    required(
        "decodePools", "DecodePools that serve this model, each by name or by labels; at least one.",
list(&POOL_REFERENCE, 32),
    ),
    field(
        "mode", "Conditional: by cost, for each request. Aggregated: never remote. Disaggregated: always remote. Threshold: remote from thresholdTokens on.",
        choice(&["Conditional", "Aggregated", "Disaggregated", "Threshold"]),
    ).or_word("Conditional"),
    field("thresholdTokens", "Uncached prompt tokens from which on prefill is remote; required with mode Threshold, and only there.", integer(0, 16_777_216)),
    field(
        "overrides", "Allowed: a request's header x-baton-mode chooses the mode instead.",
        choice(&["Ignored", "Allowed"]),
    ).or_word("Ignored"),
    field(
        "objective", "What is to be kept to. Without any of it latency alone is minimised.",
        Shape::Object(&[
            field("ttftMilliseconds", "Time to the first token.", integer(1, 3_600_000)),
            field("tpotMilliseconds", "Time between tokens.", integer(1, 3_600_000)),
            field("endToEndMilliseconds", "Time to the last token.", integer(1, 86_400_000)),
            field("percentile", "Percent of requests that shall meet the objectives; for reports.", integer(1, 99)),
        ]),
    ),
    field(
        "pooling", "Pooled: any worker whose engine can may take a whole request. Strict: prefill workers prefill and nothing else.",
        choice(&["Pooled", "Strict"]),
    ).or_word("Pooled"),
    field(
        "cost", "The cost formula.",
        Shape::Object(&[
            field(
                "preset", "Balanced: latency and machine time. Latency: latency alone.",
                Shape::Choice {
                    now: &["Balanced", "Latency"],
                    later: &["LookAhead"],
                },
            ).or_word("Balanced"),
            field("weights", "Percent over the preset's weights; a missing one is 100.", Shape::Object(WEIGHTS)),
            field("marginPercent", "By how much remote has to be cheaper than local, in percent of the local cost. Default: the preset's.", percent()),
            field("marginMilliseconds", "By how much remote has to be cheaper than local. Default: the preset's.", integer(0, 3_600_000)),
            field("temperaturePercent", "0: the cheapest plan is taken. Above: plans within about this many percent of it share the load by chance. Default 0.", percent()),
            field(
                "levelPenaltyMilliseconds", "Level of topology to the cost of a hand-off at it; beyond: of pairs that share no level.",
map(&MILLISECONDS, 8),
            ),
        ]),
    ),
    field(
        "cache", "What is known of the workers' prefix caches.",
        Shape::Object(&[
            field(
                "source", "Events: what workers report. None: nothing is assumed cached.",
                Shape::Choice {
                    now: &["Events", "None"],
                    later: &["Approximate"],
                },
            ).or_word("Events"),
            later("ttlSeconds", "For how long a prefix is assumed cached, with source Approximate.", integer(1, 86_400)),
            field("staleAfterMilliseconds", "A worker whose last report is older is taken to have nothing cached. Default 10000.", integer(1, 3_600_000)),
        ]),
    ),
    field(
        "topology", "Which pairs of workers may hand over.",
        Shape::Object(&[
            field(
                "enforcement", "Required: pairs beyond farthestLevel are never used. Preferred: only where there is no nearer one. Ignored: neither limit nor penalties count.",
                choice(&["Required", "Preferred", "Ignored"]),
            ).or_word("Preferred"),
            field("farthestLevel", "The farthest level of topology that a pair may share.", text(Form::Label, 63)),
            field(
                "breaker", "When a pair is left alone for a while.",
                Shape::Object(&[
                    field("failures", "Failed hand-offs within the window that open it. Default 3.", integer(1, 1000)),
                    field("windowSeconds", "The window. Default 30.", integer(1, 86_400)),
                    field("openSeconds", "For how long it stays open. Default 10.", integer(1, 86_400)),
                    field("slowdownPercent", "Actual over expected time from which on a transfer counts as failed. Default 300.", integer(101, 100_000)),
                ]),
            ),
        ]),
    ),
    field(
        "onNoPrefill", "What becomes of a request that wants remote prefill when there is no worker for it. Default: Local, 16 at once on each decode worker.",
        Shape::Object(&[
            required(
                "action", "Local: prefilled by the decode worker, within a budget. Queue: waits. Reject: answered 503.",
                choice(&["Local", "Queue", "Reject"]),
            ),
            field("maxConcurrentPerWorker", "With action Local: how many at once on each decode worker; beyond it requests are answered 503.", integer(0, 10_000)),
            field("queueMilliseconds", "With action Queue: how long it waits at most.", integer(0, 3_600_000)),
        ]),
    ),
    field(
        "fallback", "What becomes of a request whose remote path failed.",
        Shape::Object(&[
            field(
                "localRecompute", "Bounds of computing it anew on the decode worker.",
                Shape::Object(&[
                    field("maxConcurrentPerWorker", "Recomputed at once on each decode worker. Default 2.", integer(0, 10_000)),
                    field("maxPercent", "Percent of the last minute's requests that may be recomputed. Default 10.", integer(0, 100)),
                ]),
            ),
            field("replans", "Plans that may be made after the first. Default 1.", integer(0, 10)),
        ]),
    ),
    field(
        "firstToken", "Who samples the first token of a remote plan. Prefill: it is streamed while the KV is on its way.",
        choice(&["Prefill", "Decode"]),
    ).or_word("Prefill"),
    field("timeouts", "How long a run may stay in a state, in seconds.", Shape::Object(TIMEOUTS)),
    field(
        "admission", "How much is taken.",
        Shape::Object(&[
            field("maxQueuedPerWorker", "Requests that may wait for prefill on one worker; one with as many is not chosen. Default 64.", integer(1, 100_000)),
            later("priorityClasses", "Classes of requests by priority.", list(&ALIAS, 16)),
            field("retryAfterSeconds", "Retry-After of answers 429 and 503. Default 1.", integer(1, 3600)),
        ]),
    ),
    later("rollout", "Deciding with a second policy: shadow, canary, analysis.", Shape::Object(ROLLOUT)),
    field(
        "verify", "What is proven of handed-over KV.",
        Shape::Object(&[
            field(
                "require", "Verified: only paths on which every block is checked. EngineTrusted: engines' own connectors too.",
                choice(&["Verified", "EngineTrusted"]),
            ).or_word("EngineTrusted"),
            field(
                "checksum", "Of blocks on Baton's own paths: Always, Sampled (one in eight, and the last), Off. Identity, generation and layout are always checked.",
                choice(&["Always", "Sampled", "Off"]),
            ).or_word("Always"),
        ]),
    ),
    later("scaling", "Bounds of the ratio of the two pools.", Shape::Object(&[])),
];
