//! Plays one case: brings each of its attempts to a phase and lets it fail there, and reads the run to its end; [`judge`] looks
//! at the rest. [`limits`] has what passes meanwhile, and what does not.

mod judge;
mod limits;

use std::collections::HashMap;

use baton_protocol::card::Card;
use baton_protocol::identity::Fact;
use baton_protocol::ids::Incarnation;
use baton_protocol::lifecycle::State;
use baton_protocol::wire::{
    self, decode_event::Event, decode_request::Message, prefill_event::Event as Report, watch_event,
};
use baton_router::openai::error::ApiError;
use baton_router::run::{Mode, RunEvent, RunHandle};

use self::limits::{policy, shortest};
use super::{Attempt, How, Phase, Played, Then, Way};
use crate::double::{ARTIFACT, Calls, Double, OpenDecode, OpenPrefill};
use crate::obedient::{finished, lease, recompute, token, transfer_completed, transfer_started};
use crate::router::{PROMPT, Router, SOON, outcome};
use crate::samples;
use crate::steady::steady;

/// New tokens of a whole answer: more than all attempts of a case send.
const ANSWER: u32 = 12;

fn card(name: &str, incarnation: u64, case: &Played) -> Card {
    let mut card = if name.starts_with('p') {
        samples::prefill_card(name)
    } else {
        samples::card(name)
    };
    card.incarnation = Incarnation(incarnation);
    if case.how == How::NoPair && name.starts_with('p') {
        card.identity.kv_dtype = Fact::observed("F32".into());
        card.kv_identity = card.identity.digest();
    }
    if case.how == How::TooLarge {
        card.capacity.blocks = 2;
    }
    card
}

struct Scene {
    case: Played,
    router: Router,
    /// d1, d2, p1, p2: in the order of the fleet, so that the first of each is taken first.
    workers: Vec<Double>,
    calls: Calls,
    run: RunHandle,
    /// Tokens that the client has.
    tokens: Vec<u32>,
    /// How often the run has entered each state.
    entered: HashMap<State, u32>,
    /// Who was asked for what, oldest first.
    asked: Vec<Asked>,
}

struct Asked {
    /// Position in the scene's workers.
    worker: usize,
    operation: String,
    decodes: bool,
}

/// How far an attempt has come.
#[derive(Default)]
struct Reached {
    decode: Option<OpenDecode>,
    prefill: Option<OpenPrefill>,
    last: Option<Said>,
}

/// What a worker said last.
#[derive(Clone)]
enum Said {
    Decode(Event),
    Prefill(Report),
}

impl Reached {
    /// Waits until the router has let go of what is still open.
    async fn let_go(self) {
        if let Some(decode) = self.decode {
            decode.answers.closed().await;
        }
        if let Some(prefill) = self.prefill {
            prefill.events.closed().await;
        }
    }
}

pub(super) async fn play(case: Played) {
    steady(shortest(&policy(&case)), async || {
        let whole = tokio::time::timeout(2 * SOON, through(case)).await;
        assert!(
            whole.is_ok(),
            "{case:?}: something is waited for that never comes"
        );
    })
    .await;
}

async fn through(case: Played) {
    let mut scene = Scene::begin(case).await;
    let mut reached = Reached::default();
    let attempts = case.attempts();
    for (number, attempt) in (1..).zip(&attempts) {
        scene.reach(attempt, &mut reached).await;
        if number == attempts.len() {
            // From now on all is served: the next attempts go well.
            scene.workers.iter().for_each(Double::obey);
        }
        scene.fail(attempt, &mut reached).await;
    }
    scene.ends(reached).await;
    scene.judge().await;
}

