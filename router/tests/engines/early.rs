//! The hand-off whose second leg is sent while the first one still computes: the daemon beside the engine tells how its blocks are read.

mod ends;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use baton_placement::policy::{Assurance, Policy};
use baton_placement::record::DecisionRecord;
use baton_protocol::card::Split;
use baton_protocol::wire::{self, watch_event};
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tonic::Status;

use crate::double::OpenParameters;
use crate::engine::{Call, Engine};
use crate::front::{Reply, Served, end};
use crate::pull::{ANSWER, prefill_answer};
use crate::router::{SOON, until};
use crate::steady::steady;
use crate::table::{
    COMPUTE, STREAM, answer_whole, impatient_with_fetches, impatient_with_prompts, patient,
};
use crate::{pair, policy};

const SPLIT: Split = Split::Baton {
    lease_milliseconds: 30_000,
};
/// As the daemon gives them; the space is ours, to see that nobody writes them anew.
const TOLD: &str =
    r#"{"do_remote_prefill": true,"do_remote_decode":false,"baton":{"lease":"00ff","later":1e0}}"#;
/// Nothing of an answer, and the client gets it with the answer.
const COMMENT: &str = ": waits\n\n";

/// A pair with Baton's connector, and a client.
struct Early {
    served: Served,
    p: Engine,
    d: Engine,
    asked: mpsc::UnboundedReceiver<OpenParameters>,
    /// Of the reports of the engine that generates.
    reports: u64,
    /// Bytes of the last answer that its client has read.
    read: Arc<AtomicUsize>,
}

impl Early {
    async fn start(policy: &Policy) -> Self {
        let (served, p, d) = pair(policy, SPLIT).await;
        let asked = p.daemon.is_asked();
        let reports = 1;
        Self {
            served,
            p,
            d,
            asked,
            reports,
            read: Arc::default(),
        }
    }

    /// The engine that generates has counted so many transfers since its start, and reports that.
    async fn counts(&mut self, failed_transfers: u64, ended_transfers: u64) {
        self.reports += 1;
        let load = wire::Load {
            load_sequence: self.reports,
            failed_transfers,
            ended_transfers,
            ..wire::Load::default()
        };
        self.d.daemon.tell(0, watch_event::Event::Load(load));
        let all = failed_transfers + ended_transfers;
        let line = format!("baton_engine_failed_transfers_total {all}\n");
        until("the report has come", || {
            self.served.router.metrics.text().unwrap().contains(&line)
        })
        .await;
    }

    fn open_links(&self) -> u32 {
        let router = &self.served.router;
        let counts = router.learning.link_counts(router.workers.clock.now());
        assert!(counts.open + counts.closed > 0, "none is used");
        counts.open
    }

    /// The client has read so much of its answer.
    async fn has_read(&self, bytes: usize) {
        until("the client reads it", || {
            self.read.load(Ordering::Relaxed) >= bytes
        })
        .await;
    }

    /// A record waits for what the engine that has fetched counts of it: it reports as a daemon does.
    async fn record(&mut self, run: &str) -> DecisionRecord {
        let record = self.served.record(run);
        tokio::pin!(record);
        loop {
            self.reports += 1;
            let load = wire::Load {
                load_sequence: self.reports,
                ..wire::Load::default()
            };
            self.d.daemon.tell(0, watch_event::Event::Load(load));
            tokio::select! {
                record = &mut record => return record,
                () = tokio::time::sleep(Duration::from_millis(20)) => {}
            }
        }
    }

