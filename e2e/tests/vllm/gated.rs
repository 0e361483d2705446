//! A router of a test's own over a fleet's workers, with a gate before each of their servers; and what is asked through it.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use baton_e2e::fleet::Fleet;
use baton_e2e::gate::Gate;
use baton_e2e::http::{Client, Events};
use baton_e2e::interposer::{Changes, Interposer};
use baton_e2e::lone_router::{LoneRouter, control};
use baton_e2e::metrics::Metrics;
use baton_e2e::record::Record;
use baton_e2e::vllm::Server;
use baton_e2e::wait;
use serde_json::Value;

use super::equal::{Answered, Question, ask, same};

pub(crate) const REMOTE: Option<&str> = Some("Disaggregated");
/// Daemons read their servers' counters once a second.
const COUNTED: Duration = Duration::from_secs(30);
/// A link that was shut is tried again after the policy's ten seconds, or sixty where a test has to find it shut, and after twice as long
/// where that fails; a worker that came back is known within one or two.
pub(crate) const OPEN_AGAIN: Duration = Duration::from_secs(300);
pub(crate) const FAILED_TRANSFERS: &str = "baton_engine_failed_transfers_total";

pub(crate) struct Gated {
    pub(crate) router: LoneRouter,
    /// Before the server that prefills.
    pub(crate) prefill: Gate,
    /// Before the one that decodes.
    pub(crate) decode: Gate,
    _stand_ins: [Interposer; 2],
}

impl Gated {
    /// # Errors
    /// The router does not start.
    pub(crate) async fn over(fleet: &Fleet) -> Result<Self> {
        let (prefill, first) = gate(fleet, "prefill").await?;
        let (decode, second) = gate(fleet, "decode").await?;
        let router = LoneRouter::between(fleet, &[&first, &second]).await?;
        Ok(Self {
            router,
            prefill,
            decode,
            _stand_ins: [first, second],
        })
    }

    /// Asks for a hand-off.
    ///
    /// # Errors
    /// There is no answer.
    pub(crate) async fn ask(&self, question: &Question) -> Result<Answered> {
        Box::pin(ask(&self.router.api, question, REMOTE)).await
    }

    /// # Errors
    /// There is none.
    pub(crate) async fn record(&self, answered: &Answered) -> Result<Record> {
        Record::of(&self.router.admin, answered.run()?).await
    }

    /// Waits until the router has counted one at least.
    ///
    /// # Errors
    /// It has not.
    pub(crate) async fn counts(&self, counter: &str) -> Result<()> {
        counts_more(&self.router.admin, counter, 0.0).await
    }

    /// Asks and hangs up at a moment, before which there must be no whole answer; what was recorded of it.
    ///
    /// # Errors
    /// The moment does not come.
    pub(crate) async fn hung_up(
        &self,
        question: &Question,
        request: &str,
        moment: impl Future<Output = Result<()>>,
    ) -> Result<Record> {
        let record = self
            .hung_up_before_the_end(question, request, moment)
            .await?;
        record.with_context(|| format!("{request}: it was answered before"))
    }

    /// The same of a moment that the whole answer may come before: `None` then.
    ///
    /// # Errors
    /// The moment does not come.
    pub(crate) async fn hung_up_before_the_end(
        &self,
        question: &Question,
        request: &str,
        moment: impl Future<Output = Result<()>>,
    ) -> Result<Option<Record>> {
        let answered = async {
            let mut events = self.open(question, request).await?;
            while events.next().await?.is_some() {}
            anyhow::Ok(false)
        };
        let come = async { moment.await.map(|()| true) };
        let caught = tokio::select! {
            answered = answered => answered,
            come = come => come,
        }?;
        if !caught {
            return Ok(None);
        }
        let record = Record::of_request(&self.router.admin, request).await?;
        Ok(Some(record))
    }

    /// Asks for a stream.
    ///
    /// # Errors
    /// It does not begin.
    pub(crate) async fn open(&self, question: &Question, request: &str) -> Result<Events> {
        open(&self.router.api, question, request).await
    }

    /// Two workers may hand over now; what there is otherwise.
    async fn has_pair(&self) -> Result<(), String> {
        has_pair(&self.router.view().await)
    }

    /// Waits until two workers may hand over.
    ///
    /// # Errors
    /// None may.
    pub(crate) async fn may_hand_over(&self) -> Result<()> {
        wait::until("a pair is in use", OPEN_AGAIN, async || {
            self.has_pair().await
        })
        .await
    }

