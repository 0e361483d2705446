//! Plays one case: brings a run to its phase, lets it fail, and reads it to its end; [`judge`] looks at the rest.

mod judge;

use baton_placement::policy::{FirstToken, NoPrefillAction, Overrides, Policy};
use baton_protocol::card::Card;
use baton_protocol::identity::Fact;
use baton_protocol::ids::Incarnation;
use baton_protocol::lifecycle::State;
use baton_protocol::wire::{
    self, decode_event::Event, decode_request::Message, prefill_event::Event as Report, watch_event,
};
use baton_router::run::{Mode, RunEvent, RunHandle};

use super::{How, Phase, Played, Then, Way};
use crate::double::{ARTIFACT, Calls, Double, OpenDecode, OpenPrefill};
use crate::obedient::{finished, lease, recompute, token, transfer_completed, transfer_started};
use crate::router::{PROMPT, Router, SOON, outcome};
use crate::samples;

/// New tokens of a whole answer.
const ANSWER: u32 = 6;
/// What a deadline is set to that is to pass.
const SHORT: f64 = 0.5;

fn policy(case: &Played) -> Policy {
    let mut policy = Policy {
        overrides: Overrides::Allowed,
        first_token: match case.way {
            Way::FirstByDecode => FirstToken::Decode,
            Way::Local | Way::FirstByPrefill => FirstToken::Prefill,
        },
        ..Policy::new("chat", "m", &["p"], &["d"])
    };
    let timeouts = &mut policy.timeouts;
    match case.how {
        How::DecodeSilent => match case.phase {
            Phase::RouteSelected => timeouts.reserve_seconds = SHORT,
            Phase::Reserved => timeouts.prefill_start_seconds = SHORT,
            Phase::PrefillStarted => timeouts.prefill_seconds = SHORT,
            Phase::PrefillCompleted | Phase::TransferCompleted => {
                timeouts.decode_start_seconds = SHORT;
            }
            _ => timeouts.token_seconds = SHORT,
        },
        How::PrefillSilent if case.phase == Phase::Reserved => {
            timeouts.prefill_start_seconds = SHORT;
        }
        How::PrefillSilent => timeouts.prefill_seconds = SHORT,
        How::TransferSlow => timeouts.transfer_seconds = SHORT,
        How::QueuesFull { for_good: true } => timeouts.reserve_seconds = SHORT,
        How::RunOverdue => timeouts.total_seconds = 4.0 * SHORT,
        How::WaitsForPrefill => {
            timeouts.total_seconds = 2.0 * SHORT;
            policy.on_no_prefill.action = NoPrefillAction::Queue;
        }
        _ => {}
    }
    policy
}

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
    decode: Calls,
    prefill: Calls,
    run: RunHandle,
    /// Tokens that the client has.
    tokens: Vec<u32>,
}

/// How far a scene has come.
#[derive(Default)]
struct Reached {
    decode: Option<OpenDecode>,
    prefill: Option<OpenPrefill>,
    /// What the worker that decodes said last.
    last: Option<Event>,
}

pub(super) async fn play(case: Played) {
    let whole = tokio::time::timeout(2 * SOON, through(case)).await;
    assert!(
        whole.is_ok(),
        "{case:?}: something is waited for that never comes"
    );
}

