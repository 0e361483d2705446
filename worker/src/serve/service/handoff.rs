//! The decode side of a hand-off: from a descriptor to KV that is proven, or to its recomputation.

use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;

use async_stream::stream;
use baton_protocol::failure::HandoffFailure;
use baton_protocol::ids::{Generation, Incarnation, OperationId, TransferId};
use baton_protocol::wire::{
    self, ChecksumMode as WireChecksum, decode_event::Event, decode_request::Message,
};
use futures::{Stream, StreamExt as _};
use parking_lot::Mutex;
use tokio::sync::oneshot;
use tonic::{Status, Streaming};

use crate::kv::Reservation;
use crate::kv::intake::descriptor::{Own, accept};
use crate::kv::intake::verify::ChecksumMode;
use crate::kv::intake::{self, IntakeFailed, IntakeOptions, Received};
use crate::kv::lease::Reader;
use crate::serve::daemon::Daemon;
use crate::transport::choice::Left;

/// A transfer whose router sets no limit.
const TRANSFER: Duration = Duration::from_secs(60);
/// Broken connections and calls that are tried again: with the pause between them, longer than a network's hiccup.
const RETRIES: u32 = 3;

/// What the operation's task is to do.
pub(super) enum Step {
    Answer(Event),
    Attach {
        reservation: Reservation,
        first_token: Option<u32>,
    },
    Recompute {
        reservation: Option<Reservation>,
        first_token: Option<u32>,
        /// Where its spans hang.
        traceparent: String,
    },
    /// Nothing can come any more.
    Broken(String),
}

/// One hand-off on its way.
pub(super) struct Handoff {
    daemon: Arc<Daemon>,
    operation: OperationId,
    /// Of the whole prompt.
    prompt_tokens: usize,
    /// Whose KV is handed over: all of them, or all but the last where that is computed here.
    tokens: Arc<[u32]>,
    first_token_by_prefill: bool,
    /// The run ends with the token that the prefill worker samples: nothing is handed over, and no descriptor comes.
    ends_with_first: bool,
    transports: Vec<String>,
    checksum: WireChecksum,
    timeout: Duration,
    first_token: Option<u32>,
    /// Transports that turned out to be closed to this pair.
    left: Arc<Mutex<Vec<wire::TransportLeft>>>,
    /// Span of the transfer; empty where nothing is traced.
    transfer_place: String,
    /// When the descriptor came, for the span of the transfer: microseconds since the Unix epoch.
    asked: Option<u64>,
    kv: Kv,
    /// The router may still send.
    listening: bool,
}

enum Kv {
    Waiting(Reservation),
    Taking(Taking),
    /// Proven; the first token is missing.
    Ready(Reservation),
    /// Not proven: the router decides.
    Failed(Reservation),
    Over,
}

type Taking = Pin<Box<dyn Stream<Item = Progress> + Send>>;

enum Progress {
    Granted {
        transport: &'static str,
        generation: Generation,
    },
    Done(Box<(Reservation, Result<Received, IntakeFailed>)>),
}

impl Handoff {
    pub(super) fn new(
        daemon: Arc<Daemon>,
        start: &wire::DecodeStart,
        reservation: Reservation,
        transfer_place: Option<String>,
    ) -> Self {
        let mut tokens = start.tokens.clone();
        if !start.first_token_by_prefill {
            tokens.pop();
        }
        let operation = start.operation.as_ref();
        Self {
            operation: OperationId::from(operation.map_or("", |operation| operation.id.as_str())),
            prompt_tokens: start.tokens.len(),
            tokens: tokens.into(),
            first_token_by_prefill: start.first_token_by_prefill,
            ends_with_first: start.first_token_by_prefill && is_last(start),
            transports: start.transports.clone(),
            checksum: start.checksum(),
            timeout: match start.transfer_timeout_milliseconds {
                0 => TRANSFER,
                milliseconds => Duration::from_millis(milliseconds),
            },
            first_token: None,
            left: Arc::default(),
            transfer_place: transfer_place.unwrap_or_default(),
            asked: None,
            kv: Kv::Waiting(reservation),
            listening: true,
            daemon,
        }
    }

    /// The next thing to do. May be dropped and called again: nothing is lost.
    pub(super) async fn next(&mut self, incoming: &mut Streaming<wire::DecodeRequest>) -> Step {
        loop {
            // First: the first token may have come before the KV, whose arrival was the last step.
            if let Some(step) = self.settled() {
                return step;
            }
            let step = tokio::select! {
                biased;
                progress = progress(&mut self.kv) => self.progressed(progress),
                message = incoming.message(), if self.listening => self.heard(message),
            };
            if let Some(step) = step {
                return step;
            }
        }
    }

