//! The hand-off that the second engine pulls: both legs, and what the record says of them.

use std::time::Duration;

use baton_placement::fleet::WorkerState;
use baton_placement::place::{Filter, Reason};
use baton_placement::policy::Assurance;
use baton_protocol::card::Split;
use baton_protocol::wire::{self, watch_event};
use serde_json::{Value, json};

use crate::engine::Engine;
use crate::front::{Served, end};
use crate::router::until;
use crate::{NIXL, pair, policy, samples};

/// As vLLM gave them once; the space is ours, to see that nobody writes them anew.
pub(crate) const PARAMETERS: &str = r#"{"do_remote_prefill": true, "do_remote_decode":false,"remote_block_ids":[[9,8,7]],"remote_engine_id":"65e4bb78","remote_request_id":"cmpl-r0-8cd74aeb","remote_host":"127.0.0.1","remote_port":5600,"tp_size":1,"remote_blocks_expiry_time":null,"later":1e0}"#;
pub(crate) const ANSWER: &[u8] = br#"{"choices":[{"text":"x","finish_reason":"length"}],"usage":{"prompt_tokens":171,"completion_tokens":8,"prompt_tokens_details":{"cached_tokens":171}}}"#;
const BODY: &str = r#"{"model":"m","prompt":"a","max_tokens":8,"min_tokens":2,"stream":false,"kv_transfer_params":{"remote_host":"evil"}}"#;

pub(crate) fn prefill_answer() -> String {
    format!(
        r#"{{"choices":[{{"text":"y","finish_reason":"length"}}],"usage":{{"prompt_tokens":171,"completion_tokens":1,"prompt_tokens_details":{{"cached_tokens":48}}}},"kv_transfer_params":{PARAMETERS}}}"#
    )
}

