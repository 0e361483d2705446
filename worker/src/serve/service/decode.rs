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

/// For the message that says what is wanted; it is on its way when the stream opens.
const FIRST_MESSAGE: Duration = Duration::from_secs(10);
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
    daemon
        .tracker
        .spawn(run(Arc::clone(daemon), start, incoming, Answers(answers)));
    Ok(ReceiverStream::new(outgoing).map(Ok))
}

/// Where answers go. One that cannot be sent is not missed: its reader has gone, and the task notices.
struct Answers(mpsc::Sender<DecodeEvent>);

impl Answers {
    /// Waits for a reader that is slow, but not when the run is cancelled.
    async fn send(&self, event: Event, cancelled: &CancellationToken) {
        let event = DecodeEvent { event: Some(event) };
        tokio::select! {
            biased;
            _ = self.0.send(event) => {}
            () = cancelled.cancelled() => {}
        }
    }

    /// The only one: there is a place for it.
    fn send_only(&self, event: Event) {
        let _ = self.0.try_send(DecodeEvent { event: Some(event) });
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
    let (events, engine) = mpsc::channel(EVENTS);
    let begun = match begin(&daemon, &start, &id, events).await {
        Ok(begun) => begun,
        Err(refused) => {
            answers.send_only(Event::Refused(messages::refused(&refused)));
            return;
        }
    };
    let Begun {
        admitted,
        registered,
    } = begun;
    let reserved = Event::Reserved(messages::admission(&admitted.admission));
    answers.send(reserved, registered.cancelled()).await;
    let task = Decoding {
        key: admitted.key,
        handoff: admitted
            .reservation
            .map(|reservation| Handoff::new(Arc::clone(&daemon), &start, reservation)),
        daemon: Arc::clone(&daemon),
        engine,
        incoming,
        answers,
        cancelled: registered.cancelled().clone(),
    };
    task.run().await;
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
    async fn run(mut self) {
        loop {
            let happened = tokio::select! {
                biased;
                () = self.cancelled.cancelled() => Happened::Cancelled,
                () = self.answers.0.closed() => Happened::ReaderGone,
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
                    if let Some(event) = messages::decode_message(event) {
                        self.answers.send(event, &self.cancelled).await;
                    }
                    !last
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
                return;
            }
        }
    }

    async fn obey(&mut self, step: Step) -> bool {
        let command = match step {
            Step::Answer(event) => {
                self.answers.send(event, &self.cancelled).await;
                return true;
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
            } => Command::Recompute {
                key: self.key,
                reservation,
                first_token,
            },
        };
        self.handoff = None;
        // An error says that the engine has stopped: its channel of events says so too.
        let _ = self.daemon.commands.send(command).await;
        true
    }

    async fn give_up(&mut self, event: Event) {
        self.handoff = None;
        self.daemon.commands.cancel(self.key).await;
        self.answers.send(event, &self.cancelled).await;
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