impl Scene {
    async fn begin(case: Played) -> Self {
        let mut workers = Vec::new();
        for (name, incarnation) in [("d1", 1), ("d2", 2), ("p1", 3), ("p2", 4)] {
            workers.push(Double::start(card(name, incarnation, &case), ARTIFACT).await);
        }
        let router = Router::start(&policy(&case), &workers.iter().collect::<Vec<_>>());
        router.ready(workers.len()).await;
        let calls = Double::direct_all(&workers);
        if case.phase == Phase::Accepted {
            workers.iter().for_each(Double::obey);
        }
        if matches!(case.how, How::QueuesFull { .. })
            || case.how == How::ClientLeaves && case.phase == Phase::Accepted
        {
            queues(&router, &workers, 1_000).await;
        }
        if case.how == How::WaitsForPrefill {
            for worker in &workers[2..] {
                let load = wire::Load {
                    load_sequence: 2,
                    draining: true,
                    ..wire::Load::default()
                };
                worker.tell(0, watch_event::Event::Load(load));
            }
            crate::router::until("they drain", || router.dispatcher.workers_ready() == 2).await;
        }
        let mode = if case.first.is_remote() {
            Mode::Disaggregated
        } else {
            Mode::Aggregated
        };
        let run = router.start_run(mode, ANSWER);
        Self {
            case,
            router,
            workers,
            calls,
            run,
            tokens: Vec::new(),
            entered: HashMap::new(),
            asked: Vec::new(),
        }
    }

    /// Brings an attempt to its phase, one report after the other; each has been taken before the next is made.
    async fn reach(&mut self, attempt: &Attempt, reached: &mut Reached) {
        let phases = attempt.way.phases().iter();
        for &phase in phases.filter(|phase| **phase <= attempt.phase) {
            // The run is accepted once.
            if phase != Phase::Accepted || self.asked.is_empty() {
                self.enter(attempt.way, phase, reached).await;
            }
        }
    }

    async fn enter(&mut self, way: Way, phase: Phase, reached: &mut Reached) {
        let local = !way.is_remote();
        match phase {
            Phase::Accepted => self.enters(State::Accepted).await,
            Phase::RouteSelected if way == Way::Recompute => {
                let heard = self.hears(reached).await;
                assert!(matches!(heard, Message::Recompute(_)), "{:?}", self.case);
            }
            Phase::RouteSelected => {
                // Nothing of the attempt before is held any more.
                std::mem::take(reached).let_go().await;
                let mut call = self.calls.decodes.recv().await.unwrap();
                let start = call.requests.message().await.unwrap().unwrap();
                let Some(Message::Start(start)) = start.message else {
                    panic!("{:?}: start comes first", self.case);
                };
                assert_eq!(start.handoff, !local, "{:?}", self.case);
                // It goes on after what was sent.
                assert_eq!(start.generated as usize, self.tokens.len());
                self.asked(&call.worker, start.operation, true);
                reached.decode = Some(call);
            }
            Phase::Reserved => {
                self.say(reached, Event::Reserved(wire::Admission::default()))
                    .await;
                if !local {
                    let call = self.calls.prefills.recv().await.unwrap();
                    assert_eq!(call.request.sample_first, way == Way::FirstByPrefill);
                    self.asked(&call.worker, call.request.operation.clone(), false);
                    reached.prefill = Some(call);
                }
            }
            Phase::Leased => {
                report(reached, lease()).await;
                let heard = self.hears(reached).await;
                assert!(matches!(heard, Message::Descriptor(_)), "{:?}", self.case);
            }
            Phase::PrefillStarted => {
                let started = wire::Started::default();
                if local {
                    self.say(reached, Event::PrefillStarted(started)).await;
                } else {
                    report(reached, Report::Started(started)).await;
                }
                self.enters(State::PrefillStarted).await;
            }
            Phase::TransferStarted => {
                self.say(reached, transfer_started()).await;
                self.enters(State::KvTransferStarted).await;
            }
            Phase::PrefillCompleted => {
                if local {
                    let done = Event::PrefillCompleted(wire::PrefillDone::default());
                    self.say(reached, done).await;
                } else {
                    report(reached, Report::FirstToken(token(self.position()))).await;
                    let heard = self.hears(reached).await;
                    assert!(matches!(heard, Message::FirstToken(_)), "{:?}", self.case);
                    self.reads().await;
                }
                self.enters(State::PrefillCompleted).await;
            }
            Phase::Published => {
                report(reached, Report::Sealed(wire::Sealed::default())).await;
                if way == Way::FirstByDecode {
                    self.enters(State::PrefillCompleted).await;
                }
                self.enters(State::KvPublished).await;
            }
            Phase::TransferCompleted => {
                self.say(reached, transfer_completed()).await;
                self.enters(State::KvTransferCompleted).await;
            }
            Phase::DecodeStarted => {
                let started = Event::DecodeStarted(wire::Started::default());
                self.say(reached, started).await;
                self.enters(State::DecodeStarted).await;
            }
            Phase::Streaming => {
                for _ in 0..2 {
                    let next = Event::Token(token(self.position()));
                    self.say(reached, next).await;
                    self.reads().await;
                }
            }
        }
    }

