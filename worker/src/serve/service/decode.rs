//! `Decode`: generates, after a prefill of its own or after KV from elsewhere.
//!
//! One task for each operation. It waits for four things at once: the engine's events, the router's messages and the transfer
//! (both in `handoff`), cancellation, and the end of whoever reads the answers. When it ends, nothing of the operation is left.

use std::sync::Arc;
use std::time::Duration;

use baton_protocol::card::Role;
use baton_protocol::failure::{FailureClass, Refusal};
use baton_protocol::ids::OperationId;
use baton_protocol::wire::{self, DecodeEvent, decode_event::Event, decode_request::Message};
use futures::{Stream, StreamExt as _};
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::{Status, Streaming};

use super::handoff::{Handoff, Step};
use crate::engine::{Admitted, EngineEvent, Refused, RequestKind};
use crate::serve::compute::{Command, EVENTS};
use crate::serve::daemon::Daemon;
use crate::serve::messages::{self, Dispatch};
use crate::serve::operations::Registered;
use crate::serve::traces::DecodeTrace;

/// For the message that says what is wanted; it is on its way when the stream opens.
const FIRST_MESSAGE: Duration = Duration::from_secs(10);
/// A reader that takes none of [`ANSWERS`] for this long has stopped: its sequence is cancelled and its KV freed. Longer than a
/// router's own patience with a slow client, so that the router, which knows more, gives up first.
const STALLED: Duration = Duration::from_secs(60);
/// Answers between this task and the connection. What waits beyond them waits in the engine's own channel, which is bounded.
const ANSWERS: usize = 64;

pub(super) async fn events(
    daemon: &Arc<Daemon>,
    mut incoming: Streaming<wire::DecodeRequest>,
) -> Result<impl Stream<Item = Result<DecodeEvent, Status>> + Send + use<>, Status> {
    let first = timeout(FIRST_MESSAGE, incoming.message())
        .await
        .map_err(|_| Status::deadline_exceeded("decode: no message came: send start first"))??;
    let Some(Message::Start(start)) = first.and_then(|first| first.message) else {
        return Err(Status::invalid_argument(
            "decode: the first message is not start: send start first",
        ));
    };
    let (answers, outgoing) = mpsc::channel(ANSWERS);
    let answers = Answers {
        sender: answers,
        patience: STALLED,
    };
    daemon
        .tracker
        .spawn(run(Arc::clone(daemon), start, incoming, answers));
    Ok(ReceiverStream::new(outgoing).map(Ok))
}

/// Where answers go.
struct Answers {
    sender: mpsc::Sender<DecodeEvent>,
    /// How long a reader may take none, [`STALLED`].
    patience: Duration,
}

/// Nobody reads the answers any more.
#[derive(Debug, PartialEq, Eq)]
struct ReaderGone;

impl Answers {
    /// Waits for a reader that is slow, but neither for ever nor when the run is cancelled. An answer that was not sent for that
    /// reason is not missed.
    async fn send(&self, event: Event, cancelled: &CancellationToken) -> Result<(), ReaderGone> {
        let event = DecodeEvent { event: Some(event) };
        tokio::select! {
            biased;
            sent = timeout(self.patience, self.sender.send(event)) => match sent {
                Ok(sent) => sent.map_err(|_| ReaderGone),
                Err(_) => {
                    tracing::warn!(
                        "operation cancelled: its reader took no answer for {} ms",
                        self.patience.as_millis()
                    );
                    Err(ReaderGone)
                }
            },
            () = cancelled.cancelled() => Ok(()),
        }
    }

    /// The only one: there is a place for it.
    fn send_only(&self, event: Event) {
        let _ = self.sender.try_send(DecodeEvent { event: Some(event) });
    }
}