    pub(super) fn asked(&self) -> Option<u64> {
        self.asked
    }

    /// What follows from where it stands.
    fn settled(&mut self) -> Option<Step> {
        let complete = !self.first_token_by_prefill || self.first_token.is_some();
        match std::mem::replace(&mut self.kv, Kv::Over) {
            Kv::Ready(reservation) if complete => {
                return Some(Step::Attach {
                    reservation,
                    first_token: self.first_token,
                });
            }
            // The engine ends the operation with it, and reads nothing.
            Kv::Waiting(reservation) if complete && self.ends_with_first => {
                return Some(Step::Attach {
                    reservation,
                    first_token: self.first_token,
                });
            }
            kv => self.kv = kv,
        }
        let waits_for_router = matches!(self.kv, Kv::Waiting(_) | Kv::Ready(_) | Kv::Failed(_));
        (waits_for_router && !self.listening).then(|| {
            Step::Broken(
                "decode: the request half was closed before the hand-off was complete: keep it open, or plan locally"
                    .to_owned(),
            )
        })
    }

    fn progressed(&mut self, progress: Progress) -> Option<Step> {
        match progress {
            Progress::Granted {
                transport,
                generation,
            } => Some(Step::Answer(Event::TransferStarted(
                wire::TransferStarted {
                    transport: transport.to_owned(),
                    generation: generation.0,
                },
            ))),
            Progress::Done(done) => {
                let (reservation, result) = *done;
                Some(match result {
                    Ok(received) => {
                        self.kv = Kv::Ready(reservation);
                        let left = std::mem::take(&mut *self.left.lock());
                        Step::Answer(Event::TransferCompleted(completed(&received, left)))
                    }
                    Err(failed) => self.failed(
                        reservation,
                        failed.cause,
                        failed.message,
                        failed.verified_blocks,
                    ),
                })
            }
        }
    }

    fn failed(
        &mut self,
        reservation: Reservation,
        cause: HandoffFailure,
        message: String,
        verified_blocks: u32,
    ) -> Step {
        tracing::warn!(operation = %self.operation, %cause, %message, "hand-off failed: nothing of it is used");
        self.daemon.metrics.handoff_failed(cause);
        self.kv = Kv::Failed(reservation);
        Step::Answer(Event::TransferFailed(wire::TransferFailed {
            cause: cause.word().to_owned(),
            message,
            verified_blocks,
            left: std::mem::take(&mut *self.left.lock()),
        }))
    }

    fn heard(&mut self, message: Result<Option<wire::DecodeRequest>, Status>) -> Option<Step> {
        let Ok(Some(message)) = message else {
            self.listening = false;
            return None;
        };
        match message.message? {
            Message::Descriptor(descriptor) => {
                self.asked.get_or_insert(self.daemon.traces.now());
                self.descriptor(&descriptor)
            }
            Message::FirstToken(token) => self.first(&token),
            Message::Recompute(recompute) => {
                let reservation = match std::mem::replace(&mut self.kv, Kv::Over) {
                    Kv::Waiting(reservation) | Kv::Ready(reservation) | Kv::Failed(reservation) => {
                        Some(reservation)
                    }
                    // The transfer ends with its future, and its reservation with it.
                    Kv::Taking(_) | Kv::Over => None,
                };
                Some(Step::Recompute {
                    reservation,
                    first_token: self.first_token,
                    traceparent: recompute.traceparent,
                })
            }
            Message::Start(_) => Some(Step::Broken(
                "decode: start came twice: open a stream for each operation".to_owned(),
            )),
        }
    }

    fn first(&mut self, token: &wire::Token) -> Option<Step> {
        if !self.first_token_by_prefill || token.position as usize != self.prompt_tokens {
            return Some(Step::Broken(format!(
                "decode: a first token at position {} came where {} is to be computed next: say in start who samples it",
                token.position, self.prompt_tokens
            )));
        }
        if let Some(before) = self.first_token.replace(token.id) {
            return Some(Step::Broken(format!(
                "decode: a second first token came ({} after {before}): it is sampled once and never taken back",
                token.id
            )));
        }
        None
    }

    fn descriptor(&mut self, descriptor: &wire::Descriptor) -> Option<Step> {
        let reservation = match std::mem::replace(&mut self.kv, Kv::Over) {
            Kv::Waiting(reservation) => reservation,
            other => {
                self.kv = other;
                return Some(Step::Broken(
                    "decode: a second descriptor came: a hand-off is made once".to_owned(),
                ));
            }
        };
        match self.prepare(descriptor) {
            Ok(prepared) => {
                self.kv = Kv::Taking(take(prepared, Arc::clone(&self.tokens), reservation));
                None
            }
            Err((cause, message)) => Some(self.failed(reservation, cause, message, 0)),
        }
    }

