//! A decision record for tests.

use baton_placement::record::DecisionRecord;
use serde_json::{Value, json};

fn candidate(prefill: Option<&str>, decode: &str, prefill_ms: f64, cost: f64) -> Value {
    let remote = prefill.is_some();
    json!({
        "kind": if remote { "Remote" } else { "Local" },
        "prefill": prefill, "decode": decode,
        "cachedTokens": {"prefill": 0, "decode": 32},
        "inputs": {
            "class": 0, "chunks": "bounded", "queuedTokens": 0, "queuedSequences": 0, "ownTokens": 0, "ownSequences": 0,
            "runningSequences": if remote { 0 } else { 1 }, "contextTokens": 900, "stepRemaining": 0.0, "reportAge": 12.5, "pooled": false,
            "decode": {"class": 0, "runningSequences": 1, "contextTokens": 900, "waitingSequences": 0, "waitingTokens": 0,
                       "maxSequences": 16, "neededBlocks": 40, "freeBlocks": 900, "usedBlocks": 60, "reportAge": 12.5},
            "missingBytes": 0, "missingBlocks": 0, "promisedBytes": 0, "level": null, "link": null, "transport": null,
            "blockSize": 16, "bytesPerBlock": 368_640,
        },
        "terms": {"queue": 0.0, "prefill": prefill_ms, "transfer": if remote { 7.25 } else { 0.0 }, "synchronization": 0.0, "admission": 0.0,
                  "firstStep": 0.0, "machine": prefill_ms, "interference": 0.0, "decode": 300.0, "residents": 0.0, "objective": 0.0, "penalty": 0.0},
        "mean": prefill_ms + 8.0, "upper": prefill_ms * 1.25, "cost": cost,
    })
}

/// [`record`] of another run, as its line in a file.
pub(crate) fn line(run: &str) -> String {
    let mut record = record();
    record.run = baton_protocol::ids::RunId(run.to_owned());
    serde_json::to_string(&record).unwrap()
}

/// A remote run that went well.
pub(crate) fn record() -> DecisionRecord {
    let state = |state: &str, at: &str, worker: Option<&str>| json!({"state": state, "at": at, "attempt": 1, "worker": worker, "inferred": state == "streaming"});
    let record = json!({
        "schema": "baton.decision.v1", "run": "r0-00017", "requestId": "q", "time": "2026-11-29T18:00:00.000000Z",
        "now": 1.0, "randomSeed": 1, "coefficients": "c", "policy": {"name": "chat", "generation": 2, "digest": "d"},
        "fleetVersion": 3, "indexAgeMilliseconds": 1.0, "model": "m", "kvIdentity": "k", "mode": "Conditional",
        "input": {"tokens": 640, "prefixFingerprint": "f", "maxOutputTokens": 24, "expectedOutputTokens": 24.0, "localWithoutPrefill": 0,
                  "waitedMilliseconds": 0.0, "localWorkers": 2, "prefillPools": true},
        "candidates": [candidate(None, "decode-0", 6100.0, 20210.0), candidate(Some("prefill-0"), "decode-1", 5200.0, 15000.0)],
        "filtered": {"TooFar": 3}, "chosen": 1, "runnerUp": 0, "reason": "RemoteCheaper", "explanation": "remote is cheaper by 5210 ms",
        "states": [state("accepted", "2026-11-29T18:00:00.000000Z", None), state("prefill_started", "2026-11-29T18:00:00.004200Z", Some("prefill-0")),
                   state("streaming", "2026-11-29T18:00:05.500000Z", None)],
        "actual": {"terms": {"queue": 1.5, "prefill": 5460.0, "transfer": 9.0, "synchronization": null, "admission": null}, "bytes": 14_008_320, "transport": "Tcp", "retries": 0},
        "assurance": "Verified",
        "outcome": {"status": "Completed", "ttftMilliseconds": 5500.0, "tpotMilliseconds": 21.5, "inputTokens": 640, "cachedTokens": 32, "outputTokens": 24, "finishReason": "length"},
    });
    serde_json::from_value(record).unwrap()
}
