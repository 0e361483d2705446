//! Events, in `events.k8s.io`: what changed, said once.
//!
//! kube's own recorder folds all events of one reason and object into a series that repeats the first one's text; here the text is
//! what helps, so each text is an event of its own, and one that was said within the hour is not said again.

use std::collections::BTreeMap;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use parking_lot::Mutex;
use tracing::warn;

use super::writes::Writes;
use crate::pool::{Note, NoteKind};
use crate::random;

/// Not said again within this.
const ONCE_IN: Duration = Duration::from_secs(3600);
/// Texts that are remembered: a pool of a thousand pods that all fail, twice over. Beyond, the oldest is forgotten and may be repeated.
const REMEMBERED: usize = 2048;
/// Longest note that the API takes, in bytes.
const LONGEST: usize = 1024;

/// Publishes notes.
#[derive(Debug)]
pub struct Events {
    /// This process.
    instance: String,
    said: Mutex<BTreeMap<Said, Duration>>,
}

/// Uid of the object, reason and text.
type Said = (String, &'static str, String);

impl Events {
    #[must_use]
    pub fn new(instance: String) -> Self {
        Self {
            instance,
            said: Mutex::new(BTreeMap::new()),
        }
    }

    /// Publishes `note` about `regarding`, unless it was said within the hour. An event that cannot be published is logged, and
    /// nothing else depends on it.
    pub async fn publish(
        &self,
        writes: &Writes,
        note: &Note,
        regarding: ObjectReference,
        now: Duration,
    ) {
        if !self.is_new(note, &regarding, now) {
            return;
        }
        let event = event(note, regarding, &self.instance, Timestamp::now());
        if let Err(error) = writes.create_event(&event).await {
            warn!(reason = note.reason, message = note.message, %error, "event not published");
        }
    }

    fn is_new(&self, note: &Note, regarding: &ObjectReference, now: Duration) -> bool {
        let key = (
            regarding.uid.clone().unwrap_or_default(),
            note.reason,
            note.message.clone(),
        );
        let mut said = self.said.lock();
        said.retain(|_, at| now.saturating_sub(*at) < ONCE_IN);
        if said.contains_key(&key) {
            return false;
        }
        if said.len() >= REMEMBERED {
            let oldest = said.iter().min_by_key(|(_, at)| **at);
            if let Some(oldest) = oldest.map(|(key, _)| key.clone()) {
                said.remove(&oldest);
            }
        }
        said.insert(key, now);
        true
    }
}

fn event(note: &Note, regarding: ObjectReference, instance: &str, now: Timestamp) -> Event {
    let name = regarding.name.clone().unwrap_or_default();
    let unique = random::hex::<8>().unwrap_or_else(|_| now.as_nanosecond().to_string());
    let mut text = note.message.clone();
    while text.len() > LONGEST {
        text.pop();
    }
    Event {
        metadata: ObjectMeta {
            namespace: regarding.namespace.clone(),
            name: Some(format!("{name}.{unique}")),
            ..ObjectMeta::default()
        },
        type_: Some(
            match note.kind {
                NoteKind::Normal => "Normal",
                NoteKind::Warning => "Warning",
            }
            .into(),
        ),
        reason: Some(note.reason.into()),
        note: Some(text),
        action: Some("Reconcile".into()),
        event_time: Some(MicroTime(now)),
        regarding: Some(regarding),
        reporting_controller: Some("serving.baton.dev/operator".into()),
        reporting_instance: Some(instance.into()),
        ..Event::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::Regarding;

    fn note(message: &str) -> Note {
        Note {
            kind: NoteKind::Warning,
            reason: "Refused",
            message: message.into(),
            regarding: Regarding::Pool,
        }
    }

    fn object(uid: &str) -> ObjectReference {
        ObjectReference {
            name: Some("d".into()),
            namespace: Some("n".into()),
            uid: Some(uid.into()),
            ..ObjectReference::default()
        }
    }

    #[test]
    fn a_text_is_said_once_an_hour_for_each_object() {
        let events = Events::new("me".into());
        let s = Duration::from_secs;
        assert!(events.is_new(&note("a"), &object("1"), s(0)));
        assert!(!events.is_new(&note("a"), &object("1"), s(3599)));
        assert!(events.is_new(&note("b"), &object("1"), s(3599)));
        assert!(events.is_new(&note("a"), &object("2"), s(3599)));
        assert!(events.is_new(&note("a"), &object("1"), s(3601)));
    }

    #[test]
    fn memory_is_bounded_and_the_oldest_goes_first() {
        let events = Events::new("me".into());
        for second in 0..=REMEMBERED as u64 {
            let text = second.to_string();
            assert!(events.is_new(&note(&text), &object("1"), Duration::from_secs(second) / 10));
        }
        assert_eq!(events.said.lock().len(), REMEMBERED);
        let now = Duration::from_secs(400);
        assert!(!events.is_new(&note("1"), &object("1"), now));
        assert!(events.is_new(&note("0"), &object("1"), now));
    }

    #[test]
    fn an_event_fits_what_the_api_takes() {
        let made = event(
            &note(&"é".repeat(600)),
            object("1"),
            "me",
            Timestamp::UNIX_EPOCH,
        );
        let text = made.note.unwrap();
        assert!(text.len() <= LONGEST && text.len() > LONGEST - 2);
        assert_eq!(made.metadata.namespace.as_deref(), Some("n"));
        assert!(made.metadata.name.unwrap().starts_with("d."));
        assert_eq!(made.type_.as_deref(), Some("Warning"));
    }
}