    /// Checks a descriptor against this worker's own card, and chooses the way.
    fn prepare(&self, descriptor: &wire::Descriptor) -> Result<Prepared, (HandoffFailure, String)> {
        let card = &self.daemon.card;
        let daemon = Arc::clone(&self.daemon);
        let operation = self.operation.clone();
        let all_left = Arc::clone(&self.left);
        let on_left = move |left: &Left<'_>| {
            let Left {
                from,
                to,
                obstacle,
                error,
            } = left;
            tracing::warn!(%operation, from, to, cause = obstacle.word(), %error, "this pair moves KV another way");
            daemon.metrics.transport_left(from, *obstacle);
            all_left.lock().push(wire::TransportLeft {
                from: (*from).to_owned(),
                to: (*to).to_owned(),
                cause: obstacle.word().to_owned(),
            });
        };
        let handoff = accept(
            descriptor,
            Own {
                kv_identity: &card.kv_identity,
                layout_digest: &card.layout_digest,
            },
            &self.daemon.transports,
            &self.transports,
            on_left,
        )?;
        let client = self
            .daemon
            .peers
            .at(&descriptor.control_address)
            .map_err(|error| (HandoffFailure::SourceLost, error.0))?
            .traced(self.transfer_place.clone());
        let source = Incarnation(descriptor.incarnation);
        Ok(Prepared {
            handoff,
            options: IntakeOptions {
                reader: Reader {
                    transfer: TransferId::new(source, card.incarnation, &self.operation),
                    worker: card.worker.clone(),
                    incarnation: card.incarnation,
                },
                checksum: match self.checksum {
                    WireChecksum::Always => ChecksumMode::Always,
                    WireChecksum::Off => ChecksumMode::Off,
                    // The generation is another one for each lease of that process.
                    WireChecksum::Sampled => ChecksumMode::Sampled {
                        seed: descriptor.generation ^ descriptor.incarnation,
                    },
                },
                timeout: self.timeout,
                retries: RETRIES,
            },
            client,
        })
    }
}

struct Prepared {
    handoff: intake::Handoff,
    options: IntakeOptions,
    client: crate::serve::peers::Peer,
}

/// The transfer, to be polled. Dropping it ends all writes and gives the reservation back.
fn take(prepared: Prepared, tokens: Arc<[u32]>, reservation: Reservation) -> Taking {
    Box::pin(stream! {
        let Prepared { handoff, options, client } = prepared;
        let (grant, mut granted) = oneshot::channel();
        let mut grant = Some(grant);
        let mut on_grant = || {
            if let Some(grant) = grant.take() {
                // Nobody listens only when the transfer is dropped.
                let _ = grant.send(());
            }
        };
        let begun = Progress::Granted {
            transport: handoff.transport.kind(),
            generation: handoff.generation,
        };
        let mut taking = pin!(intake::take(&handoff, &options, &client, &tokens, reservation, &mut on_grant));
        let early = tokio::select! {
            biased;
            Ok(()) = &mut granted => None,
            done = &mut taking => Some(done),
        };
        // A short transfer may be granted and done within one poll.
        if early.is_none() || granted.try_recv().is_ok() {
            yield begun;
        }
        let done = match early {
            Some(done) => done,
            None => taking.await,
        };
        yield Progress::Done(Box::new(done));
    })
}

async fn progress(kv: &mut Kv) -> Progress {
    if let Kv::Taking(taking) = kv
        && let Some(progress) = taking.next().await
    {
        return progress;
    }
    std::future::pending().await
}

/// Whether the next token is the last that was asked for.
fn is_last(start: &wire::DecodeStart) -> bool {
    let stopping = start.stopping.as_ref();
    stopping.is_some_and(|stopping| start.generated.saturating_add(1) >= stopping.max_tokens)
}

fn completed(received: &Received, left: Vec<wire::TransportLeft>) -> wire::TransferCompleted {
    wire::TransferCompleted {
        bytes: received.bytes,
        blocks: received.blocks,
        transport: received.transport.to_owned(),
        total_milliseconds: received.total_milliseconds,
        exposed_milliseconds: received.exposed_milliseconds,
        synchronization_milliseconds: received.synchronization_milliseconds,
        retries: received.retries,
        left,
    }
}
