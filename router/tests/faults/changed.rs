//! A worker that is no longer what its card said.

use baton_protocol::ids::Incarnation;
use baton_protocol::wire::{self, decode_event::Event};
use baton_router::run::{Mode, RunEvent};

use crate::double::{ARTIFACT, Double, Seen};
use crate::obedient::token;
use crate::router::{PROMPT, Router, outcome};
use crate::{policy, samples};

#[tokio::test]
async fn its_card_is_read_again_and_the_run_goes_on_with_what_it_says() {
    let mut d = Double::start(samples::card("d"), ARTIFACT).await;
    let router = Router::start(&policy(), &[&d]);
    router.ready(1).await;
    assert_eq!(d.until(|_| true).await, Seen::Watch(None));
    // Another process has taken its place, and its Watch stream has not broken yet.
    d.reborn(9);
    d.decode(async |_, answers| {
        let refused = wire::Refused {
            reason: "identity-mismatch".to_owned(),
            ..wire::Refused::default()
        };
        answers.send(Event::Refused(refused)).await;
    });
    d.obey();
    let handle = router.start_run(Mode::Aggregated, 6);
    let run = handle.run.to_string();
    let (tokens, last) = outcome(handle).await;
    assert!(matches!(last, RunEvent::Finished { .. }), "{last:?}");
    let whole: Vec<u32> = (PROMPT..PROMPT + 6).map(|at| token(at).id).collect();
    assert_eq!(tokens, whole);
    // From the card on, not from where the old stream was.
    let again = d.until(|seen| matches!(seen, Seen::Watch(_))).await;
    assert_eq!(again, Seen::Watch(None));
    let record = router.record(&run).await;
    // It was not asked before its card had been read.
    let attempts = record.states.last().unwrap().attempt;
    assert_eq!(attempts, 2, "{:?}", record.states);
    let second = record
        .states
        .iter()
        .find(|entry| entry.attempt == 2 && entry.worker.is_some());
    let incarnation = second.unwrap().incarnation;
    assert_eq!(incarnation, Some(Incarnation(9)), "{:?}", record.states);
    router.holds_nothing().await;
}
