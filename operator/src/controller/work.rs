//! Works off a queue: so many objects at a time, each look with a deadline.

use std::collections::HashMap;
use std::fmt::{Debug, Display};
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::task::{Id, JoinSet};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::warn;

use super::fault::{Class, Fault};
use super::queue::{Outcome, Queue};
use crate::metrics::{ControllerLabels, Metrics, QueueLabels, ResultLabels};
use crate::random;

/// Objects that one controller looks at at a time.
pub const CONCURRENCY: usize = 8;
/// One look. The client's own tries against a busy API server would take up to 160 s.
pub const LOOK_WITHIN: Duration = Duration::from_secs(60);
/// After a write of somebody else in between.
const AFTER_CONFLICT: Duration = Duration::from_secs(1);

/// A queue that is shared, and tells when something is due earlier.
#[derive(Debug)]
pub struct Work<K> {
    name: &'static str,
    start: Instant,
    queue: Mutex<Queue<K>>,
    earlier: Notify,
}

/// How a look has ended, where it has not failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Looked {
    /// Look again after so long, if nothing happens before.
    Again(Duration),
    /// The object is gone.
    Gone,
}

/// Looks at one object.
pub type Look<K> = Arc<dyn Fn(K) -> BoxFuture<'static, Result<Looked, Fault>> + Send + Sync>;

/// Looks under way.
struct Looks<K> {
    tasks: JoinSet<Result<Looked, Fault>>,
    /// Whose look each task is, and since when: a task that panics cannot say so itself.
    keys: HashMap<Id, (K, Instant)>,
}

struct Ended<K> {
    key: K,
    began: Instant,
    looked: Result<Looked, Fault>,
}

impl<K> Default for Looks<K> {
    fn default() -> Self {
        Self {
            tasks: JoinSet::new(),
            keys: HashMap::new(),
        }
    }
}

impl<K> Looks<K> {
    fn begin(&mut self, key: K, looking: BoxFuture<'static, Result<Looked, Fault>>) {
        let task = self.tasks.spawn(async move {
            match tokio::time::timeout(LOOK_WITHIN, looking).await {
                Ok(looked) => looked,
                Err(_) => Err(Fault::Late),
            }
        });
        self.keys.insert(task.id(), (key, Instant::now()));
    }

    /// The next look that has ended; none while none is under way.
    async fn next(&mut self) -> Option<Ended<K>> {
        let (id, looked) = match self.tasks.join_next_with_id().await? {
            Ok((id, looked)) => (id, looked),
            Err(error) => {
                let words =
                    format!("the look has panicked, which is a fault of the operator: {error}");
                (error.id(), Err(Fault::Other(words)))
            }
        };
        let (key, began) = self.keys.remove(&id)?;
        Some(Ended { key, began, looked })
    }
}

