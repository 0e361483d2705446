//! The compute thread: the only one that touches the engine. (Where there are no threads it is a task, and modelled steps pass on the
//! runtime's clock.) Commands come in by a bounded channel, events go out by one bounded
//! channel for each operation.
//!
//! It never waits for a reader of events. A reader that leaves [`EVENTS`] of them unread is slower than decoding by that many
//! steps: its operation is cancelled, its channel closes, and the others do not notice. A reader that has gone is noticed
//! before the next step.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use baton_placement::coefficients::WorkerCoefficients;
use baton_system::threads::Threads;
use tokio::runtime::Handle;
use tokio::sync::{Notify, mpsc, oneshot, watch};
use tokio::task;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::metrics::Metrics;
use crate::engine::{Admitted, Engine, EngineEvent, EngineRequest, Next, Refused, StepOutcome};
use crate::kv::Reservation;
use crate::model::SequenceKey;

/// Events of one operation that may be unread: at the fastest steps of a few milliseconds this is seconds of a stalled reader,
/// and some hundred kilobytes at most.
pub(crate) const EVENTS: usize = 1024;

/// Without commands, how often deadlines and departed readers are looked at.
const WATCHFULNESS: Duration = Duration::from_millis(50);

/// What is asked of the compute thread.
#[derive(Debug)]
pub(crate) enum Command {
    /// `deadline` of the request is relative: milliseconds from when the thread takes it.
    Submit {
        request: Box<EngineRequest>,
        events: mpsc::Sender<EngineEvent>,
        reply: oneshot::Sender<Result<Admitted, Refused>>,
    },
    Attach {
        key: SequenceKey,
        reservation: Reservation,
        first_token: Option<u32>,
    },
    Recompute {
        key: SequenceKey,
        reservation: Option<Reservation>,
        first_token: Option<u32>,
    },
    /// `done` is answered when nothing of the operation is left in the engine.
    Cancel {
        key: SequenceKey,
        done: oneshot::Sender<()>,
    },
}

/// The thread has ended: the worker stops, or its engine has failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the engine has stopped: send the request to another worker")]
pub(crate) struct EngineStopped;

/// Sends commands.
#[derive(Clone, Debug)]
pub(crate) struct Commands(mpsc::Sender<Command>);

impl Commands {
    pub(crate) async fn submit(
        &self,
        request: EngineRequest,
        events: mpsc::Sender<EngineEvent>,
    ) -> Result<Result<Admitted, Refused>, EngineStopped> {
        let (reply, answer) = oneshot::channel();
        self.send(Command::Submit {
            request: Box::new(request),
            events,
            reply,
        })
        .await?;
        answer.await.map_err(|_| EngineStopped)
    }

    /// Returns when nothing of the operation is left in the engine.
    pub(crate) async fn cancel(&self, key: SequenceKey) {
        let (done, ended) = oneshot::channel();
        if self.send(Command::Cancel { key, done }).await.is_ok() {
            // An error says that the thread has ended, and the engine with it.
            let _ = ended.await;
        }
    }

    pub(crate) async fn send(&self, command: Command) -> Result<(), EngineStopped> {
        self.0.send(command).await.map_err(|_| EngineStopped)
    }
}

/// What the thread tells besides events.
#[derive(Clone, Debug)]
pub(crate) struct Outlets {
    /// The coefficients when they have changed by more than noise.
    pub(crate) coefficients: watch::Sender<WorkerCoefficients>,
    /// Something was admitted or has ended: a load report is due.
    pub(crate) changed: Arc<Notify>,
    pub(crate) metrics: Arc<Metrics>,
}

