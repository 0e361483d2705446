//! The engine alone, step by step: what a sequence generates does not depend on what happens around it.

mod reported;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use baton_placement::calibration::built_in;
use baton_protocol::failure::Refusal;
use baton_protocol::hash::HashKey;
use baton_worker::engine::scheduler::Limits;
use baton_worker::engine::{
    Engine, EngineConfig, EngineEvent, EngineRequest, Next, RequestKind, Stopwatch,
};
use baton_worker::kv::clock::ManualClock;
use baton_worker::kv::{CacheScope, Geometry, KvPool, PoolConfig};
use baton_worker::model::simulated::{Settings, Simulated};
use baton_worker::model::{Model, SequenceKey, tiny};
use baton_worker::sampling::{Finish, Logprobs, Sampling, Stopping};
use proptest::prelude::*;

use crate::harness::prompt_tokens;

const BLOCK: usize = 16;

fn engine(blocks: usize, max_batched_tokens: usize) -> Engine {
    engine_with(blocks, max_batched_tokens, Box::new(|| 0.0))
}

fn engine_with(blocks: usize, max_batched_tokens: usize, stopwatch: Stopwatch) -> Engine {
    engine_of(
        Box::new(tiny::model(7)),
        blocks,
        max_batched_tokens,
        stopwatch,
    )
}

fn engine_of(
    model: Box<dyn Model>,
    blocks: usize,
    max_batched_tokens: usize,
    stopwatch: Stopwatch,
) -> Engine {
    let config = PoolConfig {
        geometry: Geometry {
            block_size: BLOCK,
            bytes_per_token: model.facts().shape.kv_bytes_per_token(),
        },
        blocks,
        kv_identity: model.facts().identity(BLOCK).digest(),
        layout: model.facts().layout().tag(),
        hash_key: HashKey::from_bytes(&[1; 32]),
        event_capacity: PoolConfig::EVENT_CAPACITY,
    };
    let pool = KvPool::new(
        config,
        u64::MAX,
        std::sync::Arc::new(ManualClock::default()),
    )
    .unwrap();
    Engine::new(
        model,
        pool,
        EngineConfig {
            limits: Limits {
                max_sequences: 8,
                max_batched_tokens,
                max_waiting: 16,
            },
            max_context: 400,
            tpot_objective: Some(30.0),
            prior: built_in("h100-8b-tp1").unwrap(),
        },
        stopwatch,
    )
}

fn request(number: usize, prompt: usize, max_tokens: u32) -> EngineRequest {
    let seeded = number % 2 == 1;
    EngineRequest {
        run: format!("r{number}").into(),
        operation: format!("r{number}/1/decode").into(),
        priority: 0,
        deadline: None,
        scope: CacheScope::salted(""),
        // Every third one shares a prefix with another.
        tokens: prompt_tokens(&format!("prompt {}", number / 3), prompt),
        generated: 0,
        sampling: Sampling {
            temperature: if seeded { 1.0 } else { 0.0 },
            seed: number as u64,
            top_logprobs: Some(2),
            ..Sampling::greedy()
        },
        stopping: Stopping {
            max_tokens,
            min_tokens: 0,
            ignore_eos: true,
            stop_token_ids: Vec::new(),
        },
        kind: RequestKind::Generate,
    }
}

type Answer = Vec<(u32, Option<Logprobs>)>;

fn take(
    answers: &mut BTreeMap<SequenceKey, (Answer, bool)>,
    events: Vec<(SequenceKey, EngineEvent)>,
) {
    for (key, event) in events {
        let (answer, finished) = answers.entry(key).or_default();
        assert!(!*finished, "an event after the last one");
        match event {
            EngineEvent::Token {
                id,
                position,
                logprobs,
                ..
            } => {
                let _ = position;
                answer.push((id, logprobs));
            }
            EngineEvent::Finished { output_tokens, .. } => {
                assert_eq!(output_tokens as usize, answer.len());
                *finished = true;
            }
            EngineEvent::Failed { message, .. } => panic!("{message}"),
            _ => {}
        }
    }
}