impl<K: Ord + Clone + Debug + Display + Send + 'static> Work<K> {
    #[must_use]
    pub fn new(name: &'static str) -> Self {
        Self {
            name,
            start: Instant::now(),
            queue: Mutex::new(Queue::default()),
            earlier: Notify::new(),
        }
    }

    /// The object has to be looked at within `after`.
    pub fn touch(&self, key: K, after: Duration) {
        self.queue.lock().add(key, self.start.elapsed() + after);
        self.earlier.notify_one();
    }

    /// Everything that waits, in the order of the keys.
    #[cfg(test)]
    pub(super) fn take_all(&self) -> Vec<K> {
        let mut queue = self.queue.lock();
        let mut keys: Vec<K> = std::iter::from_fn(|| queue.take(Duration::MAX)).collect();
        *queue = Queue::default();
        keys.sort();
        keys
    }

    /// Looks at what is due until `stop`; then what is under way ends, at most for `grace`.
    pub async fn run(
        &self,
        look: Look<K>,
        metrics: &Metrics,
        stop: CancellationToken,
        grace: Duration,
    ) {
        let mut looks = Looks::default();
        while !stop.is_cancelled() {
            while looks.tasks.len() < CONCURRENCY {
                let Some(key) = self.queue.lock().take(self.start.elapsed()) else {
                    break;
                };
                looks.begin(key.clone(), look(key));
            }
            self.measure(metrics);
            tokio::select! {
                () = stop.cancelled() => {}
                () = self.until_due(), if looks.tasks.len() < CONCURRENCY => {}
                Some(ended) = looks.next() => self.ended(ended, metrics),
            }
        }
        let last = async {
            while let Some(ended) = looks.next().await {
                self.ended(ended, metrics);
            }
        };
        if tokio::time::timeout(grace, last).await.is_err() {
            warn!(
                controller = self.name,
                "not all looks ended in time: what they were at goes on after the next start"
            );
        }
    }

    async fn until_due(&self) {
        let due = self.queue.lock().next_due();
        let earlier = self.earlier.notified();
        match due {
            None => earlier.await,
            Some(due) => {
                tokio::select! {
                    () = earlier => {}
                    () = tokio::time::sleep_until(self.start + due) => {}
                }
            }
        }
    }

    fn ended(&self, ended: Ended<K>, metrics: &Metrics) {
        let controller = self.name;
        let Ended { key, began, looked } = ended;
        let labels = ControllerLabels { controller };
        let time = began.elapsed().as_secs_f64();
        metrics.reconcile_time.get_or_create(&labels).observe(time);
        let (outcome, result) = match looked {
            Ok(Looked::Again(after)) => (Outcome::Done(after), "success"),
            Ok(Looked::Gone) => (Outcome::Gone, "success"),
            Err(fault) => match fault.class() {
                Class::Conflict => (Outcome::Again(AFTER_CONFLICT), "requeue"),
                Class::NotLeading | Class::Ending => (Outcome::Again(LOOK_WITHIN), "requeue"),
                Class::Failure => {
                    metrics.reconcile_errors.get_or_create(&labels).inc();
                    warn!(controller, object = %key, error = %fault, "look failed, tried again later");
                    (Outcome::Failed, "error")
                }
            },
        };
        metrics
            .reconciles
            .get_or_create(&ResultLabels { controller, result })
            .inc();
        let now = self.start.elapsed();
        let random = random::fraction();
        self.queue.lock().done(&key, outcome, now, random);
    }

    fn measure(&self, metrics: &Metrics) {
        let depth = self.queue.lock().depth(self.start.elapsed());
        let labels = QueueLabels { name: self.name };
        let depth = i64::try_from(depth).unwrap_or(i64::MAX);
        metrics.queue_depth.get_or_create(&labels).set(depth);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_look_that_panics_fails_or_hangs_is_tried_again_and_holds_up_no_other() {
        let work = Arc::new(Work::new("test"));
        let looks = Arc::new(AtomicU32::new(0));
        let stop = CancellationToken::new();
        let look: Look<&'static str> = {
            let (looks, stop) = (looks.clone(), stop.clone());
            Arc::new(move |key| {
                let (looks, stop) = (looks.clone(), stop.clone());
                Box::pin(async move {
                    match (key, looks.fetch_add(1, Ordering::Relaxed)) {
                        ("bad", 0) => panic!("once"),
                        ("bad", 1) => Err(Fault::Other("twice".into())),
                        ("bad", 2) => std::future::pending().await,
                        ("bad", _) => {
                            stop.cancel();
                            Ok(Looked::Gone)
                        }
                        _ => Ok(Looked::Gone),
                    }
                })
            })
        };
        work.touch("bad", Duration::ZERO);
        let metrics = Metrics::default();
        let began = Instant::now();
        work.run(look, &metrics, stop, LOOK_WITHIN).await;
        // 1 s ± 20 %, 2 s ± 20 %, the deadline of 60 s, 4 s ± 20 %.
        let took = began.elapsed().as_secs_f64();
        assert!((65.6..=68.4).contains(&took), "{took}");
        assert_eq!(looks.load(Ordering::Relaxed), 4);
        let text = metrics.text().unwrap();
        assert!(
            text.contains("controller_runtime_reconcile_errors_total{controller=\"test\"} 3"),
            "{text}"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_under_way_ends_before_the_work_does_within_its_grace() {
        let work = Arc::new(Work::new("test"));
        let ended = Arc::new(AtomicU32::new(0));
        let stop = CancellationToken::new();
        let look: Look<u64> = {
            let (ended, stop) = (ended.clone(), stop.clone());
            Arc::new(move |seconds| {
                let (ended, stop) = (ended.clone(), stop.clone());
                Box::pin(async move {
                    stop.cancel();
                    tokio::time::sleep(Duration::from_secs(seconds)).await;
                    ended.fetch_add(1, Ordering::Relaxed);
                    Ok(Looked::Again(Duration::ZERO))
                })
            })
        };
        work.touch(3, Duration::ZERO);
        work.touch(30, Duration::ZERO);
        work.run(look, &Metrics::default(), stop, Duration::from_secs(10))
            .await;
        assert_eq!(ended.load(Ordering::Relaxed), 1);
    }
}
