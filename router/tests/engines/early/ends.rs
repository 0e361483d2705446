//! What becomes of a prompt whose run ends, or whose answer begins, while it is still computed: who goes on, and which link is to blame.

use std::time::Instant;

use super::*;

/// What the engine that reads counts of a prompt that was given up elsewhere does not open its link's breaker.
#[tokio::test]
async fn a_transfer_that_ended_with_its_prompt_does_not_speak_against_the_link() {
    let policy = one_failure_opens(patient());
    let mut early = Early::start(&policy).await;
    let (reply, prefill, decode) = early.both(true).await;
    prefill.hang_up().await;
    decode.closed().await;
    let mut whole = early.d.call().await;
    whole.begin().await;
    whole.chunk(STREAM.as_bytes()).await;
    whole.end().await;
    assert_eq!(end(reply).await.text(), STREAM);
    early.counts(1, 0).await;
    assert_eq!(early.open_links(), 0);
}

/// A client that leaves takes its prompt back. Daemons of earlier releases count what was read of it as failed.
#[tokio::test]
async fn a_client_that_leaves_while_its_prompt_is_computed_opens_no_link() {
    let policy = one_failure_opens(patient());
    for (routers, beside) in [(1, false), (1, true), (2, false), (2, true)] {
        let what = format!("routers {routers}, beside another run: {beside}");
        let mut early = Early::start(&policy).await;
        early.served.router.workers.shared_by(routers);
        let mut other = None;
        if beside {
            other = Some(early.both(true).await);
        }
        let (reply, prefill, decode) = early.both(true).await;
        reply.abort();
        tokio::join!(prefill.closed(), decode.closed());
        early.counts(1, 0).await;
        assert_eq!(early.open_links(), 0, "{what}");
        // It excuses one, and nothing any more once two reports have come.
        early.counts(1, 0).await;
        early.counts(2, 0).await;
        assert_eq!(early.open_links(), 1, "{what}");
        drop(other);
    }
}

/// Nor does the deadline of a run.
#[tokio::test]
async fn a_run_that_ends_at_its_deadline_while_its_prompt_is_computed_opens_no_link() {
    let total = Duration::from_secs(2);
    let mut policy = one_failure_opens(patient());
    policy.timeouts.total_seconds = total.as_secs_f64();
    steady(total, async || {
        let mut early = Early::start(&policy).await;
        let (reply, prefill, decode) = early.both(true).await;
        tokio::join!(prefill.closed(), decode.closed());
        assert_eq!(end(reply).await.status, 504);
        early.counts(1, 0).await;
        assert_eq!(early.open_links(), 0);
    })
    .await;
}

/// The engine that generates has computed the prompt: the record says so, whoever is to blame.
#[tokio::test]
async fn a_lease_that_its_owner_ended_is_in_the_record_and_opens_no_link() {
    let policy = one_failure_opens(patient());
    let mut early = Early::start(&policy).await;
    let (reply, prefill, mut decode) = early.both(true).await;
    prefill
        .answer(200, "application/json", prefill_answer().as_bytes())
        .await;
    decode.begin().await;
    decode.chunk(STREAM.as_bytes()).await;
    decode.end().await;
    let run = end(reply).await.run();
    early.counts(0, 1).await;
    let actual = early.record(&run).await.actual.unwrap();
    assert_eq!(actual.failed_transfers, Some(1));
    assert_eq!(early.open_links(), 0);
}

const FIRST: &str = "data: {\"choices\":[{\"text\":\"a\"}]}\n\n";
const LAST: &str =
    "data: {\"choices\":[{\"text\":\"b\",\"finish_reason\":\"length\"}]}\n\ndata: [DONE]\n\n";

/// It has the KV, or has computed the prompt itself: what the client reads is right, and goes on.
#[tokio::test]
async fn an_answer_that_has_begun_does_not_end_with_the_first_leg() {
    // The first leg is waited for so long after the answer has begun.
    steady(Duration::from_secs(1), async || {
        let mut early = Early::start(&patient()).await;
        for what in ["dies", "answers", "never answers"] {
            let (reply, prefill, mut decode) = early.both(true).await;
            decode.begin().await;
            decode.chunk(FIRST.as_bytes()).await;
            early.has_read(FIRST.len()).await;
            let mut unanswered = None;
            match what {
                "dies" => prefill.hang_up().await,
                "answers" => {
                    prefill
                        .answer(200, "application/json", prefill_answer().as_bytes())
                        .await;
                }
                _ => unanswered = Some(prefill),
            }
            // What the first leg has said is heard before what the client reads after it.
            for more in 2..=4 {
                decode.chunk(FIRST.as_bytes()).await;
                early.has_read(more * FIRST.len()).await;
            }
            decode.chunk(LAST.as_bytes()).await;
            decode.end().await;
            let reply = end(reply).await;
            assert_eq!(reply.text(), format!("{}{LAST}", FIRST.repeat(4)), "{what}");
            let record = early.record(&reply.run()).await;
            assert!(record.fallback.is_none(), "{what}");
            // Concluded from the answer, not said by the first leg: in time it had said nothing.
            let states = states(&record);
            assert!(states.contains(&("prefill_completed", true)), "{states:?}");
            let actual = record.actual.unwrap();
            assert_eq!(actual.terms.prefill.is_some(), what == "answers", "{what}");
            if let Some(prefill) = unanswered {
                prefill.closed().await;
            }
            early.served.router.holds_nothing().await;
            let text = early.served.router.metrics.text().unwrap();
            assert!(text.contains("baton_illegal_events_total 0"), "{what}");
        }
    })
    .await;
}

/// The engine that generates had the prompt in its cache, or its daemon had no room for it: it is computed for nobody.
#[tokio::test]
async fn a_prompt_is_not_computed_on_for_an_answer_that_has_begun_without_it() {
    let mut early = Early::start(&patient()).await;
    for stream in [true, false] {
        let (reply, prefill, mut decode) = early.both(stream).await;
        let began = Instant::now();
        let (first, last) = ANSWER.split_at(ANSWER.len() / 2);
        if stream {
            decode.begin().await;
            decode.chunk(FIRST.as_bytes()).await;
        } else {
            let length = ANSWER.len();
            let head = format!(
                "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n"
            );
            decode.bytes(head.as_bytes()).await;
            decode.bytes(first).await;
        }
        prefill.closed().await;
        // A prompt whose answer lags behind its last block is not cut off; its own limit is minutes.
        let waited = began.elapsed().as_secs_f64();
        assert!(waited > 0.9, "{waited} s");
        if stream {
            decode.chunk(LAST.as_bytes()).await;
            decode.end().await;
        } else {
            decode.bytes(last).await;
        }
        let reply = end(reply).await;
        let expected = if stream {
            format!("{FIRST}{LAST}").into_bytes()
        } else {
            ANSWER.to_vec()
        };
        assert_eq!(reply.body, expected);
        let record = early.record(&reply.run()).await;
        assert!(record.fallback.is_none());
        let actual = record.actual.unwrap();
        assert_eq!(
            (actual.terms.prefill, actual.failed_transfers),
            (None, Some(0))
        );
        early.served.router.holds_nothing().await;
    }
}
