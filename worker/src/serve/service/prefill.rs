//! `Prefill`: computes a prompt and keeps its KV under a lease. Made once for each operation id, read by any number of calls. Given up
//! when nobody is left who could use it: its router is gone, and no worker has claimed the lease.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use baton_protocol::card::Role;
use baton_protocol::failure::FailureClass;
use baton_protocol::ids::{LeaseId, OperationId, RunId};
use baton_protocol::wire::{self, PrefillEvent, prefill_event::Event};
use baton_system::entropy;
use futures::{Stream, StreamExt as _};
use tokio::sync::mpsc;
use tonic::Status;

use crate::engine::{Admitted, EngineEvent, PrefillTerms, Refused, RequestKind};
use crate::kv::pool::KvPool;
use crate::serve::compute::EVENTS;
use crate::serve::daemon::Daemon;
use crate::serve::messages::{self, Dispatch, narrow};
use crate::serve::operations::Registered;
use crate::serve::results::{Found, PrefillResult};
use crate::serve::traces::PrefillTrace;

/// Milliseconds; the longest that `kvPool.leaseSeconds` may say.
const LONGEST_LEASE: u64 = 3_600_000;
/// With no call that reads it, how long a prefill waits for a repeated one, or for the claim of a worker that has its descriptor already.
const DESERTED: Duration = Duration::from_secs(2);

pub(super) async fn events(
    daemon: &Arc<Daemon>,
    request: wire::PrefillRequest,
) -> Result<impl Stream<Item = Result<PrefillEvent, Status>> + Send + use<>, Status> {
    let Some(operation) = &request.operation else {
        return Err(Status::invalid_argument(
            "operation: absent: a router must send it",
        ));
    };
    let id = OperationId::from(operation.id.as_str());
    let result = match daemon.results.find(&id) {
        Found::Known(result) => result,
        Found::New(result) => {
            // On its own, so that a caller who leaves does not leave a result that never ends.
            let begun = begin(Arc::clone(daemon), id, request, result.clone());
            daemon.tracker.spawn(begun);
            result
        }
    };
    Ok(result.follow().map(Ok))
}

async fn begin(
    daemon: Arc<Daemon>,
    id: OperationId,
    request: wire::PrefillRequest,
    result: PrefillResult,
) {
    let (events, incoming) = mpsc::channel(EVENTS);
    let mut trace = request
        .operation
        .as_ref()
        .and_then(|operation| daemon.traces.operation(operation))
        .map(|traced| PrefillTrace::new(traced, request.tokens.len(), daemon.traces.now()));
    match submit(&daemon, request, events).await {
        Ok((admitted, registered, lease)) => {
            let work = Work {
                daemon,
                id,
                admitted,
                registered,
                lease,
                result,
                trace,
            };
            work.run(incoming).await;
        }
        Err(refused) => {
            let refused = Event::Refused(messages::refused(&refused));
            note(&daemon, &mut trace, &refused);
            result.push(message(refused));
            daemon.results.forget_one(&id);
            result.end();
        }
    }
}

async fn submit(
    daemon: &Daemon,
    request: wire::PrefillRequest,
    events: mpsc::Sender<EngineEvent>,
) -> Result<(Admitted, Registered, Asked), Refused> {
    let operation = request.operation.unwrap_or_default();
    daemon.admit(&operation, Role::Prefill)?;
    let lease = entropy::bytes(&*daemon.entropy)
        .map_err(|error| messages::invalid(format!("lease: {error}")))?;
    let terms = PrefillTerms {
        lease: LeaseId(lease),
        lease_duration: match request.lease_milliseconds {
            0 => daemon.lease_duration,
            // What nobody reads is freed by time: a caller cannot ask for longer than a pool could be configured to.
            milliseconds => milliseconds.min(LONGEST_LEASE),
        },
        skip_blocks: request.skip_blocks,
        sample_first: request.sample_first,
    };
    let asked = Asked {
        id: terms.lease,
        run: RunId::from(operation.run.as_str()),
        skip_blocks: terms.skip_blocks,
        duration: terms.lease_duration,
    };
    let dispatch = Dispatch {
        operation: &operation,
        tokens: request.tokens,
        generated: request.generated,
        sampling: request.sampling.as_ref(),
        stopping: request.stopping.as_ref(),
    };
    let request = messages::engine_request(dispatch, RequestKind::Prefill(terms))?;
    let registered = daemon.operations.register(&request.run, &request.operation);
    let admitted = daemon
        .commands
        .submit(request, events)
        .await
        .map_err(messages::stopped)??;
    Ok((admitted, registered, asked))
}

