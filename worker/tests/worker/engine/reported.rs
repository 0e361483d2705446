//! What an engine tells: of its load, of tokens that end a run, of blocks that others may read.

use baton_protocol::ids::LeaseId;
use baton_worker::engine::{Engine, EngineEvent, PrefillTerms, RequestKind};
use baton_worker::sampling::Finish;

use super::{alone, engine, request};

#[test]
fn load_counts_what_is_admitted_from_the_report_that_the_admission_names() {
    let mut engine = engine(64, 32);
    let first = engine.board().report(0.0, engine.pool(), false);
    assert_eq!(first.queued_tokens, 0);
    let admitted = engine.submit(request(0, 80, 10), 0.0).unwrap();
    assert_eq!(admitted.admission.load_sequence, first.load_sequence + 1);
    let second = engine.board().report(0.0, engine.pool(), false);
    assert_eq!(second.load_sequence, admitted.admission.load_sequence);
    assert_eq!((second.queued_tokens, second.queued_sequences), (80, 1));
    // A step shows while its time passes, modelled time too.
    engine.begin(1.0);
    let forwarded = engine.forward();
    engine.conclude(forwarded, 1.0);
    let during = engine.board().report(1.5, engine.pool(), false);
    assert_eq!(during.queued_tokens, 80);
    assert!(during.step_remaining_milliseconds > 0.0);
    engine.step_over();
    let third = engine.board().report(2.0, engine.pool(), false);
    assert_eq!(third.queued_tokens, 48);
    assert_eq!(third.step_remaining_milliseconds, 0.0);
    engine.step(2.0);
    engine.step(3.0);
    let decoding = engine.board().report(3.0, engine.pool(), false);
    assert_eq!((decoding.queued_tokens, decoding.running_sequences), (0, 1));
    assert_eq!(decoding.context_tokens, 81);
}

/// Whoever hands it on has to know: the worker that decodes may never come to say so.
#[test]
fn a_token_that_ends_the_run_says_so_wherever_it_is_computed() {
    let first = alone(request(0, 70, 10))[0].0;
    let here = RequestKind::Generate;
    let handed = RequestKind::Prefill(PrefillTerms {
        lease: LeaseId([3; 16]),
        lease_duration: 1000,
        skip_blocks: 0,
        sample_first: true,
    });
    for kind in [here, handed] {
        for (stop, expected) in [(first, Some(Finish::Stop)), (first + 1, None)] {
            let mut engine = engine(64, 32);
            let mut asked = request(0, 70, 10);
            asked.kind = kind.clone();
            asked.stopping.stop_token_ids = vec![stop];
            engine.submit(asked, 0.0).unwrap();
            let said = (0..4)
                .flat_map(|now| engine.step(f64::from(now)).events)
                .find_map(|(_, event)| match event {
                    EngineEvent::Token { finish, .. } => Some(finish),
                    _ => None,
                });
            assert_eq!(said, Some(expected), "{kind:?}");
        }
    }
}

#[test]
fn load_counts_what_waits_for_its_hand_off_until_it_has_ended() {
    let mut engine = engine(64, 32);
    let mut received = request(0, 80, 3);
    received.kind = RequestKind::Receive;
    let admitted = engine.submit(received, 0.0).unwrap();
    let seen = |engine: &Engine, now: f64| {
        let load = engine.board().report(now, engine.pool(), false);
        (load.running_sequences, load.context_tokens)
    };
    assert_eq!(seen(&engine, 0.0), (1, 80), "from its admission on");
    assert_eq!(seen(&engine, 1.0), (1, 80), "and as long as its KV is away");
    let reservation = admitted.reservation.unwrap();
    assert!(engine.attach(admitted.key, reservation, Some(5), 2.0));
    assert_eq!(seen(&engine, 2.0), (1, 81));
    engine.step(3.0);
    assert_eq!(seen(&engine, 3.0), (1, 82));
    engine.step(4.0);
    assert_eq!(seen(&engine, 5.0), (0, 0));
}

#[test]
fn a_prefill_publishes_as_it_goes_and_its_lease_outlives_it() {
    let mut engine = engine(64, 32);
    let mut prefill = request(0, 70, 10);
    prefill.kind = RequestKind::Prefill(PrefillTerms {
        lease: LeaseId([3; 16]),
        lease_duration: 1000,
        skip_blocks: 1,
        sample_first: true,
    });
    let expected = alone(request(0, 70, 10));
    engine.submit(prefill.clone(), 0.0).unwrap();
    let mut published = Vec::new();
    let mut first = None;
    let mut sealed = None;
    for now in 0..4 {
        for (_, event) in engine.step(f64::from(now)).events {
            match event {
                EngineEvent::BlocksPublished { blocks } => published.push(blocks),
                EngineEvent::Token { id, .. } => first = Some(id),
                EngineEvent::Sealed { blocks, .. } => sealed = Some(blocks),
                _ => {}
            }
        }
    }
    assert_eq!(published, [1, 3]);
    assert_eq!(first, Some(expected[0].0));
    assert_eq!(sealed, Some(4));
    assert_eq!(engine.operations(), 0);
    assert_eq!(engine.pool().counts().leased, 5);

    // One token moves nothing.
    prefill.stopping.max_tokens = 1;
    engine.submit(prefill, 10.0).unwrap();
    let events = engine.step(11.0).events;
    assert!(
        events
            .iter()
            .any(|(_, event)| matches!(event, EngineEvent::NoLease { .. }))
    );
    assert_eq!(engine.pool().lease_counts().total(), 1);
}
