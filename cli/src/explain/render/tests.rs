//! What a person reads of a record.

use serde_json::json;

use super::*;
use crate::explain::sample::record;

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
fn a_transport_that_was_left_is_told_with_its_reason() {
    let mut record = record();
    let actual = record.actual.as_mut().unwrap();
    actual.planned_transport = Some("Shm".to_owned());
    actual.transports_left =
        serde_json::from_value(json!([{"from": "Shm", "to": "Tcp", "cause": "credentials"}]))
            .unwrap();
    let text = explanation(&record).join("\n");
    let expected = "\
moved 14.0 MB by Tcp, 0 retries, Verified
  planned was Shm
  Shm was left for Tcp: credentials
Completed";
    assert!(text.contains(expected), "{text}");
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
