//! When all is ready, what is shown until then, and the table of workers.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::bail;
use serde_json::Value;

use super::supervise::Health;
use crate::client::Client;
use crate::table::{Align, Table};
use crate::terminal::{Status, note};

const POLL: Duration = Duration::from_millis(200);
/// One answer of the admin address; a router that is alive gives it in milliseconds.
const ANSWER: Duration = Duration::from_secs(5);

/// The children as the router sees them.
#[derive(Debug)]
pub(crate) struct Fleet {
    admin: Client,
    /// The router first.
    children: Vec<Seen>,
}

/// One child, and what of the router's view says that it serves.
#[derive(Debug)]
struct Seen {
    name: String,
    /// The worker's name; of an engine's server, its worker's.
    worker: String,
    health: Arc<Health>,
}

impl Fleet {
    pub(crate) fn new(admin: Client) -> Self {
        Self {
            admin,
            children: Vec::new(),
        }
    }

    pub(crate) fn add(&mut self, name: &str, health: Arc<Health>) {
        self.add_under(name, name, health);
    }

    /// A child that serves when this worker does.
    pub(crate) fn add_under(&mut self, name: &str, worker: &str, health: Arc<Health>) {
        self.children.push(Seen {
            name: name.to_owned(),
            worker: worker.to_owned(),
            health,
        });
    }

    /// Returns when the router answers and sees every worker ready. A child that fails before ends the wait from outside.
    ///
    /// # Errors
    /// Not all is ready within this time, or the admin address will never tell.
    pub(crate) async fn ready(&mut self, within: Duration) -> anyhow::Result<()> {
        let started = Instant::now();
        let mut status = Status::new();
        loop {
            let mut missing = None;
            match self.ask("/v1/fleet").await {
                Ok(view) => self.note(&view),
                Err(Unheard::Refused(why)) => {
                    bail!("{why}: give the token with --admin-token-file")
                }
                Err(Unheard::NotNow(why)) => missing = Some(why),
            }
            let waiting = self
                .children
                .iter()
                .filter(|child| !child.health.is_ready())
                .count();
            status.show(
                &progress(&self.children),
                &format!("({} s)", started.elapsed().as_secs()),
            );
            if waiting == 0 {
                match self.ask("/readyz").await {
                    Ok(_) => {
                        status.end();
                        return Ok(());
                    }
                    Err(Unheard::Refused(why) | Unheard::NotNow(why)) => missing = Some(why),
                }
            }
            if started.elapsed() >= within {
                status.end();
                bail!(
                    "not ready after {} s: {}{}; the logs in the state directory say more, --ready-seconds waits longer",
                    within.as_secs(),
                    progress(&self.children),
                    missing.map_or_else(String::new, |why| format!(" ({why})"))
                );
            }
            tokio::time::sleep(POLL).await;
        }
    }

    async fn ask(&self, path: &str) -> Result<Value, Unheard> {
        let answer = tokio::time::timeout(ANSWER, self.admin.get(path))
            .await
            .map_err(|_| {
                Unheard::NotNow(format!(
                    "no answer of {}{path} within {} s",
                    self.admin.base(),
                    ANSWER.as_secs()
                ))
            })?
            .map_err(|error| Unheard::NotNow(format!("{error:#}")))?;
        if answer.status.is_success() {
            return Ok(answer.body);
        }
        let why = format!("{}{path} answers {}", self.admin.base(), answer.complaint());
        Err(match answer.status.as_u16() {
            401 | 403 => Unheard::Refused(why),
            _ => Unheard::NotNow(why),
        })
    }

    fn note(&self, view: &Value) {
        for (index, child) in self.children.iter().enumerate() {
            if index == 0 || state_of(view, &child.worker) == Some("Ready") {
                child.health.has_served();
            }
        }
    }

    /// The fleet as the router lists it; pairs that cannot work together are noted.
    pub(crate) async fn view(&self) -> anyhow::Result<Value> {
        let view = self.admin.get_good("/v1/fleet").await?;
        for pair in incompatible(&view) {
            note(&pair);
        }
        Ok(view)
    }
}