/// The lease that was asked for.
struct Asked {
    id: LeaseId,
    run: RunId,
    skip_blocks: u32,
    /// Milliseconds.
    duration: u64,
}

/// Writes down what comes of an admitted prefill, until it has ended.
struct Work {
    daemon: Arc<Daemon>,
    id: OperationId,
    admitted: Admitted,
    registered: Registered,
    lease: Asked,
    result: PrefillResult,
    trace: Option<PrefillTrace>,
}

impl Work {
    async fn run(mut self, mut incoming: mpsc::Receiver<EngineEvent>) {
        let cancelled = self.registered.cancelled().clone();
        let deserted = deserted(self.daemon.pool.clone(), self.lease.id, self.result.clone());
        let mut deserted = pin!(deserted);
        let lost = loop {
            tokio::select! {
                biased;
                () = cancelled.cancelled() => {
                    self.daemon.commands.cancel(self.admitted.key).await;
                    // It may have been sealed in the step that ran until now, and whoever cancelled it may not have waited that long.
                    self.daemon.pool.release_lease(self.lease.id, &self.lease.run);
                    self.daemon.changed.notify_one();
                    break Some(messages::failed(FailureClass::ClientGone, "the run was cancelled"));
                }
                () = &mut deserted => {
                    tracing::info!(operation = %self.id, "given up: its router is gone, and no worker has claimed what it computes");
                    self.daemon.commands.cancel(self.admitted.key).await;
                    self.daemon.pool.release_lease(self.lease.id, &self.lease.run);
                    self.daemon.changed.notify_one();
                    break Some(messages::failed(FailureClass::ClientGone, "nobody reads the prefill, and nobody has claimed its KV"));
                }
                event = incoming.recv() => {
                    let Some(event) = event else {
                        break Some(messages::failed(FailureClass::PrefillLost, "the engine has dropped the operation"));
                    };
                    let last = event.is_last();
                    if let Some(event) = self.message(event) {
                        note(&self.daemon, &mut self.trace, &event);
                        self.result.push(message(event));
                    }
                    if last {
                        break None;
                    }
                }
            }
        };
        if let Some(failed) = lost {
            let failed = Event::Failed(failed);
            note(&self.daemon, &mut self.trace, &failed);
            self.result.push(message(failed));
        }
        let now = self.daemon.pool.now();
        self.daemon
            .results
            .keep(&self.id, now.saturating_add(2 * self.lease.duration));
        self.result.end();
    }

    fn message(&self, event: EngineEvent) -> Option<Event> {
        if let EngineEvent::LeaseOpened {
            lease,
            opened,
            tokens,
            admission,
        } = event
        {
            let descriptor = self.daemon.descriptor(
                lease,
                opened.generation.0,
                opened.expires_in,
                self.lease.skip_blocks,
                narrow(tokens),
            );
            return Some(Event::Lease(wire::LeaseOpened {
                descriptor: Some(descriptor),
                admission: Some(messages::admission(&admission)),
            }));
        }
        messages::prefill_message(event)
    }
}

/// Resolves when nobody is left who could use the prefill. The call that asked for it ends with its router, or with the connection to
/// it. The worker that decodes may still read, on its own: a claim that it renews shows that its own router lives, as it gives the claim
/// up with its stream.
async fn deserted(pool: KvPool, lease: LeaseId, result: PrefillResult) {
    loop {
        result.unread().await;
        tokio::time::sleep(DESERTED).await;
        if !result.is_read() && !pool.is_claimed(lease) {
            break;
        }
    }
}

fn note(daemon: &Daemon, trace: &mut Option<PrefillTrace>, event: &Event) {
    if let Some(trace) = trace {
        daemon
            .traces
            .put(trace.reported(event, daemon.traces.now()));
    }
}

fn message(event: Event) -> PrefillEvent {
    PrefillEvent { event: Some(event) }
}