fn alone(request: EngineRequest) -> Answer {
    let mut engine = engine(64, 2048);
    let key = engine.submit(request, 0.0).unwrap().key;
    let mut answers = BTreeMap::new();
    for now in 0.. {
        let outcome = engine.step(f64::from(now));
        take(&mut answers, outcome.events);
        if outcome.next == Next::Idle {
            break;
        }
    }
    answers.remove(&key).unwrap().0
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Eight requests in random order, chunks of any size, a pool too small for all, some cancelled: bit for bit as alone.
    #[test]
    fn the_batch_does_not_change_what_is_generated(
        shapes in prop::collection::vec((1usize..90, 1u32..40, 0usize..6), 8),
        chunk in 8usize..80,
        blocks in 10usize..40,
        cancelled in prop::collection::btree_set(0usize..8, 0..3),
    ) {
        let mut engine = engine(blocks, chunk);
        let mut answers = BTreeMap::new();
        let mut keys = Vec::new();
        let mut now = 0.0;
        for (number, (prompt, output, pause)) in shapes.iter().enumerate() {
            keys.push(engine.submit(request(number, *prompt, *output), now).unwrap().key);
            for _ in 0..*pause {
                now += 1.0;
                take(&mut answers, engine.step(now).events);
            }
            if cancelled.contains(&number) {
                engine.cancel(keys[number]);
            }
        }
        while engine.operations() > 0 {
            now += 1.0;
            prop_assert!(now < 20_000.0, "stuck: {engine:?}");
            take(&mut answers, engine.step(now).events);
        }
        for (number, (prompt, output, _)) in shapes.iter().enumerate() {
            let (answer, finished) = answers.remove(&keys[number]).unwrap_or_default();
            let expected = alone(request(number, *prompt, *output));
            if finished {
                prop_assert_eq!(&answer, &expected);
            } else {
                prop_assert!(cancelled.contains(&number));
                prop_assert_eq!(&answer[..], &expected[..answer.len()]);
            }
        }
        let counts = engine.pool().counts();
        prop_assert_eq!(counts.free + counts.cached, counts.total);
    }
}

#[test]
fn a_pool_too_small_for_all_preempts_and_nobody_fails() {
    let mut engine = engine(12, 64);
    let mut answers = BTreeMap::new();
    let keys: Vec<_> = (0..4)
        .map(|number| engine.submit(request(number, 40, 60), 0.0).unwrap().key)
        .collect();
    let mut now = 0.0;
    while engine.operations() > 0 {
        now += 1.0;
        assert!(now < 5_000.0, "stuck: {engine:?}");
        take(&mut answers, engine.step(now).events);
    }
    assert!(engine.counters().preemptions > 0);
    for (number, key) in keys.iter().enumerate() {
        assert_eq!(answers[key].0, alone(request(number, 40, 60)));
    }
}

#[test]
fn a_sequence_may_fill_the_whole_pool_and_ends_there() {
    let mut engine = engine(4, 64);
    assert_eq!(engine.max_context(), 4 * BLOCK);
    let too_long = engine.submit(request(0, 4 * BLOCK, 1), 0.0).unwrap_err();
    assert_eq!(too_long.reason, Refusal::TooLong);
    engine.submit(request(0, 4 * BLOCK - 5, 100), 0.0).unwrap();
    let mut finish = None;
    let mut tokens = 0;
    for now in 0..100 {
        for (_, event) in engine.step(f64::from(now)).events {
            match event {
                EngineEvent::Token { .. } => tokens += 1,
                EngineEvent::Finished { finish: why, .. } => finish = Some(why),
                _ => {}
            }
        }
    }
    assert_eq!((finish, tokens), (Some(Finish::Length), 5));
}

#[test]
fn requests_that_make_no_sense_are_refused_by_their_field() {
    let mut engine = engine(16, 64);
    type Change = fn(&mut EngineRequest);
    let cases: [(&str, Change); 5] = [
        ("topLogprobs: 257", |request| {
            request.sampling.top_logprobs = Some(257);
        }),
        ("tokens: empty", |request| request.tokens.clear()),
        ("tokens: id 70000", |request| request.tokens[0] = 70_000),
        ("maxTokens: 0", |request| request.stopping.max_tokens = 0),
        ("generated: 99", |request| request.generated = 99),
    ];
    for (message, change) in cases {
        let mut bad = request(0, 8, 4);
        change(&mut bad);
        let refused = engine.submit(bad, 0.0).unwrap_err();
        assert_eq!(refused.reason, Refusal::InvalidRequest);
        assert!(refused.message.starts_with(message), "{}", refused.message);
    }
    assert_eq!(engine.operations(), 0);
}

#[test]
fn a_first_token_beyond_the_vocabulary_ends_its_own_operation_only() {
    let mut engine = engine(16, 64);
    let other = engine.submit(request(0, 8, 4), 0.0).unwrap();
    for recomputed in [false, true] {
        let mut handed = request(2, 20, 4);
        handed.kind = RequestKind::Receive;
        let taken = engine.submit(handed, 0.0).unwrap();
        let reservation = taken.reservation.unwrap();
        let token = Some(70_000);
        if recomputed {
            engine.recompute(taken.key, Some(reservation), token, 0.0);
        } else {
            engine.attach(taken.key, reservation, token, 0.0);
        }
        let events = engine.step(0.0).events;
        let ended = events.iter().find(|(key, _)| *key == taken.key);
        let Some((_, EngineEvent::Failed { message, .. })) = ended else {
            panic!("{events:?}");
        };
        assert!(message.starts_with("firstToken: id 70000"), "{message}");
    }
    assert_eq!(engine.operations(), 1);
    while engine.step(0.0).next == Next::Again {}
    assert_eq!(engine.operations(), 0, "{other:?} ended as it should");
    assert_eq!(engine.pool().counts().active, 0);
}