async fn run(
    daemon: Arc<Daemon>,
    start: wire::DecodeStart,
    incoming: Streaming<wire::DecodeRequest>,
    answers: Answers,
) {
    let id = OperationId::from(
        start
            .operation
            .as_ref()
            .map_or("", |operation| operation.id.as_str()),
    );
    let mut trace = start
        .operation
        .as_ref()
        .and_then(|operation| daemon.traces.operation(operation))
        .map(|traced| DecodeTrace::new(traced, start.tokens.len(), daemon.traces.now()));
    let (events, engine) = mpsc::channel(EVENTS);
    let begun = match begin(&daemon, &start, &id, events).await {
        Ok(begun) => begun,
        Err(refused) => {
            let refused = Event::Refused(messages::refused(&refused));
            if let Some(mut trace) = trace {
                let now = daemon.traces.now();
                trace.reported(&refused, now);
                daemon.traces.put(trace.end(now));
            }
            answers.send_only(refused);
            return;
        }
    };
    let Begun {
        admitted,
        registered,
    } = begun;
    let reserved = Event::Reserved(messages::admission(&admitted.admission));
    // The first answer: there is a place for it.
    answers.send_only(reserved);
    let transfer_place = trace
        .as_ref()
        .map(|trace| trace.transfer_place().traceparent());
    let task = Decoding {
        trace: trace.take(),
        key: admitted.key,
        handoff: admitted.reservation.map(|reservation| {
            Handoff::new(Arc::clone(&daemon), &start, reservation, transfer_place)
        }),
        daemon: Arc::clone(&daemon),
        engine,
        incoming,
        answers,
        cancelled: registered.cancelled().clone(),
    };
    if let Some(trace) = task.run().await {
        daemon.traces.put(trace.end(daemon.traces.now()));
    }
    let lease = daemon.lease_duration;
    daemon
        .operations
        .retire_id(&id, daemon.pool.now().saturating_add(2 * lease));
    // The last thing: whoever waits for the end of the operation finds nothing of it.
    drop(registered);
}

struct Begun {
    admitted: Admitted,
    registered: Registered,
}

async fn begin(
    daemon: &Daemon,
    start: &wire::DecodeStart,
    id: &OperationId,
    events: mpsc::Sender<EngineEvent>,
) -> Result<Begun, Refused> {
    let operation = start.operation.clone().unwrap_or_default();
    daemon.admit(&operation, Role::Decode)?;
    let kind = if start.handoff {
        RequestKind::Receive
    } else {
        RequestKind::Generate
    };
    let dispatch = Dispatch {
        operation: &operation,
        tokens: start.tokens.clone(),
        generated: start.generated,
        sampling: start.sampling.as_ref(),
        stopping: start.stopping.as_ref(),
    };
    let request = messages::engine_request(dispatch, kind)?;
    if start.handoff && !start.first_token_by_prefill && start.tokens.len() < 2 {
        return Err(messages::invalid(
            "tokens: a prompt of one token has nothing to hand over: plan it locally".to_owned(),
        ));
    }
    if !daemon.operations.claim_id(id) {
        return Err(Refused {
            reason: Refusal::OperationEnded,
            message: format!(
                "operation {id}: it runs or has ended, and its tokens are not kept: use a new id"
            ),
            retry_after: 0,
        });
    }
    let registered = daemon.operations.register(&request.run, &request.operation);
    let admitted = daemon
        .commands
        .submit(request, events)
        .await
        .map_err(messages::stopped)
        .and_then(|answer| answer);
    match admitted {
        Ok(admitted) => Ok(Begun {
            admitted,
            registered,
        }),
        Err(refused) => {
            // Nothing was begun: the same id may be tried again.
            daemon.operations.release_id(id);
            Err(refused)
        }
    }
}

struct Decoding {
    /// Of an operation that its router traces.
    trace: Option<DecodeTrace>,
    daemon: Arc<Daemon>,
    key: crate::model::SequenceKey,
    engine: mpsc::Receiver<EngineEvent>,
    incoming: Streaming<wire::DecodeRequest>,
    /// Until the KV is the engine's.
    handoff: Option<Handoff>,
    answers: Answers,
    cancelled: CancellationToken,
}

enum Happened {
    Cancelled,
    ReaderGone,
    Engine(Option<EngineEvent>),
    Handoff(Step),
}