/// Why the admin address gave no answer.
#[derive(Debug)]
enum Unheard {
    /// It never will.
    Refused(String),
    /// It may yet.
    NotNow(String),
}

fn state_of<'a>(view: &'a Value, name: &str) -> Option<&'a str> {
    list(&view["workers"]).find(|worker| worker["id"] == name)?["state"].as_str()
}

fn list(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

fn progress(children: &[Seen]) -> String {
    let words = children.iter().map(|Seen { name, health, .. }| {
        format!(
            "{name} {}",
            if health.is_ready() {
                "ready"
            } else {
                "loading"
            }
        )
    });
    words.collect::<Vec<String>>().join(" · ")
}

/// The workers of a fleet, one a line.
pub(crate) fn workers(view: &Value) -> Vec<String> {
    let mut table = Table::new([
        ("worker", Align::Left),
        ("role", Align::Left),
        ("pool", Align::Left),
        ("model", Align::Left),
        ("state", Align::Left),
        ("blocks", Align::Right),
        ("kv identity", Align::Left),
    ]);
    for worker in list(&view["workers"]) {
        let text = |field: &str| worker[field].as_str().unwrap_or_default().to_owned();
        table.row([
            text("id"),
            text("role"),
            text("pool"),
            text("model"),
            text("state"),
            worker["blocks"]["total"].to_string(),
            text("kvIdentity").chars().take(12).collect(),
        ]);
    }
    table.lines()
}

/// A sentence for each pair that cannot hand over, with every field that differs.
fn incompatible(view: &Value) -> Vec<String> {
    list(&view["pairs"])
        .filter(|pair| pair["compatible"] == false)
        .map(|pair| {
            let text = |value: &Value| {
                value
                    .as_str()
                    .map_or_else(|| value.to_string(), ToOwned::to_owned)
            };
            let differences = list(&pair["differences"]).map(|difference| {
                format!(
                    "{} is {} and {}",
                    text(&difference["field"]),
                    text(&difference["prefill"]),
                    text(&difference["decode"])
                )
            });
            format!(
                "warning: {} and {} do not pair: {}",
                text(&pair["prefill"]),
                text(&pair["decode"]),
                differences.collect::<Vec<String>>().join("; ")
            )
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn view() -> Value {
        json!({
            "workers": [
                {"id": "prefill-0", "role": "prefill", "pool": "prefill", "model": "m", "state": "Ready", "blocks": {"total": 64}, "kvIdentity": "0123456789abcdef"},
                {"id": "decode-0", "role": "", "pool": "", "model": "", "state": "Lost", "blocks": {"total": 0}, "kvIdentity": ""},
            ],
            "pairs": [{"prefill": "prefill-0", "decode": "decode-0", "compatible": false,
                       "differences": [{"field": "blockSize", "prefill": 16, "decode": 32}]}],
        })
    }

    #[test]
    fn a_worker_is_ready_when_the_router_says_so() {
        let mut fleet = Fleet::new(Client::new("127.0.0.1:1").unwrap());
        for name in ["router", "prefill-0", "decode-0"] {
            fleet.add(name, Arc::new(Health::default()));
        }
        let server = Arc::new(Health::default());
        fleet.add_under("prefill-0-engine", "prefill-0", server);
        assert_eq!(
            progress(&fleet.children),
            "router loading · prefill-0 loading · decode-0 loading · prefill-0-engine loading"
        );
        fleet.note(&view());
        assert_eq!(
            progress(&fleet.children),
            "router ready · prefill-0 ready · decode-0 loading · prefill-0-engine ready"
        );
    }

    #[test]
    fn the_table_has_a_line_per_worker_and_pairs_that_differ_are_named() {
        assert_eq!(
            workers(&view()),
            [
                "worker     role     pool     model  state  blocks  kv identity",
                "prefill-0  prefill  prefill  m      Ready      64  0123456789ab",
                "decode-0                            Lost        0",
            ]
        );
        assert_eq!(
            incompatible(&view()),
            ["warning: prefill-0 and decode-0 do not pair: blockSize is 16 and 32"]
        );
    }
}
