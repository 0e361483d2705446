//! What the record says of the transport: planned, taken, and why another one was taken.

use baton_placement::record::TransportLeft;
use baton_protocol::card::TransportOffer;
use baton_protocol::wire::{self, decode_event::Event, prefill_event::Event as Report};
use baton_router::run::{Mode, RunEvent};

use crate::double::{ARTIFACT, Double};
use crate::obedient::{generate, lease, token, transfer_started};
use crate::router::{PROMPT, Router, outcome};
use crate::{samples, start, with_incarnation};

/// A worker that offers both ways on one host.
fn sharing(mut card: baton_protocol::card::Card, incarnation: u64) -> baton_protocol::card::Card {
    card.transports = [("Shm", "here/p"), ("Tcp", "127.0.0.1:1")]
        .map(|(kind, address)| TransportOffer {
            kind: kind.to_owned(),
            address: address.to_owned(),
        })
        .to_vec();
    with_incarnation(card, incarnation)
}

#[tokio::test]
async fn the_record_has_the_planned_one_the_taken_one_and_the_reason_between_them() {
    let p = Double::start(sharing(samples::prefill_card("p"), 2), ARTIFACT).await;
    let d = Double::start(sharing(samples::card("d"), 1), ARTIFACT).await;
    let mut policy = crate::policy();
    policy.transports = ["Shm", "Tcp"].map(str::to_owned).to_vec();
    let router = Router::start(&policy, &[&p, &d]);
    router.ready(2).await;
    p.prefill(vec![
        lease(),
        Report::Started(wire::Started::default()),
        Report::FirstToken(token(PROMPT)),
        Report::Sealed(wire::Sealed::default()),
    ]);
    d.decode(async |mut requests, answers| {
        assert_eq!(start(&mut requests).await.transports, ["Shm", "Tcp"]);
        answers
            .send(Event::Reserved(wire::Admission::default()))
            .await;
        // The descriptor and the first token.
        for _ in 0..2 {
            requests.message().await.unwrap().unwrap();
        }
        // It begins on one way and goes on over the other: it has begun once.
        answers
            .send(Event::TransferStarted(wire::TransferStarted {
                transport: "Shm".to_owned(),
                generation: 9,
            }))
            .await;
        answers.send(transfer_started()).await;
        let left = wire::TransportLeft {
            from: "Shm".to_owned(),
            to: "Tcp".to_owned(),
            cause: "credentials".to_owned(),
        };
        answers
            .send(Event::TransferCompleted(wire::TransferCompleted {
                bytes: 1 << 20,
                blocks: 3,
                transport: "Tcp".to_owned(),
                left: vec![left],
                ..wire::TransferCompleted::default()
            }))
            .await;
        generate(&answers, PROMPT + 1, PROMPT + 4).await;
    });
    let handle = router.start_run(Mode::Disaggregated, 4);
    let run = handle.run.to_string();
    let (_, last) = outcome(handle).await;
    assert!(matches!(last, RunEvent::Finished { .. }), "{last:?}");
    let record = router.record(&run).await;
    let actual = record.actual.unwrap();
    assert_eq!(actual.planned_transport.as_deref(), Some("Shm"));
    assert_eq!(actual.transport.as_deref(), Some("Tcp"));
    let left = TransportLeft {
        from: "Shm".to_owned(),
        to: "Tcp".to_owned(),
        cause: "credentials".to_owned(),
    };
    assert_eq!(actual.transports_left, [left]);
    let states = record.states.iter();
    let begun = states.filter(|entry| entry.state == "kv_transfer_started");
    assert_eq!(begun.count(), 1);
    let metrics = router.metrics.text().unwrap();
    assert!(metrics.contains("baton_illegal_events_total 0\n"));
    router.holds_nothing().await;
}