    /// The next questions are answered as the decode server answers them alone, until one of them was handed over.
    ///
    /// # Errors
    /// One is answered otherwise, or none is handed over.
    pub(crate) async fn hands_over(
        &self,
        fleet: &Fleet,
        numbers: std::ops::Range<usize>,
    ) -> Result<Record> {
        let decode = Server::of(fleet, "decode")?;
        let mut numbers = numbers;
        wait::until("a prompt is handed over", OPEN_AGAIN, async || {
            let words = |error: anyhow::Error| format!("{error:#}");
            self.has_pair().await?;
            let number = numbers.next().ok_or("no question is left")?;
            let question = Question::completion(super::equal::prompt(number, 40));
            let through = self.ask(&question).await.map_err(words)?;
            let direct = question.clone().salted("direct");
            let direct = Box::pin(ask(&decode.client, &direct, None)).await;
            // Not one wrong answer on the way: that ends the test.
            let checked = direct.and_then(|direct| same(&question, &direct, &through));
            if let Err(error) = checked {
                return Ok(Err(error));
            }
            let record = self.record(&through).await.map_err(words)?;
            let kept = record.kind().is_ok_and(|kind| kind == "Remote");
            if kept && record.0["fallback"].is_null() {
                return Ok(Ok(record));
            }
            Err(record.text("explanation").to_owned())
        })
        .await?
    }
}

/// Asks a router for a stream, and for a hand-off.
///
/// # Errors
/// It does not begin.
pub(crate) async fn open(api: &Client, question: &Question, request: &str) -> Result<Events> {
    let headers = [("x-baton-mode", "Disaggregated"), ("x-request-id", request)];
    let question = question.clone().with("stream", true);
    let open = api.open(question.path, &headers, &question.body);
    Ok(open.await?.events())
}

/// Two workers may hand over, as a router has just said; what there is otherwise.
///
/// # Errors
/// None may.
pub(crate) fn has_pair(view: &Result<Value>) -> Result<(), String> {
    let view = view.as_ref().map_err(|error| format!("{error:#}"))?;
    let pairs = view["pairs"].as_array().ok_or("no pairs")?;
    let usable = |pair: &Value| pair["compatible"] == true && pair["breaker"] != "Open";
    if pairs.iter().any(usable) {
        Ok(())
    } else {
        Err(format!("{pairs:?}"))
    }
}

/// What a router has counted.
///
/// # Errors
/// It does not say.
pub(crate) async fn counted(admin: &Client, counter: &str) -> Result<f64> {
    let answer = admin.get("/metrics").await?.well()?;
    Ok(Metrics::parse(&answer.text())?.count(counter, &[]))
}

/// Waits until a router has counted more than `before`.
async fn counts_more(admin: &Client, counter: &str, before: f64) -> Result<()> {
    wait::until(counter, COUNTED, async || {
        let count = counted(admin, counter).await;
        let count = count.map_err(|error| format!("{error:#}"))?;
        (count > before)
            .then_some(())
            .ok_or_else(|| format!("{count}, {before} before"))
    })
    .await
}

/// A hand-off has failed, and only the engine's counter tells: the router counts more failures than `before`. The record has them too, or
/// has nothing: it waits three seconds for the worker's report, which comes later where the machine is busy.
///
/// # Errors
/// The record says that none has failed, or none is counted.
pub(crate) async fn transfers_failed(admin: &Client, record: &Record, before: f64) -> Result<()> {
    let failed = &record.0["actual"]["failedTransfers"];
    ensure!(
        failed.is_null() || failed.as_u64() >= Some(1),
        "{}",
        record.0
    );
    counts_more(admin, FAILED_TRANSFERS, before).await
}

async fn gate(fleet: &Fleet, pool: &str) -> Result<(Gate, Interposer)> {
    let server = Server::of(fleet, pool)?;
    let gate = Gate::before(server.client.address()).await?;
    let (name, daemon) = control(fleet, pool)?;
    let stand_in = Interposer::before(&daemon, &name, Changes::of_engine(gate.address)).await?;
    Ok((gate, stand_in))
}

/// # Errors
/// The record has another status, or states that say otherwise.
pub(crate) fn is_cancelled(record: &Record, passed: &[&str], not_passed: &[&str]) -> Result<()> {
    record.check_order()?;
    ensure!(
        record.0["outcome"]["status"] == "Cancelled",
        "{}",
        record.0["outcome"]
    );
    let states = record.0["states"].to_string();
    let has = |state: &&&str| states.contains(&format!("\"{state}\""));
    ensure!(passed.iter().all(|state| has(&state)), "{states}");
    ensure!(!not_passed.iter().any(|state| has(&state)), "{states}");
    Ok(())
}
