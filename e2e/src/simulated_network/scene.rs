//! One seed, played to its end: hosts are started, requests asked, faults made and mended, and what must hold then is looked at.

use std::cell::{Cell, RefCell};
use std::panic;
use std::rc::Rc;
use std::sync::{Arc, Once};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use serde_json::Value;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};
use turmoil::Sim;

use super::bank::Bank;
use super::checks;
use super::client::{self, Outcome};
use super::hosts::{Defect, Stage};
use super::plan::{Action, Plan};
use super::{CLIENTS, ROUTER, records};

/// Of simulated time between two looks at the network.
const TICK: Duration = Duration::from_millis(1);
/// Of simulated time: nothing here takes longer.
const LONGEST: Duration = Duration::from_secs(180);

/// What a seed came to.
#[derive(Debug)]
pub struct Report {
    pub outcomes: Vec<Outcome>,
    /// Hash of all that was written to the network, and the number of writes.
    pub trace: (u64, u64),
    /// Simulated.
    pub lasted: Duration,
    pub tally: records::Tally,
}

thread_local! {
    /// What panicked on this thread since the last look. Tasks of a simulated host panic without anybody waiting for them.
    static PANICS: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
}

fn watch_panics() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let before = panic::take_hook();
        panic::set_hook(Box::new(move |panic| {
            PANICS.with_borrow_mut(|panics| panics.push(panic.to_string()));
            before(panic);
        }));
    });
}

/// Plays a plan. With a bank, its answers are compared with the right ones.
///
/// # Errors
/// What did not hold, with what is needed to understand it.
pub fn play(plan: &Plan, bodies: &[Value], bank: Option<&Bank>) -> Result<Report> {
    play_with(plan, bodies, bank, None)
}

/// Plays a plan with a known defect.
///
/// # Errors
/// As of [`play`]; then the defect was noticed.
pub fn play_with(
    plan: &Plan,
    bodies: &[Value],
    bank: Option<&Bank>,
    defect: Option<Defect>,
) -> Result<Report> {
    watch_panics();
    PANICS.take();
    let folder = tempfile::tempdir()?;
    let stage = Arc::new(Stage::new(plan.clone(), folder.path(), defect)?);
    let mut sim = turmoil::Builder::new()
        .rng_seed(plan.seed)
        .tick_duration(TICK)
        .simulation_duration(LONGEST)
        .min_message_latency(Duration::from_micros(100))
        .max_message_latency(Duration::from_millis(plan.latency))
        .repair_rate(0.05)
        .enable_random_order()
        // Segments under way in one direction of one connection.
        .tcp_capacity(4096)
        .build();

    let router = Arc::clone(&stage);
    sim.host(ROUTER, move || {
        let stage = Arc::clone(&router);
        async move { Ok(told(Box::pin(stage.router()).await)?) }
    });
    for worker in &plan.workers {
        let (stage, planned) = (Arc::clone(&stage), worker.clone());
        sim.host(worker.name.as_str(), move || {
            let (stage, planned) = (Arc::clone(&stage), planned.clone());
            async move { Ok(told(Box::pin(stage.worker(planned)).await)?) }
        });
    }
    let begun: Rc<Cell<Option<Duration>>> = Rc::default();
    let outcomes: Rc<RefCell<Vec<Outcome>>> = Rc::default();
    let clients = Clients {
        stage: Arc::clone(&stage),
        bodies: bodies.to_vec(),
        bank: bank.cloned(),
        begun: Rc::clone(&begun),
        outcomes: Rc::clone(&outcomes),
    };
    sim.client(
        CLIENTS,
        async move { Ok(told(Box::pin(clients.run()).await)?) },
    );

    let played = run(&mut sim, plan, &begun);
    let lasted = sim.elapsed();
    // Hosts end here, as processes that are killed.
    drop(sim);
    played?;
    let panics = PANICS.take();
    ensure!(panics.is_empty(), "a task panicked: {}", panics.join("; "));
    let outcomes = outcomes.take();
    let tally = records::check(&stage.state(), &outcomes, stage.router_starts())
        .context("decision records")?;
    Ok(Report {
        outcomes,
        trace: stage.network.trace.digest(),
        lasted,
        tally,
    })
}

/// With its causes: the network passes on no more than one text.
fn told(result: Result<()>) -> Result<(), String> {
    result.map_err(|error| format!("{error:#}"))
}

