//! Decision records: read from a router, checked against the tables of `protocol`.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use baton_protocol::lifecycle::{Event, Lifecycle, Plan, State};
use serde_json::Value;

use crate::http::Client;
use crate::wait;

/// Records are written off the hot path: one may appear a moment after its answer.
const SOON: Duration = Duration::from_secs(10);

/// All states of a remote run that ends well.
pub const REMOTE_STATES: [State; 10] = [
    State::Accepted,
    State::RouteSelected,
    State::PrefillStarted,
    State::PrefillCompleted,
    State::KvPublished,
    State::KvTransferStarted,
    State::KvTransferCompleted,
    State::DecodeStarted,
    State::Streaming,
    State::Completed,
];

/// Terms whose actual value can be observed.
pub const OBSERVABLE: [&str; 5] = [
    "queue",
    "prefill",
    "transfer",
    "synchronization",
    "admission",
];

/// One decision record.
#[derive(Clone, Debug)]
pub struct Record(pub Value);

impl Record {
    /// The record of a run that has ended.
    ///
    /// # Errors
    /// There is none, or it has no outcome.
    pub async fn of(admin: &Client, run: &str) -> Result<Self> {
        let path = format!("/v1/decisions/{run}");
        wait::until(&format!("record of {run}"), SOON, async || {
            let answer = admin.get(&path).await.map_err(|error| error.to_string())?;
            let record = answer.json().map_err(|error| error.to_string())?;
            if answer.status == 200 && record["outcome"]["status"].is_string() {
                Ok(Self(record))
            } else {
                Err(format!("status {}: {record}", answer.status))
            }
        })
        .await
    }

    /// The record of a request of this `x-request-id`, for one whose answer never began.
    ///
    /// # Errors
    /// There is none, or it has no outcome.
    pub async fn of_request(admin: &Client, request: &str) -> Result<Self> {
        wait::until(&format!("record of request {request}"), SOON, async || {
            let path = "/v1/decisions?last=100";
            let answer = admin
                .get_json(path)
                .await
                .map_err(|error| error.to_string())?;
            let records = answer.as_array().cloned().unwrap_or_default();
            let mine = records.into_iter().find(|record| {
                record["requestId"] == request && record["outcome"]["status"].is_string()
            });
            mine.map(Self)
                .ok_or_else(|| "it is not among the last".to_owned())
        })
        .await
    }

    /// The candidate that was chosen first.
    ///
    /// # Errors
    /// None was.
    pub fn chosen(&self) -> Result<&Value> {
        let index = self.0["chosen"]
            .as_u64()
            .with_context(|| format!("nothing was chosen: {}", self.0))?;
        self.0["candidates"]
            .get(usize::try_from(index)?)
            .with_context(|| format!("chosen {index} is no candidate"))
    }

    /// `Local` or `Remote`.
    ///
    /// # Errors
    /// Nothing was chosen.
    pub fn kind(&self) -> Result<&str> {
        self.chosen()?["kind"]
            .as_str()
            .context("the chosen candidate has no kind")
    }

    pub fn text(&self, field: &str) -> &str {
        self.0[field].as_str().unwrap_or_default()
    }

    /// Bytes that were moved.
    pub fn bytes(&self) -> u64 {
        self.0["actual"]["bytes"].as_u64().unwrap_or(0)
    }

    /// States in their order, of all attempts.
    ///
    /// # Errors
    /// One that is unknown.
    pub fn states(&self) -> Result<Vec<State>> {
        self.list("states")?
            .iter()
            .map(|state| {
                serde_json::from_value(state["state"].clone())
                    .with_context(|| format!("unknown state {state}"))
            })
            .collect()
    }

    /// Attempts that were begun.
    ///
    /// # Errors
    /// A state without its attempt.
    pub fn attempts(&self) -> Result<u64> {
        let mut attempts = self.list("states")?.iter().map(|entry| {
            let attempt = entry["attempt"].as_u64();
            attempt.with_context(|| format!("attempt is missing in {entry}"))
        });
        attempts.try_fold(0, |most, attempt| Ok(most.max(attempt?)))
    }

    /// States up to the end of the first attempt.
    ///
    /// # Errors
    /// One that is unknown.
    pub fn first_attempt(&self) -> Result<BTreeSet<State>> {
        self.list("states")?
            .iter()
            .filter(|entry| {
                entry["attempt"]
                    .as_u64()
                    .is_some_and(|attempt| attempt <= 1)
            })
            .map(|entry| Ok(serde_json::from_value(entry["state"].clone())?))
            .collect()
    }

    /// Feeds the states, in their order, through the table that the router uses: none may be illegal, early or late.
    ///
    /// # Errors
    /// The first that is.
    pub fn check_order(&self) -> Result<()> {
        let mut lifecycle: Lifecycle<()> = Lifecycle::new();
        let recorded = self.list("states")?;
        for (index, entry) in recorded.iter().enumerate() {
            let state: State = serde_json::from_value(entry["state"].clone())?;
            let attempt = u32::try_from(entry["attempt"].as_u64().context("attempt is missing")?)?;
            let at = entry["at"].as_str().context("`at` is missing")?;
            if let Some(before) = index
                .checked_sub(1)
                .and_then(|before| recorded[before]["at"].as_str())
            {
                // RFC 3339 in UTC with microseconds: text order is time order.
                ensure!(before <= at, "{state} at {at} is before {before}");
            }
            if state == State::RouteSelected {
                let plan = self.plan(recorded, attempt);
                let begun = lifecycle.begin_attempt(plan, 0, ())?;
                ensure!(begun == attempt, "attempt {attempt} is the {begun}th");
                continue;
            }
            let event = Event {
                state,
                attempt,
                at: 0,
                detail: (),
            };
            match lifecycle.observe(event) {
                Ok(true) => {}
                Ok(false) => bail!("{state} is recorded before what must precede it"),
                Err(error) => bail!("illegal: {error}"),
            }
        }
        ensure!(lifecycle.ended().is_some(), "the record has no end");
        Ok(())
    }

    /// What the states of an attempt say of its plan: the chosen one is that of the first attempt.
    fn plan(&self, recorded: &[Value], attempt: u32) -> Plan {
        let moved = recorded.iter().any(|entry| {
            entry["attempt"].as_u64() == Some(u64::from(attempt))
                && entry["state"]
                    .as_str()
                    .is_some_and(|state| state.starts_with("kv_"))
        });
        let remote = moved || (attempt == 1 && self.kind().is_ok_and(|kind| kind == "Remote"));
        if remote { Plan::Remote } else { Plan::Local }
    }

    fn list(&self, field: &str) -> Result<&Vec<Value>> {
        self.0[field]
            .as_array()
            .with_context(|| format!("{field} is no list in {}", self.0))
    }
}
