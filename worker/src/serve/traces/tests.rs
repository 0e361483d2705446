//! Operations as they report themselves, and the spans that come of it.

use baton_protocol::wire::{self, decode_event, prefill_event};
use baton_telemetry::span::Value;

use super::*;

fn traced() -> Traced {
    Traced {
        parent: TraceContext::root(None, "r0-1", true),
        run: "r0-1".to_owned(),
        attempt: 1,
        operation: "r0-1/1/decode".to_owned(),
        worker: "d0".to_owned(),
        incarnation: "01".to_owned(),
    }
}

fn started() -> wire::Started {
    wire::Started {
        queue_milliseconds: 1.5,
    }
}

fn token() -> wire::Token {
    wire::Token {
        id: 7,
        position: 9,
        logprobs: None,
        finish: None,
    }
}

fn finished(reason: wire::FinishReason) -> decode_event::Event {
    decode_event::Event::Finished(wire::Finished {
        reason: reason.into(),
        output_tokens: 2,
        decode_milliseconds: 3.0,
    })
}

fn prefilled() -> decode_event::Event {
    decode_event::Event::PrefillCompleted(wire::PrefillDone {
        queue_milliseconds: 1.5,
        compute_milliseconds: 4.0,
        cached_tokens: 16,
    })
}

fn transfer_started() -> decode_event::Event {
    decode_event::Event::TransferStarted(wire::TransferStarted {
        transport: "Tcp".to_owned(),
        generation: 5,
    })
}

/// Name, begin and end of each span, in their order.
fn shown(spans: &[Span]) -> Vec<(&'static str, u64, u64)> {
    let spans = spans.iter();
    spans
        .map(|span| (span.name, span.begin, span.end))
        .collect()
}

fn decode(events: &[(decode_event::Event, u64)], end: u64) -> Vec<Span> {
    let mut trace = DecodeTrace::new(traced(), 10, 100);
    for (event, at) in events {
        trace.reported(event, *at);
    }
    trace.end(end)
}

#[test]
fn a_local_operation_has_its_prefill_and_its_decode() {
    use decode_event::Event;
    let spans = decode(
        &[
            (Event::Reserved(wire::Admission::default()), 110),
            (Event::PrefillStarted(started()), 120),
            (prefilled(), 200),
            (Event::DecodeStarted(started()), 205),
            (Event::Token(token()), 210),
            (Event::Token(token()), 220),
            (finished(wire::FinishReason::Length), 230),
        ],
        240,
    );
    assert_eq!(
        shown(&spans),
        [("prefill", 100, 200), ("decode", 205, 230)],
        "what waits for its first step is part of it"
    );
    let parent = traced().parent;
    for span in &spans {
        assert_eq!(span.parent, Some(parent.span));
        assert!(span.parent_is_remote && span.error.is_none());
        assert_eq!(span.attributes.get("baton.run"), Some(&"r0-1".into()));
    }
    let decode = &spans[1].attributes;
    assert_eq!(decode.get("baton.tokens"), Some(&Value::Integer(2)));
    assert_eq!(
        decode.get("gen_ai.response.finish_reasons"),
        Some(&Value::Texts(vec!["length".to_owned()]))
    );
    let prefill = &spans[0].attributes;
    assert_eq!(prefill.get("baton.cached_tokens"), Some(&16_u32.into()));
}

#[test]
fn a_transfer_begins_when_it_was_asked_for() {
    use decode_event::Event;
    let mut trace = DecodeTrace::new(traced(), 10, 100);
    let place = trace.transfer_place();
    trace.transfer_asked(Some(130));
    trace.reported(&transfer_started(), 140);
    let done = Event::TransferCompleted(wire::TransferCompleted {
        bytes: 4096,
        blocks: 2,
        transport: "Tcp".to_owned(),
        total_milliseconds: 0.02,
        exposed_milliseconds: 0.01,
        synchronization_milliseconds: 0.005,
        retries: 1,
        left: Vec::new(),
    });
    trace.reported(&done, 170);
    trace.reported(&Event::DecodeStarted(started()), 180);
    trace.reported(&finished(wire::FinishReason::Stop), 190);
    let spans = trace.end(200);
    assert_eq!(
        shown(&spans),
        [("transfer", 130, 170), ("decode", 180, 190)]
    );
    assert_eq!(spans[0].id, place.span, "the source was told this place");
    assert_eq!(spans[0].kind, Kind::Client);
    let transfer = &spans[0].attributes;
    assert_eq!(transfer.get("baton.bytes"), Some(&4096_u64.into()));
    assert_eq!(transfer.get("baton.generation"), Some(&5_u64.into()));
}