    /// Waits until the run has entered the state once more.
    async fn enters(&mut self, state: State) {
        let times = self.entered.entry(state).or_default();
        *times += 1;
        self.router.entered(state, *times).await;
    }

    fn asked(&mut self, worker: &str, operation: Option<wire::Operation>, decodes: bool) {
        let known = self.workers.iter().position(|known| known.name == worker);
        self.asked.push(Asked {
            worker: known.unwrap(),
            operation: operation.unwrap().id,
            decodes,
        });
    }

    /// Position of the token that is next.
    fn position(&self) -> u32 {
        PROMPT + u32::try_from(self.tokens.len()).unwrap()
    }

    async fn say(&self, reached: &mut Reached, event: Event) {
        reached.last = Some(Said::Decode(event.clone()));
        let decode = reached.decode.as_ref().unwrap();
        decode.answers.send(event).await;
    }

    /// The next message to the worker that decodes.
    async fn hears(&self, reached: &mut Reached) -> Message {
        let decode = reached.decode.as_mut().unwrap();
        let message = decode.requests.message().await.unwrap().unwrap();
        message.message.unwrap()
    }

    /// The client reads one token.
    async fn reads(&mut self) {
        match self.run.next().await {
            Some(RunEvent::Token { id, .. }) => self.tokens.push(id),
            other => panic!("{:?}: no token but {other:?}", self.case),
        }
    }

    async fn fail(&mut self, attempt: &Attempt, reached: &mut Reached) {
        let refused = |reason: &str| wire::Refused {
            reason: reason.to_owned(),
            message: "not now".to_owned(),
            ..wire::Refused::default()
        };
        let failed = || wire::Failed {
            class: "bug".to_owned(),
            message: "it broke".to_owned(),
        };
        match attempt.how {
            How::QueuesFull { for_good: false } => {
                queues(&self.router, &self.workers, 0).await;
            }
            How::QueuesFull { .. } | How::NoPair | How::TooLarge | How::WaitsForPrefill => {}
            How::DecodeRefuses(reason) => {
                self.say(reached, Event::Refused(refused(reason))).await;
            }
            How::PrefillRefuses(reason) => {
                report(reached, Report::Refused(refused(reason))).await;
            }
            How::DecodeBreaks => reached.decode.as_ref().unwrap().answers.fail().await,
            How::DecodeCloses => reached.decode = None,
            How::DecodeFails => self.say(reached, Event::Failed(failed())).await,
            How::DecodeStops => {
                let stopped = finished(wire::FinishReason::Cancelled);
                self.say(reached, stopped).await;
            }
            How::PrefillBreaks => reached.prefill.as_ref().unwrap().events.fail().await,
            How::PrefillCloses => reached.prefill = None,
            How::PrefillFails => report(reached, Report::Failed(failed())).await,
            How::TransferFails(cause) => {
                let failed = wire::TransferFailed {
                    cause: cause.to_owned(),
                    message: "it is not what it should be".to_owned(),
                    verified_blocks: 1,
                    left: Vec::new(),
                };
                self.say(reached, Event::TransferFailed(failed)).await;
            }
            How::TransferSlow | How::DecodeSilent | How::PrefillSilent | How::RunOverdue => {}
            How::ClientLeaves => {
                let (_, gone) = baton_router::run::channel("gone".into());
                let id = self.run.run.clone();
                drop(std::mem::replace(&mut self.run, gone));
                self.run.run = id;
            }
            How::TokenOutOfPlace => {
                let late = Event::Token(token(self.position() + 1));
                self.say(reached, late).await;
            }
            How::Repeats => match reached.last.clone().unwrap() {
                Said::Decode(event) => self.say(reached, event).await,
                Said::Prefill(again) => report(reached, again).await,
            },
        }
    }