async fn through(case: Played) {
    let mut scene = Scene::begin(case).await;
    let reached = scene.reach().await;
    scene.fail(reached).await;
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
        for worker in &workers {
            worker.obey();
        }
        let (decode, prefill) = (workers[0].direct(), workers[2].direct());
        if case.phase == Phase::Accepted {
            workers[0].obey();
            workers[2].obey();
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
        let mode = match case.way {
            Way::Local => Mode::Aggregated,
            Way::FirstByPrefill | Way::FirstByDecode => Mode::Disaggregated,
        };
        let run = router.start_run(mode, ANSWER);
        Self {
            case,
            router,
            workers,
            decode,
            prefill,
            run,
            tokens: Vec::new(),
        }
    }

    /// Brings the run to its phase, one report after the other; each has been taken before the next is made.
    async fn reach(&mut self) -> Reached {
        let mut reached = Reached::default();
        let (way, until) = (self.case.way, self.case.phase);
        for &phase in way.phases().iter().filter(|phase| **phase <= until) {
            self.enter(phase, &mut reached).await;
        }
        // From now on all is served: the next attempts go well.
        self.workers[0].obey();
        self.workers[2].obey();
        reached
    }

    async fn enter(&mut self, phase: Phase, reached: &mut Reached) {
        let local = self.case.way == Way::Local;
        match phase {
            Phase::Accepted => self.router.entered(State::Accepted, 1).await,
            Phase::RouteSelected => {
                let mut call = self.decode.decodes.recv().await.unwrap();
                let start = call.requests.message().await.unwrap().unwrap();
                let Some(Message::Start(start)) = start.message else {
                    panic!("{:?}: start comes first", self.case);
                };
                assert_eq!(start.handoff, !local, "{:?}", self.case);
                reached.decode = Some(call);
            }
            Phase::Reserved => {
                self.say(reached, Event::Reserved(wire::Admission::default()))
                    .await;
                if !local {
                    let call = self.prefill.prefills.recv().await.unwrap();
                    assert_eq!(
                        call.request.sample_first,
                        self.case.way == Way::FirstByPrefill
                    );
                    reached.prefill = Some(call);
                }
            }
            Phase::PrefillStarted if local => {
                let started = Event::PrefillStarted(wire::Started::default());
                self.say(reached, started).await;
                self.router.entered(State::PrefillStarted, 1).await;
            }
            Phase::PrefillStarted => {
                report(reached, lease()).await;
                report(reached, Report::Started(wire::Started::default())).await;
                let heard = self.hears(reached).await;
                assert!(matches!(heard, Message::Descriptor(_)), "{:?}", self.case);
                self.router.entered(State::PrefillStarted, 1).await;
            }
            Phase::TransferStarted => {
                self.say(reached, transfer_started()).await;
                self.router.entered(State::KvTransferStarted, 1).await;
            }
            Phase::PrefillCompleted if local => {
                let done = Event::PrefillCompleted(wire::PrefillDone::default());
                self.say(reached, done).await;
                self.router.entered(State::PrefillCompleted, 1).await;
            }
            Phase::PrefillCompleted => {
                report(reached, Report::FirstToken(token(PROMPT))).await;
                let heard = self.hears(reached).await;
                assert!(matches!(heard, Message::FirstToken(_)), "{:?}", self.case);
                self.reads().await;
            }
            Phase::Published => {
                report(reached, Report::Sealed(wire::Sealed::default())).await;
                self.router.entered(State::KvPublished, 1).await;
            }
            Phase::TransferCompleted => {
                self.say(reached, transfer_completed()).await;
                self.router.entered(State::KvTransferCompleted, 1).await;
            }
            Phase::DecodeStarted => {
                let started = Event::DecodeStarted(wire::Started::default());
                self.say(reached, started).await;
                self.router.entered(State::DecodeStarted, 1).await;
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

    /// Position of the token that is next.
    fn position(&self) -> u32 {
        PROMPT + u32::try_from(self.tokens.len()).unwrap()
    }

    async fn say(&self, reached: &mut Reached, event: Event) {
        reached.last = Some(event.clone());
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

    async fn fail(&mut self, mut reached: Reached) {
        let case = self.case;
        let refused = |reason: &str| wire::Refused {
            reason: reason.to_owned(),
            message: "not now".to_owned(),
            ..wire::Refused::default()
        };
        let failed = || wire::Failed {
            class: "bug".to_owned(),
            message: "it broke".to_owned(),
        };
        match case.how {
            How::QueuesFull { for_good: false } => {
                queues(&self.router, &self.workers, 0).await;
            }
            How::QueuesFull { .. } | How::NoPair | How::TooLarge | How::WaitsForPrefill => {}
            How::DecodeRefuses(reason) => {
                self.say(&mut reached, Event::Refused(refused(reason)))
                    .await;
            }
            How::PrefillRefuses(reason) => {
                report(&reached, Report::Refused(refused(reason))).await;
            }
            How::DecodeBreaks => reached.decode.as_ref().unwrap().answers.fail().await,
            How::DecodeCloses => reached.decode = None,
            How::DecodeFails => self.say(&mut reached, Event::Failed(failed())).await,
            How::DecodeStops => {
                let stopped = finished(wire::FinishReason::Cancelled);
                self.say(&mut reached, stopped).await;
            }
            How::PrefillBreaks => reached.prefill.as_ref().unwrap().events.fail().await,
            How::PrefillCloses => reached.prefill = None,
            How::PrefillFails => report(&reached, Report::Failed(failed())).await,
            How::TransferFails(cause) => {
                let failed = wire::TransferFailed {
                    cause: cause.to_owned(),
                    message: "it is not what it should be".to_owned(),
                    verified_blocks: 1,
                    left: Vec::new(),
                };
                self.say(&mut reached, Event::TransferFailed(failed)).await;
                self.recomputes(&mut reached);
            }
            How::TransferSlow => self.recomputes(&mut reached),
            How::DecodeSilent | How::PrefillSilent | How::RunOverdue => {}
            How::ClientLeaves => {
                let (_, gone) = baton_router::run::channel("gone".into());
                let id = self.run.run.clone();
                drop(std::mem::replace(&mut self.run, gone));
                self.run.run = id;
            }
            How::TokenOutOfPlace => {
                let late = Event::Token(token(self.position() + 1));
                self.say(&mut reached, late).await;
            }
            How::Repeats => {
                let again = reached.last.clone().unwrap();
                if case.phase == Phase::Published {
                    report(&reached, Report::Sealed(wire::Sealed::default())).await;
                } else {
                    self.say(&mut reached, again).await;
                }
            }
        }
        self.ends(reached).await;
    }

    /// The worker that decodes obeys when it is told to compute what it was to read.
    fn recomputes(&self, reached: &mut Reached) {
        let OpenDecode { requests, answers } = reached.decode.take().unwrap();
        let position = self.position();
        tokio::spawn(recompute(requests, answers, position, PROMPT + ANSWER));
    }

    /// Reads the run to its end, with what the workers hold still open.
    async fn ends(&mut self, reached: Reached) {
        let case = self.case;
        if case.then == Then::Cancelled {
            self.router.entered(State::Cancelled, 1).await;
            drop(reached);
            return;
        }
        let (_, spent) = baton_router::run::channel(self.run.run.clone());
        let (more, last) = outcome(std::mem::replace(&mut self.run, spent)).await;
        self.tokens.extend(more);
        match (case.then, last) {
            (Then::Served { .. } | Then::Recomputed, RunEvent::Finished { usage, .. }) => {
                let whole: Vec<u32> = (PROMPT..PROMPT + ANSWER).map(|at| token(at).id).collect();
                assert_eq!(self.tokens, whole, "{case:?}");
                assert_eq!(usage.output_tokens, ANSWER, "{case:?}");
            }
            (
                Then::Told {
                    status,
                    code,
                    retry_after,
                },
                RunEvent::Failed(failure),
            ) => {
                assert_eq!(
                    (failure.status, failure.code),
                    (status, code),
                    "{case:?}: {failure:?}"
                );
                assert_eq!(
                    failure.retry_after_seconds.is_some(),
                    retry_after,
                    "{case:?}"
                );
                // What was sent is what would have been sent.
                for (at, id) in (PROMPT..).zip(&self.tokens) {
                    assert_eq!(*id, token(at).id, "{case:?}");
                }
            }
            (_, other) => panic!("{case:?}: it ended with {other:?}"),
        }
        drop(reached);
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

async fn report(reached: &Reached, report: Report) {
    let prefill = reached.prefill.as_ref().unwrap();
    prefill.events.send(report).await;
}