impl Decoding {
    async fn run(mut self) -> Option<DecodeTrace> {
        loop {
            let happened = tokio::select! {
                biased;
                () = self.cancelled.cancelled() => Happened::Cancelled,
                () = self.answers.sender.closed() => Happened::ReaderGone,
                step = step(&mut self.handoff, &mut self.incoming) => Happened::Handoff(step),
                event = self.engine.recv() => Happened::Engine(event),
            };
            let goes_on = match happened {
                Happened::Cancelled => {
                    self.give_up(Event::Finished(wire::Finished {
                        reason: wire::FinishReason::Cancelled.into(),
                        output_tokens: 0,
                        decode_milliseconds: 0.0,
                    }))
                    .await;
                    false
                }
                Happened::ReaderGone => {
                    self.daemon.commands.cancel(self.key).await;
                    false
                }
                Happened::Engine(Some(event)) => {
                    let last = event.is_last();
                    match messages::decode_message(event) {
                        Some(event) => self.answer(event).await && !last,
                        None => !last,
                    }
                }
                Happened::Engine(None) => {
                    self.give_up(Event::Failed(messages::failed(
                        FailureClass::DecodeLost,
                        "the engine has dropped the operation: it stops, or its answers were not read",
                    )))
                    .await;
                    false
                }
                Happened::Handoff(step) => self.obey(step).await,
            };
            if !goes_on {
                return self.trace;
            }
        }
    }

    async fn obey(&mut self, step: Step) -> bool {
        let command = match step {
            Step::Answer(event) => {
                if let (Some(trace), Some(handoff)) = (&mut self.trace, &self.handoff) {
                    trace.transfer_asked(handoff.asked());
                }
                return self.answer(event).await;
            }
            Step::Broken(message) => {
                self.give_up(Event::Failed(messages::failed(
                    FailureClass::ClientGone,
                    message,
                )))
                .await;
                return false;
            }
            Step::Attach {
                reservation,
                first_token,
            } => Command::Attach {
                key: self.key,
                reservation,
                first_token,
            },
            Step::Recompute {
                reservation,
                first_token,
                traceparent,
            } => {
                if let Some(trace) = &mut self.trace {
                    let traces = &self.daemon.traces;
                    trace.recomputes(traces.moved(&traceparent), traces.now());
                }
                Command::Recompute {
                    key: self.key,
                    reservation,
                    first_token,
                }
            }
        };
        self.handoff = None;
        // An error says that the engine has stopped: its channel of events says so too.
        let _ = self.daemon.commands.send(command).await;
        true
    }

    /// False when nobody reads: then nothing of the operation is left.
    async fn answer(&mut self, event: Event) -> bool {
        self.note(&event);
        if self.answers.send(event, &self.cancelled).await.is_ok() {
            return true;
        }
        self.handoff = None;
        self.daemon.commands.cancel(self.key).await;
        false
    }

    fn note(&mut self, event: &Event) {
        if let Some(trace) = &mut self.trace {
            trace.reported(event, self.daemon.traces.now());
        }
    }

    async fn give_up(&mut self, event: Event) {
        self.note(&event);
        self.handoff = None;
        self.daemon.commands.cancel(self.key).await;
        // It is over in either case.
        let _ = self.answers.send(event, &self.cancelled).await;
    }
}

async fn step(
    handoff: &mut Option<Handoff>,
    incoming: &mut Streaming<wire::DecodeRequest>,
) -> Step {
    match handoff {
        Some(handoff) => handoff.next(incoming).await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event() -> Event {
        Event::PrefillStarted(wire::Started {
            queue_milliseconds: 1.0,
        })
    }

    #[tokio::test]
    async fn a_reader_that_takes_nothing_is_given_up() {
        let (sender, mut reader) = mpsc::channel(1);
        let answers = Answers {
            sender,
            patience: Duration::from_millis(20),
        };
        let run = CancellationToken::new();
        assert_eq!(answers.send(event(), &run).await, Ok(()));
        assert_eq!(answers.send(event(), &run).await, Err(ReaderGone));
        // One that is merely slow gets the next as well.
        assert!(reader.recv().await.is_some());
        assert_eq!(answers.send(event(), &run).await, Ok(()));
        run.cancel();
        assert_eq!(
            answers.send(event(), &run).await,
            Ok(()),
            "nobody waits then"
        );
    }

    #[tokio::test]
    async fn a_reader_that_has_gone_is_known_at_once() {
        let (sender, reader) = mpsc::channel(1);
        let answers = Answers {
            sender,
            patience: Duration::from_secs(3600),
        };
        drop(reader);
        let run = CancellationToken::new();
        assert_eq!(answers.send(event(), &run).await, Err(ReaderGone));
    }
}