/// Starts the thread. It ends with `stop`, or when all [`Commands`] are gone; `stop` is cancelled when it ends for whatever reason.
///
/// `operations` is how many may be admitted at once, and the places that the channel has: each of them has at most one command
/// under way. Requests that will be refused come on top, so a sender may have to wait for a place; between two steps all that is
/// there is taken, so of that many senders none waits longer than the running step, and twice as many wait for one step more.
pub(crate) fn spawn(
    engine: Engine,
    operations: usize,
    outlets: Outlets,
    threads: Threads,
    stop: CancellationToken,
) -> std::io::Result<(Commands, Driver)> {
    let (sender, receiver) = mpsc::channel(operations.max(1));
    let compute = Compute {
        engine,
        outputs: BTreeMap::new(),
        outlets,
        started: Instant::now(),
        published: None,
        threads,
    };
    let run = async move {
        // Also when the engine panics: a daemon without an engine must not look alive.
        let _guard = stop.clone().drop_guard();
        compute.run(receiver, &stop).await;
    };
    let driver = match threads {
        Threads::Machine => {
            let runtime = Handle::current();
            let thread = thread::Builder::new()
                .name("compute".to_owned())
                .spawn(move || runtime.block_on(run))?;
            Driver::Thread(thread)
        }
        Threads::Absent => Driver::Task(tokio::spawn(run)),
    };
    Ok((Commands(sender), driver))
}

/// What runs the engine.
#[derive(Debug)]
pub(crate) enum Driver {
    Thread(thread::JoinHandle<()>),
    Task(task::JoinHandle<()>),
}

impl Driver {
    /// Waits for its end. False when it has panicked.
    pub(crate) async fn join(self) -> bool {
        match self {
            Self::Thread(thread) => {
                let joined = task::spawn_blocking(move || thread.join().is_ok());
                joined.await.unwrap_or(false)
            }
            Self::Task(task) => task.await.is_ok(),
        }
    }
}

struct Compute {
    engine: Engine,
    /// In the order of their keys: which departed reader is noticed first must not be chance.
    outputs: BTreeMap<SequenceKey, mpsc::Sender<EngineEvent>>,
    outlets: Outlets,
    started: Instant,
    published: Option<WorkerCoefficients>,
    threads: Threads,
}

impl Compute {
    async fn run(mut self, mut commands: mpsc::Receiver<Command>, stop: &CancellationToken) {
        let mut next = Next::Idle;
        while !stop.is_cancelled() {
            if next != Next::Again {
                match wait(&mut commands, next, stop).await {
                    Waited::Command(command) => self.obey(*command),
                    Waited::Time => {}
                    Waited::End => break,
                }
            }
            // No more than are there now: a flood of commands must not keep the step waiting.
            for _ in 0..commands.len() {
                match commands.try_recv() {
                    Ok(command) => self.obey(command),
                    Err(_) => break,
                }
            }
            self.drop_departed();
            next = self.step().await;
        }
    }

    fn now(&self) -> f64 {
        self.started.elapsed().as_secs_f64() * 1e3
    }

    async fn step(&mut self) -> Next {
        let begun_at = Instant::now();
        let begun = self.engine.begin(self.now());
        let next = begun.next;
        self.deliver(begun);
        if next != Next::Again {
            return next;
        }
        let shape = self.engine.planned();
        let now = self.now();
        let forwarded = self.engine.forward();
        if let Some(modelled) = forwarded.modelled() {
            let whole = Duration::from_secs_f64(modelled.max(0.0) / 1e3);
            pass(self.threads, whole.saturating_sub(begun_at.elapsed())).await;
        }
        let computed = self.engine.conclude(forwarded, now);
        self.engine.step_over();
        self.outlets.metrics.step(shape, computed.duration / 1e3);
        let next = computed.next;
        self.deliver(computed);
        self.publish();
        next
    }