fn run(sim: &mut Sim<'_>, plan: &Plan, begun: &Cell<Option<Duration>>) -> Result<()> {
    let mut ahead = plan.faults.iter().peekable();
    let mut under_way: Vec<(Duration, &Action)> = Vec::new();
    loop {
        if let Some(begun) = begun.get() {
            let now = sim.elapsed();
            while let Some(fault) =
                ahead.next_if(|fault| begun + Duration::from_millis(fault.at) <= now)
            {
                make(sim, plan, &fault.action);
                under_way.push((now + Duration::from_millis(fault.lasts), &fault.action));
            }
            for (_, action) in under_way.extract_if(.., |(until, _)| *until <= now) {
                mend(sim, plan, action);
            }
        }
        if sim.step().map_err(|error| anyhow!("{error:#}"))? {
            return Ok(());
        }
    }
}

/// Every other host but the clients', whose links are never touched: they are what is judged by.
fn others<'a>(plan: &'a Plan, host: &'a str) -> impl Iterator<Item = &'a str> {
    let workers = plan.workers.iter().map(|worker| worker.name.as_str());
    workers.chain([ROUTER]).filter(move |other| *other != host)
}

fn make(sim: &mut Sim<'_>, plan: &Plan, action: &Action) {
    tracing::info!(?action, "fault");
    match action {
        Action::Cut(one, other) => sim.partition(one.as_str(), other.as_str()),
        Action::CutOneWay(from, to) => sim.partition_oneway(from.as_str(), to.as_str()),
        Action::Hold(one, other) => sim.hold(one.as_str(), other.as_str()),
        Action::Slow(one, other, milliseconds) => sim.set_link_max_message_latency(
            one.as_str(),
            other.as_str(),
            Duration::from_millis(*milliseconds),
        ),
        Action::Lossy(one, other, percent) => {
            sim.set_link_fail_rate(one.as_str(), other.as_str(), *percent as f64 / 100.0);
        }
        Action::Freeze(host) => {
            for other in others(plan, host) {
                sim.hold(host.as_str(), other);
            }
        }
        Action::Kill(host) => sim.crash(host.as_str()),
        Action::Vanish(host) => {
            for other in others(plan, host) {
                sim.partition(host.as_str(), other);
            }
            sim.crash(host.as_str());
        }
    }
}

fn mend(sim: &mut Sim<'_>, plan: &Plan, action: &Action) {
    tracing::info!(?action, "mended");
    match action {
        Action::Cut(one, other) | Action::CutOneWay(one, other) => {
            sim.repair(one.as_str(), other.as_str());
        }
        Action::Hold(one, other) => sim.release(one.as_str(), other.as_str()),
        Action::Slow(one, other, _) => sim.set_link_max_message_latency(
            one.as_str(),
            other.as_str(),
            Duration::from_millis(plan.latency),
        ),
        Action::Lossy(one, other, _) => {
            sim.set_link_fail_rate(one.as_str(), other.as_str(), 0.0);
            sim.repair(one.as_str(), other.as_str());
        }
        Action::Freeze(host) => {
            for other in others(plan, host) {
                sim.release(host.as_str(), other);
            }
        }
        Action::Kill(host) => sim.bounce(host.as_str()),
        Action::Vanish(host) => {
            for other in others(plan, host) {
                sim.repair(host.as_str(), other);
            }
            sim.bounce(host.as_str());
        }
    }
}

/// The host of all clients.
struct Clients {
    stage: Arc<Stage>,
    bodies: Vec<Value>,
    bank: Option<Bank>,
    begun: Rc<Cell<Option<Duration>>>,
    outcomes: Rc<RefCell<Vec<Outcome>>>,
}

impl Clients {
    async fn run(self) -> Result<()> {
        let (stage, plan) = (&self.stage, &self.stage.plan);
        checks::ready(stage)
            .await
            .context("before anything went wrong")?;
        self.begun.set(turmoil::sim_elapsed());
        let zero = Instant::now();
        let mut asked = JoinSet::new();
        for (index, request) in plan.requests.iter().enumerate() {
            let body = self.bodies[request.asks].clone();
            let (network, request) = (stage.network.clone(), request.clone());
            asked.spawn(async move {
                sleep_until(zero + Duration::from_millis(request.at)).await;
                client::ask(&network, index, &request, &body).await
            });
        }
        let mut outcomes = asked.join_all().await;
        outcomes.sort_by_key(|outcome| outcome.request);
        self.outcomes.replace(outcomes.clone());
        let Some(bank) = &self.bank else {
            return Ok(());
        };
        for outcome in &outcomes {
            let context = || format!("request {} of the plan", outcome.request);
            checks::answer(outcome, bank).with_context(context)?;
        }
        sleep_until(zero + Duration::from_millis(plan.healed())).await;
        checks::nothing_left(stage).await?;
        checks::ready(stage).await.context("after all was mended")?;
        checks::serves(stage, bank).await?;
        checks::nothing_left(stage).await.context("at the end")?;
        checks::nothing_known(stage).await.context("at the end")
    }
}
