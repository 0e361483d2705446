//! A record of each kind, and what a person reads of it.

use baton_placement::record::DecisionRecord;
use serde_json::{Value, json};

use super::*;

pub(crate) fn candidate(prefill: Option<&str>, decode: &str, prefill_ms: f64, cost: f64) -> Value {
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

fn record() -> DecisionRecord {
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

#[test]
fn an_explanation_answers_in_the_order_of_the_questions() {
    let text = explanation(&record()).join("\n");
    let expected = "\
run r0-00017  2026-11-29T18:00:00.000000Z
model m, policy chat (generation 2), mode Conditional
640 prompt tokens, at most 24 new ones, 24 expected

remote prefill-0 → decode-1: RemoteCheaper
  remote is cheaper by 5210 ms
  next best: local on decode-0, cost 20210

candidates (milliseconds):
     plan                         cached  decoding  prefill  transfer  machine  decode  first token  at most   cost
  →  remote prefill-0 → decode-1    0/32         0     5200      7.25     5200     300         5208     6500  15000
  2  local on decode-0                32         1     6100         0     6100     300         6108     7625  20210
  left out: TooFar 3

what happened:
    ms  state            attempt  worker
     0  accepted               1
   4.2  prefill_started        1  prefill-0
  5500  streaming              1             inferred

estimate beside actual (milliseconds):
                   estimated        actual  actual/estimated
  queue                    0           1.5
  prefill               5200          5460              1.05
  transfer              7.25             9              1.24
  synchronization          0  not observed
  admission                0  not observed
  first token           5208          5500              1.06

moved 14.0 MB by Tcp, 0 retries, Verified
Completed (length): 640 tokens in, 32 of them cached, 24 out; first token after 5500 ms, then 21.5 ms each";
    assert_eq!(text, expected, "found:\n{text}");
}

#[test]
fn one_line_says_where_and_why_and_what_became_of_it() {
    let mut record = record();
    assert_eq!(
        sentence(&record),
        "remote prefill-0 → decode-1 · RemoteCheaper · remote is cheaper by 5210 ms"
    );
    record.fallback = serde_json::from_value(
        json!({"cause": "checksum-mismatch", "at": "2026-11-29T18:00:01.000000Z"}),
    )
    .unwrap();
    assert!(
        sentence(&record)
            .starts_with("remote prefill-0 → decode-1 (then recomputed: checksum-mismatch) · ")
    );
}

#[test]
fn a_request_that_went_nowhere_is_explained_too() {
    let mut record = record();
    record.candidates.clear();
    (
        record.chosen,
        record.runner_up,
        record.actual,
        record.outcome,
    ) = (None, None, None, None);
    record.states.clear();
    let lines = explanation(&record);
    assert!(
        lines.contains(&"nowhere: RemoteCheaper".to_owned()),
        "{lines:#?}"
    );
    assert!(lines.contains(&"  left out: TooFar 3".to_owned()));
    assert_eq!(lines.last().unwrap(), "not ended yet");
}

#[test]
fn numbers_are_as_exact_as_they_are_read() {
    let shown: Vec<String> = [0.0, 0.004, 1.5, 12.34, 99.96, 1234.5, f64::INFINITY]
        .map(number)
        .into();
    assert_eq!(shown, ["0", "0", "1.5", "12.3", "100", "1234", "∞"]);
}