    fn obey(&mut self, command: Command) {
        match command {
            Command::Submit {
                mut request,
                events,
                reply,
            } => {
                let now = self.now();
                request.deadline = request.deadline.map(|after| now + after);
                let answer = self.engine.submit(*request, now);
                if let Ok(admitted) = &answer {
                    self.outputs.insert(admitted.key, events);
                    self.outlets.changed.notify_one();
                }
                let key = answer.as_ref().ok().map(|admitted| admitted.key);
                if reply.send(answer).is_err()
                    && let Some(key) = key
                {
                    // Whoever asked has gone meanwhile; the blocks went with the answer.
                    self.cancel(key);
                }
            }
            Command::Attach {
                key,
                reservation,
                first_token,
            } => {
                self.engine
                    .attach(key, reservation, first_token, self.now());
            }
            Command::Recompute {
                key,
                reservation,
                first_token,
            } => {
                self.engine
                    .recompute(key, reservation, first_token, self.now());
            }
            Command::Cancel { key, done } => {
                self.cancel(key);
                // Nobody waits any more: fine.
                let _ = done.send(());
            }
        }
    }

    fn cancel(&mut self, key: SequenceKey) {
        self.outputs.remove(&key);
        if self.engine.cancel(key) {
            self.outlets.changed.notify_one();
        }
    }

    fn drop_departed(&mut self) {
        let departed: Vec<SequenceKey> = self
            .outputs
            .iter()
            .filter(|(_, events)| events.is_closed())
            .map(|(key, _)| *key)
            .collect();
        for key in departed {
            self.cancel(key);
        }
    }

    fn deliver(&mut self, outcome: StepOutcome) {
        for (key, event) in outcome.events {
            let last = event.is_last();
            let Some(events) = self.outputs.get(&key) else {
                continue;
            };
            let slow = events.try_send(event).is_err();
            if last {
                self.outputs.remove(&key);
                self.outlets.changed.notify_one();
            } else if slow {
                tracing::warn!(
                    sequence = key.0,
                    "operation cancelled: its reader is gone or leaves {EVENTS} events unread"
                );
                self.cancel(key);
            }
        }
    }

    fn publish(&mut self) {
        let now = self.engine.coefficients();
        if self
            .published
            .is_none_or(|before| differs_materially(&before, &now))
        {
            self.published = Some(now);
            self.outlets.coefficients.send_replace(now);
        }
    }
}

/// Lets modelled time pass.
async fn pass(threads: Threads, rest: Duration) {
    match threads {
        // The thread is its own, and a runtime's timers are a millisecond late.
        Threads::Machine => thread::sleep(rest),
        Threads::Absent => {
            tokio::time::sleep(rest).await;
            // Also after a step of no time: others have to get their turn.
            task::yield_now().await;
        }
    }
}

enum Waited {
    Command(Box<Command>),
    Time,
    End,
}

async fn wait(
    commands: &mut mpsc::Receiver<Command>,
    next: Next,
    stop: &CancellationToken,
) -> Waited {
    tokio::select! {
        biased;
        () = stop.cancelled() => Waited::End,
        command = commands.recv() => match command {
            Some(command) => Waited::Command(Box::new(command)),
            None => Waited::End,
        },
        () = tokio::time::sleep(WATCHFULNESS), if next == Next::Wait => Waited::Time,
    }
}

/// More than the noise of a fit: a twentieth of any constant, or twice the samples.
fn differs_materially(before: &WorkerCoefficients, now: &WorkerCoefficients) -> bool {
    let moved = |before: f64, now: f64| (now - before).abs() > 0.05 * before.abs().max(1e-12);
    now.samples.total() >= before.samples.total().saturating_mul(2).max(1)
        && now.samples != before.samples
        || moved(before.a, now.a)
        || moved(before.b, now.b)
        || moved(before.k, now.k)
        || moved(before.floor, now.floor)
        || moved(before.d0, now.d0)
        || moved(before.d1, now.d1)
        || moved(before.d2, now.d2)
        || before
            .upper
            .prefill
            .iter()
            .chain(&before.upper.decode)
            .zip(now.upper.prefill.iter().chain(&now.upper.decode))
            .any(|(before, now)| moved(*before, *now))
}