    /// A run whose first leg is with its engine, and whose router asks.
    async fn begin(&mut self, stream: bool) -> (JoinHandle<Reply>, Call, OpenParameters) {
        let body = format!(r#"{{"model":"m","prompt":"a","max_tokens":8,"stream":{stream}}}"#);
        let path = "/v1/completions";
        let (reply, read) = self.served.post_read("Disaggregated", path, body);
        self.read = read;
        let prefill = self.p.call().await;
        let question = tokio::time::timeout(SOON, self.asked.recv()).await;
        let question = question.expect("the daemon is asked").unwrap();
        (reply, prefill, question)
    }

    /// A run whose two legs are under way.
    async fn both(&mut self, stream: bool) -> (JoinHandle<Reply>, Call, Call) {
        let (reply, prefill, question) = self.begin(stream).await;
        tells(question, TOLD);
        let decode = self.d.call().await;
        assert_eq!(
            parameters(&decode),
            serde_json::from_str::<Value>(TOLD).unwrap()
        );
        (reply, prefill, decode)
    }

    /// The request is answered whole by the engine that generates; what the record says.
    async fn whole(&mut self, reply: JoinHandle<Reply>) -> DecisionRecord {
        answer_whole(&mut self.d).await;
        self.ends(reply).await
    }

    /// The client has its whole answer, once; nothing is held and no report was out of place.
    async fn ends(&mut self, reply: JoinHandle<Reply>) -> DecisionRecord {
        let reply = end(reply).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
        let text = reply.text();
        let text = text.strip_prefix(COMMENT).unwrap_or(&text);
        assert!(text == STREAM || text.as_bytes() == ANSWER, "{text}");
        let record = self.record(&reply.run()).await;
        assert_eq!(record.states.last().unwrap().state, "completed");
        self.served.router.holds_nothing().await;
        let text = self.served.router.metrics.text().unwrap();
        assert!(text.contains("baton_illegal_events_total 0"), "{text}");
        assert!(self.p.is_idle() && self.d.is_idle());
        record
    }
}

/// A link is shut by its first failure.
fn one_failure_opens(mut policy: Policy) -> Policy {
    policy.topology.breaker.failures = 1;
    policy
}

fn tells(question: OpenParameters, json: &str) {
    let json = json.to_owned();
    let told = question.told.send(Ok(wire::ParametersReply { json }));
    told.expect("the router waits for it");
}

fn parameters(call: &Call) -> Value {
    call.json()["kv_transfer_params"].clone()
}

fn states(record: &DecisionRecord) -> Vec<(&str, bool)> {
    let states = record.states.iter();
    states
        .map(|state| (state.state.as_str(), state.inferred))
        .collect()
}

async fn hangs_up(question: OpenParameters) {
    let OpenParameters { mut told, .. } = question;
    tokio::time::timeout(SOON, told.closed())
        .await
        .expect("the question is taken back");
}

#[tokio::test]
async fn the_second_leg_is_sent_while_the_first_one_computes() {
    let mut early = Early::start(&policy()).await;
    let (reply, prefill, question) = early.begin(true).await;
    assert_eq!(
        Some(question.operation.as_str()),
        prefill.header("x-request-id")
    );
    let mut said = parameters(&prefill);
    assert_eq!(said["baton"], json!({"operation": question.operation}));
    said.as_object_mut().unwrap().remove("baton");
    let expected = json!({"do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": null,
        "remote_block_ids": null, "remote_host": null, "remote_port": null});
    assert_eq!(said, expected);
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert!(early.d.is_idle(), "nothing can be read yet");
    tells(question, TOLD);
    let mut decode = early.d.call().await;
    let sent = String::from_utf8(decode.body.clone()).unwrap();
    assert!(sent.contains(TOLD), "byte for byte: {sent}");
    decode.begin().await;
    prefill
        .answer(200, "application/json", prefill_answer().as_bytes())
        .await;
    // The engine that generates has the last block a moment later.
    tokio::time::sleep(Duration::from_millis(50)).await;
    decode.chunk(STREAM.as_bytes()).await;
    decode.end().await;
    let record = early.ends(reply).await;
    assert_eq!(record.assurance, Some(Assurance::Verified));
    let expected = [
        ("accepted", false),
        ("route_selected", false),
        ("prefill_started", true),
        ("kv_transfer_started", true),
        ("prefill_completed", false),
        ("kv_published", false),
        ("kv_transfer_completed", true),
        ("decode_started", true),
        ("streaming", false),
        ("completed", false),
    ];
    assert_eq!(states(&record), expected);
    assert!(record.fallback.is_none());
    let prefill = record.actual.unwrap().terms.prefill.unwrap();
    assert!(prefill >= 50.0, "the whole first leg: {prefill}");
}

#[tokio::test]
async fn an_answer_in_one_piece_is_passed_on_too() {
    let mut early = Early::start(&policy()).await;
    let (reply, prefill, decode) = early.both(false).await;
    prefill
        .answer(200, "application/json", prefill_answer().as_bytes())
        .await;
    decode.answer(200, "application/json", ANSWER).await;
    let record = early.ends(reply).await;
    assert_eq!(record.outcome.unwrap().input_tokens, 171);
}

/// Today's way: one leg after the other.
#[tokio::test]
async fn a_daemon_that_does_not_tell_in_time_or_at_all_costs_nothing() {
    let mut early = Early::start(&policy()).await;
    let given: Value = serde_json::from_str(&prefill_answer()).unwrap();
    let answers = [
        None,
        Some(Err(Status::unimplemented("an earlier release"))),
        Some(Err(Status::not_found("unknown"))),
        Some(Err(Status::failed_precondition("the prompt is refused"))),
        Some(Ok("no JSON")),
        Some(Ok("[]")),
    ];
    for answer in answers {
        let what = format!("{answer:?}");
        let (reply, prefill, question) = early.begin(false).await;
        let mut unanswered = None;
        match answer {
            None => unanswered = Some(question),
            Some(Ok(json)) => tells(question, json),
            Some(Err(status)) => question.told.send(Err(status)).unwrap(),
        }
        tokio::time::sleep(Duration::from_millis(30)).await;
        assert!(early.d.is_idle(), "{what}");
        prefill
            .answer(200, "application/json", prefill_answer().as_bytes())
            .await;
        let decode = early.d.call().await;
        assert_eq!(parameters(&decode), given["kv_transfer_params"], "{what}");
        decode.answer(200, "application/json", ANSWER).await;
        let record = early.ends(reply).await;
        let order: Vec<&str> = states(&record).iter().map(|(state, _)| *state).collect();
        let at = |wanted: &str| order.iter().position(|state| *state == wanted).unwrap();
        assert!(at("kv_published") < at("kv_transfer_started"), "{what}");
        if let Some(question) = unanswered {
            hangs_up(question).await;
        }
    }
}

/// Whatever becomes of the first leg while the second waits for blocks: the second is dropped, and the run is answered anew.
#[tokio::test]
async fn a_first_leg_that_fails_takes_the_second_with_it_and_not_the_answer() {
    let mut early = Early::start(&one_failure_opens(patient())).await;
    let lost = Some("prefill-lost");
    for (what, cause) in [
        ("dies", lost),
        ("500", lost),
        ("nothing kept", Some("pool-full")),
        ("400", None),
        ("breaks off", lost),
    ] {
        first_leg_fails(&mut early, what, cause).await;
    }
    assert_eq!(early.open_links(), 0, "{NOT_TO_BLAME}");
    // The second leg is sent before the first one is late.
    steady(COMPUTE, async || {
        let mut hurried = Early::start(&one_failure_opens(impatient_with_prompts())).await;
        first_leg_fails(&mut hurried, "sleeps", lost).await;
        assert_eq!(hurried.open_links(), 0, "{NOT_TO_BLAME}");
    })
    .await;
}

const NOT_TO_BLAME: &str = "the way between the two is not to blame";

/// Before the second one has said anything, and after.
async fn first_leg_fails(early: &mut Early, what: &str, cause: Option<&str>) {
    let mut asleep = Vec::new();
    for begun in [false, true] {
        let (reply, mut prefill, mut decode) = early.both(true).await;
        if begun {
            // Its head, and what is no answer yet.
            decode.begin().await;
            decode.chunk(COMMENT.as_bytes()).await;
        }
        match what {
            "dies" => prefill.hang_up().await,
            "sleeps" => asleep.push(prefill),
            "nothing kept" => {
                let body = br#"{"choices":[],"kv_transfer_params":null}"#;
                prefill.answer(200, "application/json", body).await;
            }
            "breaks off" => {
                prefill
                    .bytes(b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n{")
                    .await;
                prefill.hang_up().await;
            }
            status => {
                let status = status.parse().unwrap();
                let body = br#"{"error":{"message":"why"}}"#;
                prefill.answer(status, "application/json", body).await;
            }
        }
        decode.closed().await;
        let record = early.whole(reply).await;
        let found = record.fallback.map(|fallback| fallback.cause);
        assert_eq!(found.as_deref(), cause, "{what}, begun {begun}");
    }
    for prefill in asleep {
        prefill.closed().await;
    }
}

/// As where the blocks are all there: one failed leg costs the run an attempt, and the other is dropped.
#[tokio::test]
async fn a_second_leg_that_fails_drops_the_first_and_not_the_answer() {
    let mut early = Early::start(&patient()).await;
    for (status, cause) in [
        (Some(500), Some("engine-failed")),
        (Some(400), None),
        (None, Some("source-lost")),
    ] {
        let (reply, prefill, decode) = early.both(false).await;
        match status {
            Some(status) => {
                decode.answer(status, "application/json", b"{}").await;
            }
            None => decode.hang_up().await,
        }
        prefill.closed().await;
        let record = early.whole(reply).await;
        let found = record.fallback.map(|fallback| fallback.cause);
        assert_eq!(found.as_deref(), cause, "{status:?}");
    }
}

/// All its patience begins when the prompt is computed.
#[tokio::test]
async fn a_second_leg_is_not_late_while_the_first_one_computes() {
    let mut policy = impatient_with_fetches();
    policy.timeouts.transfer_seconds = 1.0;
    // The second leg has a little longer than this.
    steady(Duration::from_millis(1_600), async || {
        let mut early = Early::start(&policy).await;
        for begun in [false, true] {
            let (reply, prefill, mut decode) = early.both(true).await;
            if begun {
                decode.begin().await;
                decode.chunk(COMMENT.as_bytes()).await;
            }
            tokio::time::sleep(Duration::from_secs(2)).await;
            prefill
                .answer(200, "application/json", prefill_answer().as_bytes())
                .await;
            tokio::time::sleep(Duration::from_millis(200)).await;
            if !begun {
                decode.begin().await;
            }
            decode.chunk(STREAM.as_bytes()).await;
            decode.end().await;
            let record = early.ends(reply).await;
            assert!(record.fallback.is_none(), "begun {begun}");
        }
        // Then it is.
        let (reply, prefill, decode) = early.both(true).await;
        prefill
            .answer(200, "application/json", prefill_answer().as_bytes())
            .await;
        decode.closed().await;
        let record = early.whole(reply).await;
        assert_eq!(record.fallback.unwrap().cause, "timeout");
    })
    .await;
}

#[tokio::test]
async fn a_client_that_leaves_is_gone_for_both_legs_and_for_the_daemon() {
    let mut early = Early::start(&policy()).await;
    let (reply, prefill, question) = early.begin(true).await;
    reply.abort();
    prefill.closed().await;
    hangs_up(question).await;
    early.served.router.holds_nothing().await;

    for begun in [false, true] {
        let (reply, prefill, mut decode) = early.both(true).await;
        let operation = prefill.header("x-request-id").unwrap();
        let run = operation.strip_suffix("-01").unwrap().to_owned();
        if begun {
            decode.begin().await;
        }
        reply.abort();
        tokio::join!(prefill.closed(), decode.closed());
        early.served.router.holds_nothing().await;
        // How far it came.
        let expected = [
            ("accepted", false),
            ("route_selected", false),
            ("prefill_started", true),
            ("kv_transfer_started", true),
            ("cancelled", false),
        ];
        assert_eq!(states(&early.record(&run).await), expected);
    }
    assert!(early.d.is_idle());
}
