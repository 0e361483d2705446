//! When a router is ready for requests. Pure but for what it remembers.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use crate::clock::Moment;
use crate::run::Dispatch;

/// So long a router that has just joined a cluster waits for models that it cannot serve yet, so that a rolling restart of
/// routers sends nobody to one that has not met the workers. A model that nobody can serve holds it up no longer than this.
const PATIENCE: Duration = Duration::from_secs(10);

/// The rule, by where the router is.
#[derive(Debug)]
pub enum Readiness {
    /// Alone: ready while it can serve a model.
    Serving,
    /// In a cluster.
    Joining(Arc<Joining>),
}

/// A router in a cluster is ready once it knows what there is: with no pools at all too, for an installation that waits for it must
/// return. Ready once, it stays so: a model without workers is answered with an error that says so, which no refused connection does.
#[derive(Debug, Default)]
pub struct Joining {
    listed_at: OnceLock<Moment>,
    ready: AtomicBool,
}

impl Joining {
    /// Workers and policies were listed.
    pub fn listed(&self, now: Moment) {
        // Only the first time counts.
        let _ = self.listed_at.set(now);
    }

    fn look(&self, unserved: impl FnOnce() -> Vec<String>, now: Moment) -> Result<(), String> {
        if self.ready.load(Ordering::Relaxed) {
            return Ok(());
        }
        let Some(listed_at) = self.listed_at.get() else {
            return Err(
                "the API server has not listed workers, pools and policies yet: the log says what keeps it"
                    .to_owned(),
            );
        };
        let missing = unserved();
        if missing.is_empty() || now >= listed_at.plus(PATIENCE) {
            self.ready.store(true, Ordering::Relaxed);
            return Ok(());
        }
        Err(missing.join("; "))
    }
}

impl Readiness {
    /// # Errors
    /// It is not ready: what is missing, in words.
    pub fn look(&self, dispatch: &dyn Dispatch, now: Moment) -> Result<(), String> {
        match self {
            Self::Serving => dispatch.ready(),
            Self::Joining(joining) => joining.look(|| dispatch.unserved(), now),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Moment = Moment(1_000_000);

    fn none() -> Vec<String> {
        Vec::new()
    }

    fn one() -> Vec<String> {
        vec!["model m: no decode worker is up".to_owned()]
    }

    #[test]
    fn nothing_to_serve_is_ready_as_soon_as_it_is_known_that_there_is_nothing() {
        let joining = Joining::default();
        let error = joining.look(none, NOW).unwrap_err();
        assert!(error.contains("has not listed"), "{error}");
        joining.listed(NOW);
        assert_eq!(joining.look(none, NOW), Ok(()));
        assert_eq!(joining.look(one, NOW), Ok(()), "ready once, it stays so");
    }

    #[test]
    fn a_model_that_cannot_be_served_yet_is_waited_for_and_not_for_ever() {
        let joining = Joining::default();
        joining.listed(NOW);
        joining.listed(NOW.plus(PATIENCE));
        assert_eq!(joining.look(one, NOW).unwrap_err(), one()[0]);
        let nearly = NOW.plus(PATIENCE - Duration::from_millis(1));
        assert!(joining.look(one, nearly).is_err());
        assert_eq!(joining.look(one, NOW.plus(PATIENCE)), Ok(()));
    }
}