#[tokio::test]
async fn the_prompt_is_computed_by_one_engine_and_answered_by_another() {
    let (served, mut p, mut d) = pair(&policy(), NIXL).await;
    let reply = served.post("Disaggregated", "/v1/completions", BODY);
    let prefill = p.call().await;
    assert!(d.is_idle(), "the second leg waits for the first");
    let expected = json!({
        "model": "m", "prompt": "a", "max_tokens": 1, "stream": false,
        "kv_transfer_params": {"do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": null,
            "remote_block_ids": null, "remote_host": null, "remote_port": null},
    });
    assert_eq!(prefill.json(), expected);
    let operation = prefill.header("x-request-id").unwrap().to_owned();
    prefill
        .answer(200, "application/json", prefill_answer().as_bytes())
        .await;
    let decode = d.call().await;
    assert_eq!(decode.header("x-request-id"), Some(operation.as_str()));
    let sent = String::from_utf8(decode.body.clone()).unwrap();
    let parameters = BODY.replace(
        r#","kv_transfer_params":{"remote_host":"evil"}"#,
        &format!(r#","kv_transfer_params":{PARAMETERS}"#),
    );
    assert_eq!(sent, parameters, "byte for byte");
    decode.answer(200, "application/json", ANSWER).await;
    let reply = end(reply).await;
    assert_eq!(reply.body, ANSWER);

    let record = served.record(&reply.run()).await;
    assert_eq!(record.reason, Reason::ModeDisaggregated);
    assert_eq!(record.assurance, Some(Assurance::EngineTrusted));
    let states: Vec<(&str, bool, &str)> = record
        .states
        .iter()
        .map(|state| {
            let worker = state.worker.as_ref().map_or("", |worker| worker.as_str());
            (state.state.as_str(), state.inferred, worker)
        })
        .collect();
    let expected = [
        ("accepted", false, ""),
        ("route_selected", false, "d"),
        ("prefill_started", true, "p"),
        ("prefill_completed", false, "p"),
        ("kv_published", false, "p"),
        ("kv_transfer_started", true, "d"),
        ("kv_transfer_completed", true, "d"),
        ("decode_started", true, "d"),
        ("completed", false, ""),
    ];
    assert_eq!(states, expected);
    let actual = record.actual.unwrap();
    assert!(actual.terms.prefill.is_some());
    assert_eq!(
        (actual.terms.transfer, actual.bytes),
        (None, 0),
        "nobody measured it"
    );
    let outcome = record.outcome.unwrap();
    assert_eq!((outcome.input_tokens, outcome.cached_tokens), (171, 48));
    served.router.holds_nothing().await;
}

#[tokio::test]
async fn recorded_answers_of_vllm_pass_as_they_are() {
    let (served, mut p, mut d) = pair(&policy(), NIXL).await;
    let prefill = include_str!("samples/vllm-pd-nixl-prefill-response.json");
    let stream = include_str!("samples/vllm-pd-nixl-decode-stream-response.sse");
    let body = r#"{"model":"m","messages":[{"role":"user","content":"a"}],"max_tokens":8,"stream":true,"stream_options":{"include_usage":true}}"#;
    let reply = served.post("Disaggregated", "/v1/chat/completions", body);
    let call = p.call().await;
    assert!(call.json().get("stream_options").is_none());
    call.answer(200, "application/json", prefill.as_bytes())
        .await;
    let mut call = d.call().await;
    assert_eq!(call.json()["stream_options"]["include_usage"], true);
    let given: Value = serde_json::from_str(prefill).unwrap();
    assert_eq!(
        call.json()["kv_transfer_params"],
        given["kv_transfer_params"]
    );
    call.begin().await;
    for piece in stream.as_bytes().chunks(97) {
        call.chunk(piece).await;
    }
    call.end().await;
    let reply = end(reply).await;
    assert_eq!(reply.text(), stream);
    let record = served.record(&reply.run()).await;
    let outcome = record.outcome.unwrap();
    assert_eq!((outcome.input_tokens, outcome.output_tokens), (171, 8));
    assert_eq!(outcome.finish_reason.as_deref(), Some("length"));
    assert!(outcome.ttft_milliseconds.is_some() && outcome.tpot_milliseconds.is_some());
}

#[tokio::test]
async fn batons_own_connector_is_called_alike_and_vouched_for() {
    let split = Split::Baton {
        lease_milliseconds: 30_000,
    };
    let (served, mut p, mut d) = pair(&policy(), split).await;
    let reply = served.post("Disaggregated", "/v1/completions", BODY);
    p.call()
        .await
        .answer(200, "application/json", prefill_answer().as_bytes())
        .await;
    d.call().await.answer(200, "application/json", ANSWER).await;
    let record = served.record(&end(reply).await.run()).await;
    assert_eq!(record.assurance, Some(Assurance::Verified));
}

#[tokio::test]
async fn blocks_are_not_fetched_at_the_end_of_their_lease() {
    let split = Split::NixlPull {
        lease_milliseconds: 3_000,
    };
    let (served, mut p, mut d) = pair(&policy(), split).await;
    let reply = served.post("Disaggregated", "/v1/completions", BODY);
    let mut prefill = p.call().await;
    // The head comes at once, the rest when the lease is almost over.
    let body = prefill_answer();
    let head = format!(
        "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    prefill.bytes(head.as_bytes()).await;
    tokio::time::sleep(Duration::from_millis(2_900)).await;
    prefill.bytes(body.as_bytes()).await;
    let decode = d.call().await;
    assert!(
        decode.json().get("kv_transfer_params").is_none(),
        "computed there instead"
    );
    assert!(decode.header("x-request-id").unwrap().ends_with("-02"));
    decode.answer(200, "application/json", ANSWER).await;
    let reply = end(reply).await;
    assert_eq!(reply.body, ANSWER);
    let record = served.record(&reply.run()).await;
    assert_eq!(record.fallback.unwrap().cause, "lease-gone");
    assert_eq!(
        record.assurance,
        Some(Assurance::Verified),
        "what was sent was computed where it was used"
    );
}

#[tokio::test]
async fn what_cannot_be_split_stays_on_one_worker_and_the_record_says_why() {
    let (served, mut p, mut d) = pair(&policy(), NIXL).await;
    for (path, fields, field) in [
        ("/v1/completions", r#""prompt":"a","n":2"#, "n"),
        ("/v1/completions", r#""prompt":"a","echo":true"#, "echo"),
        ("/v1/completions", r#""prompt":["a","b"]"#, "prompt"),
        (
            "/v1/chat/completions",
            r#""messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:"}}]}]"#,
            "messages",
        ),
        (
            "/v1/chat/completions",
            r#""messages":[],"prompt_logprobs":1"#,
            "prompt_logprobs",
        ),
    ] {
        let body = format!(r#"{{"model":"m",{fields}}}"#);
        let reply = served.post("Disaggregated", path, body.clone());
        let call = d.call().await;
        assert_eq!(String::from_utf8(call.body.clone()).unwrap(), body);
        call.answer(200, "application/json", ANSWER).await;
        let record = served.record(&end(reply).await.run()).await;
        assert_eq!(record.reason, Reason::NotDisaggregatable, "{field}");
        assert_eq!(record.input.unsplittable.as_deref(), Some(field));
    }
    assert!(p.is_idle());
}

#[tokio::test]
async fn a_policy_may_require_that_every_block_is_checked() {
    let mut policy = policy();
    policy.verify.require = Assurance::Verified;
    let (served, mut p, mut d) = pair(&policy, NIXL).await;
    let reply = served.post("Conditional", "/v1/completions", BODY);
    d.call().await.answer(200, "application/json", ANSWER).await;
    let record = served.record(&end(reply).await.run()).await;
    assert_eq!(record.filtered.get(&Filter::NotVerified), Some(&1));
    assert!(p.is_idle());
}

#[tokio::test]
async fn a_client_that_leaves_is_gone_for_the_engine_that_works_for_it() {
    let (served, mut p, mut d) = pair(&policy(), NIXL).await;
    // While the prompt is computed.
    let reply = served.post("Disaggregated", "/v1/completions", BODY);
    let prefill = p.call().await;
    reply.abort();
    prefill.closed().await;
    assert!(d.is_idle());
    served.router.holds_nothing().await;
    // While its KV is fetched, and when the answer has begun: the decode worker gives the blocks back.
    for begun in [false, true] {
        let body = BODY.replace("\"stream\":false", "\"stream\":true");
        let reply = served.post("Disaggregated", "/v1/completions", body);
        p.call()
            .await
            .answer(200, "application/json", prefill_answer().as_bytes())
            .await;
        let mut decode = d.call().await;
        if begun {
            decode.begin().await;
            decode
                .chunk(b"data: {\"choices\":[{\"text\":\"a\"}]}\n\n")
                .await;
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        reply.abort();
        decode.closed().await;
        served.router.holds_nothing().await;
    }
}

#[tokio::test]
async fn a_pair_that_fails_again_and_again_is_left_alone() {
    let mut policy = policy();
    policy.fallback.local_recompute.max_percent = 100.0;
    policy.fallback.local_recompute.max_concurrent_per_worker = 10;
    let failures = policy.topology.breaker.failures;
    let (served, mut p, mut d) = pair(&policy, NIXL).await;
    for _ in 0..failures {
        let reply = served.post("Disaggregated", "/v1/completions", BODY);
        p.call()
            .await
            .answer(200, "application/json", prefill_answer().as_bytes())
            .await;
        d.call().await.answer(500, "application/json", b"{}").await;
        d.call().await.answer(200, "application/json", ANSWER).await;
        end(reply).await;
    }
    let reply = served.post("Disaggregated", "/v1/completions", BODY);
    d.call().await.answer(200, "application/json", ANSWER).await;
    let record = served.record(&end(reply).await.run()).await;
    assert_eq!(record.filtered.get(&Filter::BreakerOpen), Some(&1));
    assert!(p.is_idle());
}

/// What is wrong is the prefill worker's room or its flags: short prompts would lose a pair that works.
#[tokio::test]
async fn a_prefill_worker_that_keeps_nothing_for_its_reader_leaves_the_link_alone() {
    let mut policy = policy();
    policy.fallback.local_recompute.max_percent = 100.0;
    policy.fallback.local_recompute.max_concurrent_per_worker = 10;
    let baton = Split::Baton {
        lease_milliseconds: 30_000,
    };
    for (split, cause) in [(NIXL, "no-transport"), (baton, "pool-full")] {
        let (served, mut p, mut d) = pair(&policy, split).await;
        for _ in 0..=policy.topology.breaker.failures {
            let reply = served.post("Disaggregated", "/v1/completions", BODY);
            p.call()
                .await
                .answer(200, "application/json", br#"{"choices":[]}"#)
                .await;
            let whole = d.call().await;
            assert!(whole.json().get("kv_transfer_params").is_none());
            whole.answer(200, "application/json", ANSWER).await;
            let record = served.record(&end(reply).await.run()).await;
            assert_eq!(record.fallback.unwrap().cause, cause);
        }
        let now = served.router.workers.clock.now();
        assert_eq!(served.router.learning.link_counts(now).open, 0);
    }
}

#[tokio::test]
async fn a_late_read_shuts_the_link_and_is_told() {
    let (served, mut p, mut d) = pair(&policy(), NIXL).await;
    let reply = served.post("Disaggregated", "/v1/completions", BODY);
    p.call()
        .await
        .answer(200, "application/json", prefill_answer().as_bytes())
        .await;
    d.call().await.answer(200, "application/json", ANSWER).await;
    end(reply).await;
    let load = wire::Load {
        load_sequence: 2,
        late_reads: 1,
        ..wire::Load::default()
    };
    p.daemon.tell(0, watch_event::Event::Load(load));
    until("the alarm is counted", || {
        let text = served.router.metrics.text().unwrap();
        text.contains("baton_engine_late_reads_total 1")
    })
    .await;
    let reply = served.post("Disaggregated", "/v1/completions", BODY);
    d.call().await.answer(200, "application/json", ANSWER).await;
    let record = served.record(&end(reply).await.run()).await;
    assert_eq!(record.filtered.get(&Filter::BreakerOpen), Some(&1));
    assert!(p.is_idle());
}

#[tokio::test]
async fn transfers_that_fail_behind_good_answers_open_the_breaker() {
    let (served, mut p, mut d) = pair(&policy(), NIXL).await;
    let reply = served.post("Disaggregated", "/v1/completions", BODY);
    p.call()
        .await
        .answer(200, "application/json", prefill_answer().as_bytes())
        .await;
    d.call().await.answer(200, "application/json", ANSWER).await;
    end(reply).await;
    let load = wire::Load {
        load_sequence: 2,
        failed_transfers: u64::from(policy().topology.breaker.failures),
        ..wire::Load::default()
    };
    d.daemon.tell(0, watch_event::Event::Load(load));
    until("the link is shut", || {
        served
            .router
            .learning
            .link_counts(served.router.workers.clock.now())
            .open
            == 1
    })
    .await;
    assert!(p.is_idle());
}

/// An engine that could not fetch computes the prompt anew and says nothing: its counter does, a report or two after the answer.
#[tokio::test]
async fn the_record_says_whether_the_engine_gave_a_transfer_up() {
    let (served, mut p, mut d) = pair(&policy(), NIXL).await;
    let mut load_sequence = 1;
    let mut failed_transfers = 0;
    for fails in [0, 1, 0] {
        let reply = served.post("Disaggregated", "/v1/completions", BODY);
        p.call()
            .await
            .answer(200, "application/json", prefill_answer().as_bytes())
            .await;
        d.call().await.answer(200, "application/json", ANSWER).await;
        let run = end(reply).await.run();
        failed_transfers += fails;
        let record = served.record(&run);
        tokio::pin!(record);
        // As a daemon does, until the record is there.
        let actual = loop {
            load_sequence += 1;
            let load = wire::Load {
                load_sequence,
                failed_transfers,
                ..wire::Load::default()
            };
            d.daemon.tell(0, watch_event::Event::Load(load));
            let soon = tokio::time::sleep(Duration::from_millis(20));
            tokio::select! {
                record = &mut record => break record.actual.unwrap(),
                () = soon => {}
            }
        };
        assert_eq!(actual.failed_transfers, Some(fails));
    }
}

/// The counter does not say of which request it speaks.
#[tokio::test]
async fn of_two_transfers_at_once_nobody_says_which_was_given_up() {
    let (served, mut p, mut d) = pair(&policy(), NIXL).await;
    let replies = [0, 1].map(|_| served.post("Disaggregated", "/v1/completions", BODY));
    for _ in 0..2 {
        p.call()
            .await
            .answer(200, "application/json", prefill_answer().as_bytes())
            .await;
    }
    for call in [d.call().await, d.call().await] {
        call.answer(200, "application/json", ANSWER).await;
    }
    let mut runs = Vec::new();
    for reply in replies {
        runs.push(end(reply).await.run());
    }
    for load_sequence in 2..=3 {
        let load = wire::Load {
            load_sequence,
            failed_transfers: 1,
            ..wire::Load::default()
        };
        d.daemon.tell(0, watch_event::Event::Load(load));
    }
    for run in runs {
        let actual = served.record(&run).await.actual.unwrap();
        assert_eq!(actual.failed_transfers, None);
    }
}

#[tokio::test]
async fn a_transfer_that_failed_alone_speaks_against_its_own_link() {
    let mut card = samples::prefill_card("far");
    card.topology[0].domain = "h2".into();
    let mut far = Engine::start(card, NIXL).await;
    let mut near = Engine::start(samples::prefill_card("near"), NIXL).await;
    let mut d = Engine::start(samples::card("d"), NIXL).await;
    let served = Served::start(&policy(), &[&far, &near, &d]).await;
    let load = |load_sequence, failed_transfers, draining| {
        watch_event::Event::Load(wire::Load {
            load_sequence,
            failed_transfers,
            draining,
            ..wire::Load::default()
        })
    };
    // Over both links, one after the other.
    let reply = served.post("Disaggregated", "/v1/completions", BODY);
    let (call, by_far) = tokio::select! {
        call = far.call() => (call, true),
        call = near.call() => (call, false),
    };
    call.answer(200, "application/json", prefill_answer().as_bytes())
        .await;
    d.call().await.answer(200, "application/json", ANSWER).await;
    end(reply).await;
    for load_sequence in 2..=3 {
        d.daemon.tell(0, load(load_sequence, 0, false));
    }
    let (first, second) = if by_far {
        (&far, &mut near)
    } else {
        (&near, &mut far)
    };
    first.daemon.tell(0, load(2, 0, true));
    until("it takes no more", || {
        let view = served.router.workers.view();
        let mut loads = view.fleet.loads.iter();
        loads.any(|load| load.state == WorkerState::Draining)
    })
    .await;
    let reply = served.post("Disaggregated", "/v1/completions", BODY);
    let call = second.call().await;
    call.answer(200, "application/json", prefill_answer().as_bytes())
        .await;
    d.call().await.answer(200, "application/json", ANSWER).await;
    end(reply).await;
    let failures = u64::from(policy().topology.breaker.failures);
    d.daemon.tell(0, load(4, failures, false));
    let open = || {
        let now = served.router.workers.clock.now();
        served.router.learning.link_counts(now).open
    };
    until("a link is shut", || open() > 0).await;
    assert_eq!(open(), 1);
}
