//! Between the engine's own types and the wire's.

use baton_protocol::failure::{FailureClass, Refusal};
use baton_protocol::ids::{OperationId, RunId};
use baton_protocol::wire::{self, decode_event, prefill_event};

use super::compute::EngineStopped;
use crate::engine::{Admission, EngineEvent, EngineRequest, Refused, RequestKind};
use crate::kv::CacheScope;
use crate::sampling::{Finish, Logprobs};

/// An operation without a deadline ends after this many milliseconds: every wait has an end.
const LONGEST_OPERATION: u64 = 3_600_000;

/// Common part of both dispatch calls.
pub(crate) struct Dispatch<'a> {
    pub(crate) operation: &'a wire::Operation,
    pub(crate) tokens: Vec<u32>,
    pub(crate) generated: u32,
    pub(crate) sampling: Option<&'a wire::Sampling>,
    pub(crate) stopping: Option<&'a wire::Stopping>,
}

/// The engine's request; its deadline is relative.
pub(crate) fn engine_request(
    dispatch: Dispatch<'_>,
    kind: RequestKind,
) -> Result<EngineRequest, Refused> {
    let missing = |field: &str| invalid(format!("{field}: absent: a router must send it"));
    let operation = dispatch.operation;
    if operation.id.is_empty() {
        return Err(missing("operation.id"));
    }
    if operation.run.is_empty() {
        return Err(missing("operation.run"));
    }
    let deadline = match operation.deadline_milliseconds {
        0 => LONGEST_OPERATION,
        milliseconds => milliseconds.min(LONGEST_OPERATION),
    };
    Ok(EngineRequest {
        run: RunId::from(operation.run.as_str()),
        operation: OperationId::from(operation.id.as_str()),
        priority: operation.priority,
        deadline: Some(deadline as f64),
        scope: CacheScope::salted(&operation.cache_salt),
        tokens: dispatch.tokens,
        generated: dispatch.generated,
        sampling: dispatch.sampling.ok_or_else(|| missing("sampling"))?.into(),
        stopping: dispatch.stopping.ok_or_else(|| missing("stopping"))?.into(),
        kind,
    })
}

pub(crate) fn invalid(message: String) -> Refused {
    Refused {
        reason: Refusal::InvalidRequest,
        message,
        retry_after: 0,
    }
}

/// The engine is gone: for the router the same as a worker that drains, it must go elsewhere.
pub(crate) fn stopped(stopped: EngineStopped) -> Refused {
    Refused {
        reason: Refusal::Draining,
        message: stopped.to_string(),
        retry_after: 0,
    }
}

pub(crate) fn refused(refused: &Refused) -> wire::Refused {
    wire::Refused {
        reason: refused.reason.word().to_owned(),
        message: refused.message.clone(),
        retry_after_milliseconds: refused.retry_after,
    }
}

pub(crate) fn failed(class: FailureClass, message: impl Into<String>) -> wire::Failed {
    wire::Failed {
        class: class.word().to_owned(),
        message: message.into(),
    }
}

pub(crate) fn admission(admission: &Admission) -> wire::Admission {
    wire::Admission {
        load_sequence: admission.load_sequence,
        cached_tokens: narrow(admission.cached_tokens),
        blocks: narrow(admission.blocks),
    }
}

fn started(queue: f64) -> wire::Started {
    wire::Started {
        queue_milliseconds: queue,
    }
}

fn token(
    id: u32,
    position: u32,
    logprobs: Option<Logprobs>,
    finish: Option<Finish>,
) -> wire::Token {
    wire::Token {
        id,
        position,
        logprobs: logprobs.map(Into::into),
        finish: finish.map(|finish| reason(finish).into()),
    }
}

fn reason(finish: Finish) -> wire::FinishReason {
    match finish {
        Finish::Stop => wire::FinishReason::Stop,
        Finish::Length => wire::FinishReason::Length,
    }
}

/// What a prefill's caller is told of an event. A lease is told with its descriptor, which only the daemon can write.
pub(crate) fn prefill_message(event: EngineEvent) -> Option<prefill_event::Event> {
    use prefill_event::Event;
    Some(match event {
        EngineEvent::PrefillStarted { queue } => Event::Started(started(queue)),
        EngineEvent::NoLease { admission: taken } => Event::Lease(wire::LeaseOpened {
            descriptor: None,
            admission: Some(admission(&taken)),
        }),
        EngineEvent::BlocksPublished { blocks } => {
            Event::Published(wire::BlocksPublished { blocks })
        }
        EngineEvent::Token {
            id,
            position,
            logprobs,
            finish,
        } => Event::FirstToken(token(id, position, logprobs, finish)),
        EngineEvent::Sealed {
            blocks,
            queue,
            compute,
            cached_tokens,
        } => Event::Sealed(wire::Sealed {
            blocks,
            queue_milliseconds: queue,
            compute_milliseconds: compute,
            cached_tokens: narrow(cached_tokens),
        }),
        EngineEvent::Failed { class, message } => Event::Failed(failed(class, message)),
        EngineEvent::LeaseOpened { .. }
        | EngineEvent::PrefillCompleted { .. }
        | EngineEvent::DecodeStarted { .. }
        | EngineEvent::Finished { .. } => return None,
    })
}

/// What a decode's caller is told of an event.
pub(crate) fn decode_message(event: EngineEvent) -> Option<decode_event::Event> {
    use decode_event::Event;
    Some(match event {
        EngineEvent::PrefillStarted { queue } => Event::PrefillStarted(started(queue)),
        EngineEvent::PrefillCompleted {
            queue,
            compute,
            cached_tokens,
        } => Event::PrefillCompleted(wire::PrefillDone {
            queue_milliseconds: queue,
            compute_milliseconds: compute,
            cached_tokens: narrow(cached_tokens),
        }),
        EngineEvent::DecodeStarted { queue } => Event::DecodeStarted(started(queue)),
        EngineEvent::Token {
            id,
            position,
            logprobs,
            finish,
        } => Event::Token(token(id, position, logprobs, finish)),
        EngineEvent::Finished {
            finish,
            output_tokens,
            decode,
        } => Event::Finished(wire::Finished {
            reason: reason(finish).into(),
            output_tokens,
            decode_milliseconds: decode,
        }),
        EngineEvent::Failed { class, message } => Event::Failed(failed(class, message)),
        EngineEvent::LeaseOpened { .. }
        | EngineEvent::NoLease { .. }
        | EngineEvent::BlocksPublished { .. }
        | EngineEvent::Sealed { .. } => return None,
    })
}

pub(crate) fn narrow(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}
