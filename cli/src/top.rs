//! `baton top`: workers and pairs as routers see them now, again and again where a person watches.

use std::io::IsTerminal as _;
use std::time::Duration;

use serde_json::{Value, json};

use crate::arguments::{Output, TopArguments};
use crate::client::{Client, token};
use crate::cluster::Routers;
use crate::failure::Verdict;
use crate::table::{Align, Table};
use crate::terminal;
use crate::up::interrupt::Interrupt;

/// Where `baton up` serves it if it is not told otherwise.
const ADMIN: &str = "127.0.0.1:8001";
/// Clears a terminal and goes to its first line.
const CLEAR: &str = "\x1b[2J\x1b[H";

/// One router, and what it answers to `GET /v1/fleet`.
#[derive(Debug)]
struct Seen {
    router: String,
    fleet: Value,
}

/// # Errors
/// A router does not answer, or refuses.
pub(crate) async fn top(arguments: TopArguments) -> anyhow::Result<Verdict> {
    // Whoever ends this command ends what it has started, too.
    let interrupt = Interrupt::listen()?;
    tokio::select! {
        done = look_on(&arguments) => done?,
        () = interrupt.first() => {}
    }
    Ok(Verdict::Good)
}

async fn look_on(arguments: &TopArguments) -> anyhow::Result<()> {
    let file = arguments.admin_token_file.as_deref();
    let routers = if arguments.cluster.kubernetes {
        Routers::of_cluster(&arguments.cluster, file).await?
    } else {
        let address = arguments.admin.as_deref().unwrap_or(ADMIN);
        Routers::one(Client::new(address)?.with_token(token(file)?))
    };
    let table = arguments.output.output == Output::Table;
    let again = table && !arguments.once && std::io::stdout().is_terminal();
    loop {
        let mut seen = Vec::new();
        for (router, client) in routers.all() {
            seen.push(Seen {
                router: router.to_owned(),
                fleet: client.get_good("/v1/fleet").await?,
            });
        }
        if !table {
            return terminal::json(&objects(seen));
        }
        if again {
            terminal::part(CLEAR)?;
        }
        terminal::lines(lines(&seen))?;
        if !again {
            return Ok(());
        }
        tokio::time::sleep(Duration::from_secs(arguments.seconds)).await;
    }
}

/// For programs: `[{"router": NAME, "fleet": as GET /v1/fleet}]`.
fn objects(seen: Vec<Seen>) -> Value {
    let one = |Seen { router, fleet }| json!({"router": router, "fleet": fleet});
    seen.into_iter().map(one).collect()
}

fn lines(seen: &[Seen]) -> Vec<String> {
    let mut lines = Vec::new();
    for Seen { router, fleet } in seen {
        if !lines.is_empty() {
            lines.push(String::new());
        }
        lines.push(format!("router {router}"));
        lines.extend(workers(&fleet["workers"]));
        lines.extend(pairs(&fleet["pairs"]));
    }
    lines
}

fn workers(workers: &Value) -> Vec<String> {
    let mut table = Table::new([
        ("worker", Align::Left),
        ("pool", Align::Left),
        ("role", Align::Left),
        ("model", Align::Left),
        ("state", Align::Left),
        ("running", Align::Right),
        ("queued tokens", Align::Right),
        ("blocks", Align::Right),
        ("active", Align::Right),
        ("cached", Align::Right),
        ("leased", Align::Right),
        ("free", Align::Right),
        ("report", Align::Right),
        ("notices", Align::Left),
    ]);
    for worker in workers.as_array().into_iter().flatten() {
        let blocks = &worker["blocks"];
        let age = worker["reportAgeMilliseconds"].as_f64();
        let notices = worker["notices"].as_array().into_iter().flatten();
        let notices: Vec<&str> = notices.filter_map(Value::as_str).collect();
        table.row([
            text(&worker["id"]),
            text(&worker["pool"]),
            text(&worker["role"]),
            text(&worker["model"]),
            text(&worker["state"]),
            text(&worker["runningSequences"]),
            text(&worker["queuedTokens"]),
            text(&blocks["total"]),
            text(&blocks["active"]),
            text(&blocks["cached"]),
            text(&blocks["leased"]),
            text(&blocks["free"]),
            age.map_or_else(String::new, |age| format!("{age:.0} ms ago")),
            notices.join("; "),
        ]);
    }
    if table.is_empty() {
        return vec!["no worker is known".to_owned()];
    }
    table.lines()
}

fn pairs(pairs: &Value) -> Vec<String> {
    let mut table = Table::new([
        ("prefill", Align::Left),
        ("decode", Align::Left),
        ("level", Align::Left),
        ("compatible", Align::Left),
        ("breaker", Align::Left),
        ("differs in", Align::Left),
    ]);
    for pair in pairs.as_array().into_iter().flatten() {
        let differences = pair["differences"].as_array().into_iter().flatten();
        let fields: Vec<String> = differences.map(|one| text(&one["field"])).collect();
        let yes = pair["compatible"] == true;
        table.row([
            text(&pair["prefill"]),
            text(&pair["decode"]),
            text(&pair["level"]),
            if yes { "yes" } else { "no" }.to_owned(),
            text(&pair["breaker"]),
            fields.join(", "),
        ]);
    }
    if table.is_empty() {
        return Vec::new();
    }
    let mut lines = vec![String::new()];
    lines.extend(table.lines());
    lines
}

/// A cell: what is not there is empty.
fn text(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Null => String::new(),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fleet() -> Value {
        let worker = |id: &str, role: &str| {
            json!({
                "id": id, "pool": role, "role": role, "model": "tiny", "state": "Ready",
                "blocks": {"total": 64, "free": 60, "cached": 3, "active": 1, "leased": 0, "quarantined": 0, "leaked": 0},
                "runningSequences": 2, "queuedTokens": 17, "reportAgeMilliseconds": 12.4, "notices": [],
            })
        };
        json!({
            "policies": [], "workers": [worker("p-0", "prefill"), worker("d-0", "decode")],
            "pairs": [
                {"prefill": "p-0", "decode": "d-0", "compatible": true, "differences": [], "level": "host", "breaker": "Closed"},
                {"prefill": "p-0", "decode": "d-1", "compatible": false, "differences": [{"field": "kvDtype"}], "level": "", "breaker": "Open"},
            ],
        })
    }

    #[test]
    fn workers_stand_with_their_blocks_and_pairs_with_their_breakers() {
        let router = "r0".to_owned();
        let fleet = fleet();
        let lines = lines(&[Seen { router, fleet }]);
        assert_eq!(lines[0], "router r0");
        let words = |line: &str| {
            line.split_whitespace()
                .map(str::to_owned)
                .collect::<Vec<_>>()
        };
        let p = [
            "p-0", "prefill", "prefill", "tiny", "Ready", "2", "17", "64", "1", "3", "0", "60",
            "12", "ms", "ago",
        ];
        assert_eq!(words(&lines[2]), p);
        assert_eq!(words(&lines[6]), ["p-0", "d-0", "host", "yes", "Closed"]);
        assert_eq!(words(&lines[7]), ["p-0", "d-1", "no", "Open", "kvDtype"]);
    }

    #[test]
    fn a_router_without_workers_says_so_and_programs_get_each_router() {
        let empty = || Seen {
            router: "r0".to_owned(),
            fleet: json!({"workers": [], "pairs": []}),
        };
        assert_eq!(lines(&[empty()]), ["router r0", "no worker is known"]);
        let all = objects(vec![empty(), empty()]);
        assert_eq!(all[1]["router"], "r0");
        assert_eq!(all[1]["fleet"]["workers"], json!([]));
    }
}