#[test]
fn what_is_computed_after_a_failed_hand_off_hangs_under_the_next_attempt() {
    use decode_event::Event;
    let mut trace = DecodeTrace::new(traced(), 10, 100);
    trace.transfer_asked(Some(110));
    trace.reported(&transfer_started(), 120);
    let failed = Event::TransferFailed(wire::TransferFailed {
        cause: "checksum-mismatch".to_owned(),
        message: "block 1".to_owned(),
        verified_blocks: 1,
        left: Vec::new(),
    });
    trace.reported(&failed, 150);
    let next = traced().parent.child("decode", "2");
    trace.recomputes(Some(next), 160);
    trace.reported(&Event::PrefillStarted(started()), 170);
    trace.reported(&prefilled(), 200);
    trace.reported(&Event::DecodeStarted(started()), 201);
    trace.reported(&finished(wire::FinishReason::Stop), 220);
    let spans = trace.end(230);
    assert_eq!(
        shown(&spans),
        [
            ("transfer", 110, 150),
            ("prefill", 160, 200),
            ("decode", 201, 220)
        ]
    );
    assert_eq!(spans[0].error.as_deref(), Some("block 1"));
    assert_eq!(
        spans[0].attributes.get("error.type"),
        Some(&"checksum-mismatch".into())
    );
    assert_eq!(spans[0].parent, Some(traced().parent.span));
    for span in &spans[1..] {
        assert_eq!(span.parent, Some(next.span));
        assert_eq!(span.attributes.get("baton.attempt"), Some(&2_u32.into()));
    }
}

#[test]
fn what_is_open_at_the_end_was_cancelled() {
    use decode_event::Event;
    let cut = [
        (vec![(Event::PrefillStarted(started()), 120)], "prefill"),
        (vec![(transfer_started(), 120)], "transfer"),
        (vec![(Event::DecodeStarted(started()), 120)], "decode"),
    ];
    for (events, open) in cut {
        let spans = decode(&events, 150);
        assert_eq!(spans.len(), 1);
        assert_eq!((spans[0].name, spans[0].end), (open, 150));
        assert!(spans[0].error.is_none());
        assert_eq!(
            spans[0].attributes.get("baton.status"),
            Some(&"Cancelled".into())
        );
    }
    assert!(decode(&[], 150).is_empty(), "nothing was begun");
}

#[test]
fn a_failure_is_said_once_where_it_happened() {
    use decode_event::Event;
    let failed = Event::Failed(wire::Failed {
        class: "decode-lost".to_owned(),
        message: "out of memory".to_owned(),
    });
    let spans = decode(
        &[(Event::DecodeStarted(started()), 120), (failed, 140)],
        150,
    );
    assert_eq!(shown(&spans), [("decode", 120, 140)]);
    assert_eq!(spans[0].error.as_deref(), Some("out of memory"));
    let refused = Event::Refused(wire::Refused {
        reason: "queue-full".to_owned(),
        message: "8 wait".to_owned(),
        retry_after_milliseconds: 10,
    });
    let spans = decode(&[(refused, 101)], 102);
    assert_eq!(
        spans[0].attributes.get("error.type"),
        Some(&"queue-full".into())
    );
}

#[test]
fn a_prefill_for_others_lasts_from_its_admission_to_its_seal() {
    use prefill_event::Event;
    let mut trace = PrefillTrace::new(traced(), 10, 100);
    let events = [
        (Event::Lease(wire::LeaseOpened::default()), 101),
        (Event::Started(started()), 102),
        (Event::Published(wire::BlocksPublished { blocks: 1 }), 110),
        (Event::FirstToken(token()), 120),
    ];
    for (event, at) in &events {
        assert_eq!(trace.reported(event, *at), None);
    }
    let sealed = Event::Sealed(wire::Sealed {
        blocks: 3,
        queue_milliseconds: 1.0,
        compute_milliseconds: 5.0,
        cached_tokens: 0,
    });
    let span = trace.reported(&sealed, 130).unwrap();
    assert_eq!((span.name, span.begin, span.end), ("prefill", 100, 130));
    let names: Vec<&str> = span.events.iter().map(|event| &*event.name).collect();
    assert_eq!(
        names,
        [
            "lease_opened",
            "prefill_started",
            "first_token",
            "kv_published"
        ]
    );
    assert_eq!(span.attributes.get("baton.blocks"), Some(&3_u32.into()));
    assert!(span.error.is_none());
}

#[test]
fn a_prefill_that_was_cancelled_is_nobody_s_fault() {
    use prefill_event::Event;
    for (class, fault) in [("client-gone", false), ("prefill-lost", true)] {
        let mut trace = PrefillTrace::new(traced(), 10, 100);
        let failed = Event::Failed(wire::Failed {
            class: class.to_owned(),
            message: "why".to_owned(),
        });
        let span = trace.reported(&failed, 130).unwrap();
        assert_eq!(span.error.is_some(), fault, "{class}");
    }
}
