//! A router dies with runs under way, and another one of the same name comes after it.

use baton_protocol::wire::{
    decode_event::Event, decode_request::Message, prefill_event::Event as Report,
};
use baton_protocol::{lifecycle::State, wire};
use baton_router::run::{Mode, RunEvent};
use tokio::runtime::Runtime;

use crate::double::{ARTIFACT, Double, Seen};
use crate::obedient::{lease, token};
use crate::router::{PROMPT, Router, outcome};
use crate::{policy, samples};

fn second(card: baton_protocol::card::Card) -> baton_protocol::card::Card {
    baton_protocol::card::Card {
        incarnation: baton_protocol::ids::Incarnation(2),
        ..card
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_router_that_comes_after_a_dead_one_takes_nothing_over() {
    let mut p = Double::start(second(samples::prefill_card("p")), ARTIFACT).await;
    let mut d = Double::start(samples::card("d"), ARTIFACT).await;
    let (mut prefills, mut decodes) = (p.direct(), d.direct());

    // A process of its own, as far as its tasks and connections go.
    let process = Runtime::new().unwrap();
    let guard = process.enter();
    let dying = Router::start(&policy(), &[&p, &d]);
    drop(guard);
    dying.ready(2).await;
    let guard = process.enter();
    let mut client = dying.start_run(Mode::Disaggregated, 6);
    drop(guard);
    let first_run = client.run.to_string();
    let mut decode = decodes.decodes.recv().await.unwrap();
    let start = decode.requests.message().await.unwrap().unwrap().message;
    decode
        .answers
        .send(Event::Reserved(wire::Admission::default()))
        .await;
    let prefill = prefills.prefills.recv().await.unwrap();
    for report in [
        lease(),
        Report::Started(wire::Started::default()),
        Report::FirstToken(token(PROMPT)),
        Report::Sealed(wire::Sealed::default()),
    ] {
        prefill.events.send(report).await;
    }
    dying.entered(State::KvPublished, 1).await;
    assert!(matches!(client.next().await, Some(RunEvent::Token { .. })));

    // It dies with the lease out. Nobody says goodbye: the streams are what workers have to notice.
    process.shutdown_background();
    decode.answers.closed().await;

    p.obey();
    d.obey();
    let router = Router::start(&policy(), &[&p, &d]);
    router.ready(2).await;
    // What the dead one's worker still says reaches nobody.
    decode.answers.send(Event::Token(token(PROMPT + 1))).await;
    let handle = router.start_run(Mode::Disaggregated, 6);
    let run = handle.run.to_string();
    assert_ne!(run, first_run);
    let (tokens, last) = outcome(handle).await;
    assert!(matches!(last, RunEvent::Finished { .. }), "{last:?}");
    let whole: Vec<u32> = (PROMPT..PROMPT + 6).map(|at| token(at).id).collect();
    assert_eq!(tokens, whole);
    let Some(Message::Start(start)) = start else {
        panic!("start comes first, not {start:?}");
    };
    let old = start.operation.unwrap().id;
    assert!(
        old.starts_with(&first_run) && !old.starts_with(&run),
        "{old}"
    );
    // It cancels nothing that it does not know.
    router.holds_nothing().await;
    let mut prefills = Vec::new();
    for worker in [&mut p, &mut d] {
        while let Ok(seen) = worker.seen.try_recv() {
            let strange = match &seen {
                Seen::Cancel(cancelled) => *cancelled != run,
                Seen::CancelOperation(operation) => !operation.starts_with(&run),
                _ => false,
            };
            assert!(!strange, "{seen:?}");
            if let Seen::Prefill(request) = seen {
                prefills.push(request.operation.unwrap().run);
            }
        }
    }
    // What was looked at is all that both were asked: the dead router's run, then the other's.
    assert_eq!(prefills, [first_run, run]);
    assert!(
        router
            .metrics
            .text()
            .unwrap()
            .contains("baton_illegal_events_total 0")
    );
}