    /// The worker that decodes obeys when it is told to compute what it was to read.
    fn recomputes(&self, reached: &mut Reached) {
        let OpenDecode {
            requests, answers, ..
        } = reached.decode.take().unwrap();
        let position = self.position();
        tokio::spawn(recompute(requests, answers, position, PROMPT + ANSWER));
    }

    /// Reads the run to its end, with what the workers hold still open.
    async fn ends(&mut self, mut reached: Reached) {
        let case = self.case;
        if case.then == Then::Cancelled {
            self.router.entered(State::Cancelled, 1).await;
            return reached.let_go().await;
        }
        if case.then == Then::Recomputed {
            self.recomputes(&mut reached);
        }
        let (_, spent) = baton_router::run::channel(self.run.run.clone());
        let (more, last) = outcome(std::mem::replace(&mut self.run, spent)).await;
        self.tokens.extend(more);
        match (case.then, last) {
            (
                Then::Served { .. } | Then::Recomputed | Then::ComputedWhole,
                RunEvent::Finished { usage, .. },
            ) => {
                let whole: Vec<u32> = (PROMPT..PROMPT + ANSWER).map(|at| token(at).id).collect();
                assert_eq!(self.tokens, whole, "{case:?}");
                assert_eq!(usage.output_tokens, ANSWER, "{case:?}");
            }
            (
                Then::Told {
                    status,
                    code,
                    retry_after,
                    says,
                },
                RunEvent::Failed(failure),
            ) => {
                let retried = failure.retry_after_seconds.is_some();
                assert_eq!(retried, retry_after, "{case:?}");
                let error = ApiError::from(failure);
                assert_eq!(
                    (error.status, error.code.as_deref()),
                    (status, Some(code)),
                    "{case:?}: {error:?}"
                );
                assert_eq!(error.retry_after_seconds.is_some(), retry_after, "{case:?}");
                assert!(error.message.contains(says), "{case:?}: {error:?}");
                // What was sent is what would have been sent.
                for (at, id) in (PROMPT..).zip(&self.tokens) {
                    assert_eq!(*id, token(at).id, "{case:?}");
                }
            }
            (_, other) => panic!("{case:?}: it ended with {other:?}"),
        }
        reached.let_go().await;
    }
}

/// Lets every worker report so many waiting requests.
async fn queues(router: &Router, workers: &[Double], queued_sequences: u32) {
    for worker in workers {
        let load = wire::Load {
            load_sequence: 2,
            queued_sequences,
            ..wire::Load::default()
        };
        worker.tell(0, watch_event::Event::Load(load));
    }
    let told = || {
        router.workers.with_tracked(|tracked| {
            let mut loads = tracked.values().filter_map(|worker| worker.load.as_ref());
            loads.all(|load| load.queued_sequences == queued_sequences)
        })
    };
    crate::router::until("the load is known", told).await;
}

async fn report(reached: &mut Reached, report: Report) {
    reached.last = Some(Said::Prefill(report.clone()));
    let prefill = reached.prefill.as_ref().unwrap();
    prefill.events.send(report).await;
}
