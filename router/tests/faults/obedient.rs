//! How a good worker serves: whatever is asked for, with tokens that say where they stand.

use baton_protocol::wire::{
    self, decode_event::Event, decode_request::Message, prefill_event::Event as Report,
};
use tonic::Streaming;

use crate::double::{Answers, Reports};

/// The token of a position: so any worker goes on as the one before would have.
pub(crate) fn token(position: u32) -> wire::Token {
    wire::Token {
        id: 1_000 + position,
        position,
        logprobs: None,
        finish: None,
    }
}

pub(crate) fn finished(reason: wire::FinishReason) -> Event {
    Event::Finished(wire::Finished {
        reason: reason.into(),
        ..wire::Finished::default()
    })
}

/// What a prefill reports before it has computed anything.
pub(crate) fn lease() -> Report {
    Report::Lease(wire::LeaseOpened {
        descriptor: Some(wire::Descriptor {
            lease: vec![7; 16].into(),
            generation: 9,
            ..wire::Descriptor::default()
        }),
        admission: Some(wire::Admission::default()),
    })
}

pub(crate) async fn prefill(request: wire::PrefillRequest, reports: Reports) {
    reports.send(lease()).await;
    reports
        .send(Report::Started(wire::Started::default()))
        .await;
    if request.sample_first {
        let position = u32::try_from(request.tokens.len()).unwrap();
        reports.send(Report::FirstToken(token(position))).await;
    }
    let sealed = wire::Sealed {
        blocks: 3,
        ..wire::Sealed::default()
    };
    reports.send(Report::Sealed(sealed)).await;
}

pub(crate) async fn decode(mut requests: Streaming<wire::DecodeRequest>, answers: Answers) {
    let first = requests.message().await.unwrap().unwrap().message;
    let Some(Message::Start(start)) = first else {
        panic!("start comes first, not {first:?}");
    };
    let here = u32::try_from(start.tokens.len()).unwrap();
    let end = here - start.generated + start.stopping.as_ref().unwrap().max_tokens;
    answers
        .send(Event::Reserved(wire::Admission::default()))
        .await;
    if !start.handoff {
        compute(&answers).await;
        return generate(&answers, here, end).await;
    }
    let (mut described, mut next) = (false, here);
    while !described || (start.first_token_by_prefill && next == here) {
        match requests.message().await {
            Ok(Some(message)) => match message.message.unwrap() {
                Message::Descriptor(_) => described = true,
                Message::FirstToken(first) => next = first.position + 1,
                other => panic!("not {other:?} now"),
            },
            _ => return,
        }
    }
    transfer(&answers).await;
    generate(&answers, next, end).await;
}

/// A prompt that is computed here.
pub(crate) async fn compute(answers: &Answers) {
    answers
        .send(Event::PrefillStarted(wire::Started::default()))
        .await;
    answers
        .send(Event::PrefillCompleted(wire::PrefillDone::default()))
        .await;
}

/// KV that comes from elsewhere.
pub(crate) async fn transfer(answers: &Answers) {
    for event in [transfer_started(), transfer_completed()] {
        answers.send(event).await;
    }
}

pub(crate) fn transfer_started() -> Event {
    Event::TransferStarted(wire::TransferStarted {
        transport: "Tcp".to_owned(),
        generation: 9,
    })
}

pub(crate) fn transfer_completed() -> Event {
    Event::TransferCompleted(wire::TransferCompleted {
        bytes: 1 << 20,
        blocks: 3,
        transport: "Tcp".to_owned(),
        ..wire::TransferCompleted::default()
    })
}

/// Tokens from one position up to another, and the end.
pub(crate) async fn generate(answers: &Answers, from: u32, to: u32) {
    answers
        .send(Event::DecodeStarted(wire::Started::default()))
        .await;
    for position in from..to {
        answers.send(Event::Token(token(position))).await;
    }
    answers.send(finished(wire::FinishReason::Length)).await;
}

/// Goes on by computing what was to be handed over, when the router says so.
pub(crate) async fn recompute(
    mut requests: Streaming<wire::DecodeRequest>,
    answers: Answers,
    from: u32,
    to: u32,
) {
    while let Ok(Some(request)) = requests.message().await {
        if matches!(request.message, Some(Message::Recompute(_))) {
            compute(&answers).await;
            return generate(&answers, from, to).await;
        }
    }
}
