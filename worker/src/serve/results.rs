//! Results of prefills, kept by operation id: a repeated call gets what the first one got, and computes nothing.
//!
//! Each result is a list of messages that grows until it ends; every call, the first one included, reads it from the start. They
//! are kept until twice the lease after their end. A message is small (blocks are counted, not listed), and there are as many
//! results as prefills in that time.

use std::collections::HashMap;
use std::sync::Arc;

use async_stream::stream;
use baton_protocol::ids::{LeaseId, OperationId};
use baton_protocol::wire::{PrefillEvent, prefill_event::Event};
use futures::Stream;
use parking_lot::Mutex;
use tokio::sync::watch;

/// All results of this process. Cloning shares them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Results(Arc<Mutex<HashMap<OperationId, Kept>>>);

#[derive(Clone, Debug)]
struct Kept {
    result: PrefillResult,
    /// Milliseconds; none while it grows.
    until: Option<u64>,
}

/// One result. Cloning shares it.
#[derive(Clone, Debug, Default)]
pub(crate) struct PrefillResult {
    events: Arc<Mutex<Vec<PrefillEvent>>>,
    /// Messages there, and whether that is all.
    grown: watch::Sender<(usize, bool)>,
}

/// Who is to make a result.
#[derive(Debug)]
pub(crate) enum Found {
    /// Nobody had asked for it: the caller makes it.
    New(PrefillResult),
    /// It is there or being made.
    Known(PrefillResult),
}

impl Results {
    pub(crate) fn find(&self, operation: &OperationId) -> Found {
        let mut results = self.0.lock();
        if let Some(kept) = results.get(operation) {
            return Found::Known(kept.result.clone());
        }
        let result = PrefillResult::default();
        results.insert(
            operation.clone(),
            Kept {
                result: result.clone(),
                until: None,
            },
        );
        Found::New(result)
    }

    /// Nothing was begun: a repetition may try again.
    pub(crate) fn forget_one(&self, operation: &OperationId) {
        self.0.lock().remove(operation);
    }

    /// The lease that a prefill has opened.
    pub(crate) fn lease_of(&self, operation: &OperationId) -> Option<LeaseId> {
        let kept = self.0.lock().get(operation).cloned()?;
        let events = kept.result.events.lock();
        events.iter().find_map(|event| match &event.event {
            Some(Event::Lease(opened)) => {
                LeaseId::from_wire(&opened.descriptor.as_ref()?.lease).ok()
            }
            _ => None,
        })
    }

    /// The result is complete; it is kept until `until` milliseconds.
    pub(crate) fn keep(&self, operation: &OperationId, until: u64) {
        if let Some(kept) = self.0.lock().get_mut(operation) {
            kept.until = Some(until);
        }
    }

    /// Forgets what is due.
    pub(crate) fn forget(&self, now: u64) {
        self.0
            .lock()
            .retain(|_, kept| kept.until.is_none_or(|until| until > now));
    }
}

impl PrefillResult {
    pub(crate) fn push(&self, event: PrefillEvent) {
        let mut events = self.events.lock();
        events.push(event);
        let count = events.len();
        drop(events);
        self.grown.send_modify(|grown| grown.0 = count);
    }

    pub(crate) fn end(&self) {
        self.grown.send_modify(|grown| grown.1 = true);
    }

    /// Whether a call reads it.
    pub(crate) fn is_read(&self) -> bool {
        !self.grown.is_closed()
    }

    /// Resolves when no call reads it.
    pub(crate) async fn unread(&self) {
        self.grown.closed().await;
    }

    /// All messages from the first on, then the end.
    pub(crate) fn follow(&self) -> impl Stream<Item = PrefillEvent> + Send + use<> {
        let events = Arc::clone(&self.events);
        let mut grown = self.grown.subscribe();
        stream! {
            let mut next = 0;
            loop {
                let (count, ended) = *grown.borrow_and_update();
                while next < count {
                    let event = events.lock().get(next).cloned();
                    next += 1;
                    if let Some(event) = event {
                        yield event;
                    }
                }
                if ended || grown.changed().await.is_err() {
                    break;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use baton_protocol::wire::Started;
    use futures::StreamExt;

    use super::*;

    fn event(queue_milliseconds: f64) -> PrefillEvent {
        PrefillEvent {
            event: Some(Event::Started(Started { queue_milliseconds })),
        }
    }

    #[tokio::test]
    async fn the_second_call_reads_what_the_first_one_made() {
        let results = Results::default();
        let id = OperationId::from("r/1/prefill");
        let Found::New(result) = results.find(&id) else {
            panic!("nobody has asked before");
        };
        result.push(event(1.0));
        let Found::Known(again) = results.find(&id) else {
            panic!("it is being made");
        };
        let reader = tokio::spawn(again.follow().collect::<Vec<_>>());
        result.push(event(2.0));
        result.end();
        assert_eq!(reader.await.unwrap(), [event(1.0), event(2.0)]);
        results.keep(&id, 100);
        results.forget(99);
        assert!(matches!(results.find(&id), Found::Known(_)));
        results.forget(100);
        assert!(matches!(results.find(&id), Found::New(_)));
    }
}