#[test]
fn a_full_queue_and_a_full_pool_refuse_with_a_time_to_come_back() {
    let mut engine = engine(16, 64);
    for number in 0..16 {
        engine.submit(request(number, 8, 4), 0.0).unwrap();
    }
    let refused = engine.submit(request(99, 8, 4), 0.0).unwrap_err();
    assert_eq!(refused.reason, Refusal::QueueFull);
    assert!(refused.retry_after >= 50);
    let mut handed = request(98, 200, 4);
    handed.kind = RequestKind::Receive;
    let first = engine.submit(handed.clone(), 0.0).unwrap();
    handed.tokens[0] += 1;
    let refused = engine.submit(handed, 0.0).unwrap_err();
    assert_eq!(refused.reason, Refusal::PoolFull);
    drop(first);
}

#[test]
fn an_operation_ends_at_its_deadline_wherever_it_is() {
    let mut engine = engine(16, 64);
    let mut late = request(0, 30, 300);
    late.deadline = Some(5.0);
    let mut held = request(1, 30, 300);
    held.deadline = Some(5.0);
    held.kind = RequestKind::Receive;
    engine.submit(late, 0.0).unwrap();
    let held = engine.submit(held, 0.0).unwrap();
    engine.step(1.0);
    let outcome = engine.step(5.0);
    let failed = outcome
        .events
        .iter()
        .filter(|(_, event)| matches!(event, EngineEvent::Failed { message, .. } if message.contains("deadline")))
        .count();
    assert_eq!(failed, 2);
    assert_eq!(outcome.next, Next::Idle);
    drop(held.reservation);
    assert_eq!(engine.pool().counts().active, 0);
}

#[test]
fn one_that_is_cancelled_within_a_step_does_not_shift_the_others_results() {
    let alone = |number| {
        let mut engine = engine(64, 256);
        let key = engine.submit(request(number, 40, 4), 0.0).unwrap().key;
        tokens_of(&mut engine, key)
    };
    let mut engine = engine(64, 256);
    let keys: Vec<_> = (0..3)
        .map(|number| engine.submit(request(number * 3, 40, 4), 0.0).unwrap().key)
        .collect();
    engine.begin(0.0);
    assert!(engine.cancel(keys[0]));
    let mut tokens: BTreeMap<SequenceKey, Vec<u32>> = BTreeMap::new();
    let forwarded = engine.forward();
    let mut outcome = engine.conclude(forwarded, 0.0);
    engine.step_over();
    loop {
        for (key, event) in outcome.events {
            if let EngineEvent::Token { id, .. } = event {
                tokens.entry(key).or_default().push(id);
            }
        }
        if outcome.next != Next::Again {
            break;
        }
        outcome = engine.step(1.0);
    }
    assert_eq!(tokens.get(&keys[0]), None);
    assert_eq!(tokens[&keys[1]], alone(3));
    assert_eq!(tokens[&keys[2]], alone(6));
}

fn tokens_of(engine: &mut Engine, of: SequenceKey) -> Vec<u32> {
    let mut tokens = Vec::new();
    loop {
        let outcome = engine.step(1.0);
        for (key, event) in outcome.events {
            if let (true, EngineEvent::Token { id, .. }) = (key == of, event) {
                tokens.push(id);
            }
        }
        if outcome.next != Next::Again {
            return tokens;
        }
    }
}

#[test]
fn nothing_of_a_modelled_step_shows_before_its_time_has_passed() {
    let settings = Settings::new(built_in("h100-8b-tp1").unwrap(), 1);
    let mut engine = engine_of(
        Box::new(Simulated::new(settings).unwrap()),
        64,
        2048,
        Box::new(|| 0.0),
    );
    let request = request(0, 80, 10);
    let (tokens, scope) = (request.tokens.clone(), request.scope.clone());
    let pool = engine.pool().clone();
    let computed = || pool.cached_tokens(&tokens, &scope);
    engine.submit(request, 0.0).unwrap();
    engine.begin(0.0);
    let forwarded = engine.forward();
    assert_eq!(computed(), 0, "its blocks could be read already");
    let modelled = forwarded.modelled();
    assert!(
        modelled.is_some_and(|modelled| modelled > 1.0),
        "{modelled:?} ms"
    );
    engine.conclude(forwarded, 0.0);
    assert!(computed() >= 64);
}

#[test]
fn coefficients_follow_the_steps_that_were_computed() {
    // Every step takes two milliseconds by this watch, whatever it computes.
    let watch = AtomicU64::new(0);
    let mut engine = engine_with(
        64,
        64,
        Box::new(move || watch.fetch_add(2, Ordering::Relaxed) as f64),
    );
    for number in 0..6 {
        engine.submit(request(number, 60, 30), 0.0).unwrap();
    }
    while engine.operations() > 0 {
        engine.step(0.0);
    }
    let learnt = engine.coefficients();
    assert!(learnt.samples.total() > 20, "{learnt:?}");
    let step = learnt.d0 + learnt.d1 * 6.0 + learnt.d2 * 6.0 * 75.0;
    assert!((step - 2.0).abs() < 0.2, "{step} {learnt:?}");
}
