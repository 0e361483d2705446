//! The streams of an attempt, and the calls that end what a worker still does for a run.

use std::time::Duration;

use baton_protocol::ids::{OperationId, RunId};
use baton_protocol::wire::{self, worker_client::WorkerClient};
use futures::stream::{self, BoxStream, StreamExt, TryStreamExt};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;
use tracing::{Instrument, Span, debug, info_span};

/// Start, descriptor, first token, recompute: nothing else is ever sent on a Decode stream.
const DECODE_MESSAGES: usize = 4;
/// A worker that does not answer a cancellation is dead, or will see that its streams are gone.
const CANCEL_WITHIN: Duration = Duration::from_secs(2);

/// The Decode stream. Dropping it cancels the operation.
pub(super) struct DecodeLeg {
    to: mpsc::Sender<wire::DecodeRequest>,
    events: BoxStream<'static, Result<wire::DecodeEvent, tonic::Status>>,
    /// From the opening to the end.
    _span: Span,
}

impl DecodeLeg {
    /// Opens it; the opening is part of the stream, so that deadlines cover it.
    pub(super) fn open(mut client: WorkerClient<Channel>, start: wire::DecodeRequest) -> Self {
        let (to, from) = mpsc::channel(DECODE_MESSAGES);
        let requests = stream::once(async { start }).chain(ReceiverStream::new(from));
        let span = info_span!("decode");
        let opening = async move {
            client
                .decode(requests)
                .await
                .map(tonic::Response::into_inner)
        };
        let events = stream::once(opening.instrument(span.clone()))
            .try_flatten()
            .boxed();
        Self {
            to,
            events,
            _span: span,
        }
    }

    /// False: the stream is gone, and its end is about to be seen.
    pub(super) fn send(&self, message: wire::decode_request::Message) -> bool {
        let message = wire::DecodeRequest {
            message: Some(message),
        };
        self.to.try_send(message).is_ok()
    }
}

/// The Prefill stream. Dropping it leaves the lease to its reader.
pub(super) struct PrefillLeg {
    events: BoxStream<'static, Result<wire::PrefillEvent, tonic::Status>>,
    _span: Span,
}

impl PrefillLeg {
    pub(super) fn open(mut client: WorkerClient<Channel>, request: wire::PrefillRequest) -> Self {
        let span = info_span!("prefill");
        let opening = async move {
            client
                .prefill(request)
                .await
                .map(tonic::Response::into_inner)
        };
        let events = stream::once(opening.instrument(span.clone()))
            .try_flatten()
            .boxed();
        Self {
            events,
            _span: span,
        }
    }
}

/// A stream whose messages hold an event, or none where it is of a later version.
pub(super) trait Leg {
    type Message;
    type Event;

    fn events(&mut self) -> &mut BoxStream<'static, Result<Self::Message, tonic::Status>>;

    fn event(message: Self::Message) -> Option<Self::Event>;
}

impl Leg for DecodeLeg {
    type Message = wire::DecodeEvent;
    type Event = wire::decode_event::Event;

    fn events(&mut self) -> &mut BoxStream<'static, Result<Self::Message, tonic::Status>> {
        &mut self.events
    }

    fn event(message: Self::Message) -> Option<Self::Event> {
        message.event
    }
}

impl Leg for PrefillLeg {
    type Message = wire::PrefillEvent;
    type Event = wire::prefill_event::Event;

    fn events(&mut self) -> &mut BoxStream<'static, Result<Self::Message, tonic::Status>> {
        &mut self.events
    }

    fn event(message: Self::Message) -> Option<Self::Event> {
        message.event
    }
}

/// The next report of a leg: an event, or why there is none any more. Never resolves for a leg that is not open.
pub(super) async fn next<L: Leg>(leg: &mut Option<L>) -> Result<L::Event, String> {
    loop {
        let Some(open) = leg else {
            return std::future::pending().await;
        };
        match open.events().next().await {
            Some(Ok(message)) => {
                if let Some(event) = L::event(message) {
                    return Ok(event);
                }
            }
            ended => {
                *leg = None;
                return Err(end_text(ended.and_then(Result::err)));
            }
        }
    }
}

fn end_text(status: Option<tonic::Status>) -> String {
    status.map_or_else(
        || "it closed the stream".to_owned(),
        |status| format!("{}: {}", status.code(), status.message()),
    )
}

/// What of a run is cancelled at a worker.
#[derive(Clone, Debug)]
pub(super) enum Cancelled {
    /// Everything, and all its leases: there is no later attempt.
    Run,
    /// One operation and its lease: however late it arrives, it does not hit a later attempt.
    Operation(OperationId),
}

/// Ends what a worker does for a run. Idempotent.
pub(super) async fn cancel(mut client: WorkerClient<Channel>, run: RunId, cancelled: Cancelled) {
    let request = wire::CancelRequest {
        run: run.to_string(),
        operation: match cancelled {
            Cancelled::Run => String::new(),
            Cancelled::Operation(operation) => operation.to_string(),
        },
    };
    match tokio::time::timeout(CANCEL_WITHIN, client.cancel(request)).await {
        Ok(Ok(_)) => {}
        Ok(Err(status)) => debug!(%run, %status, "cancel was not taken"),
        Err(_) => debug!(%run, "cancel was not answered"),
    }
}
