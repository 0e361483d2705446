//! `--tour`: three requests that show how the place of a prefill is decided.

use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use baton_placement::policy::Policy;
use serde_json::{Value, json};
use tokio::task::JoinSet;

use super::prompts;
use super::traffic::{Ask, Generating, Traffic};
use crate::arguments::Output;
use crate::explain::sentence;
use crate::terminal::{self, line, note};

/// Sentences of the long prompt: some hundreds of tokens.
const LONG: usize = 16;
/// Tokens of each shown answer.
const ANSWER: u32 = 24;
/// Tokens that a decode worker is kept busy with.
const BUSY: u32 = 512;
/// Requests that may generate on each decode worker, on average.
const LAYERS: usize = 4;
/// All decode workers generate within this, or the tour gives up.
const BUSY_WAIT: Duration = Duration::from_secs(120);

/// Shows a short and a long request on idle workers, and the long one again while every decode worker generates, for the
/// first policy.
///
/// # Errors
/// A request is refused, or the workers do not become idle or busy in time.
pub(crate) async fn tour(
    traffic: &Traffic,
    policies: &[Policy],
    output: Output,
) -> anyhow::Result<()> {
    let policy = policies
        .first()
        .context("there is a policy where there is a fleet")?;
    let long = prompts::long(LONG);
    let ask = |prompt, salt| Ask {
        model: policy.model.as_str(),
        prompt,
        mode: None,
        salt,
        max_tokens: ANSWER,
    };

    idle(traffic).await?;
    let short = ask(prompts::SHORT, "tour-1");
    show(traffic, output, "a short prompt, workers idle", short).await?;
    idle(traffic).await?;
    let alone = ask(&long, "tour-2");
    show(traffic, output, "a long prompt, workers idle", alone).await?;

    note("tour: giving every decode worker something to generate");
    let busy = keep_busy(traffic, policy).await?;
    // Another salt: what the second request left in the caches is of no use to this one.
    let again = ask(&long, "tour-3");
    let title = "the long prompt again, every decode worker generating";
    show(traffic, output, title, again).await?;
    drop(busy);
    idle(traffic).await
}

async fn show(traffic: &Traffic, output: Output, title: &str, ask: Ask<'_>) -> anyhow::Result<()> {
    let answered = traffic.ask(ask).await?;
    let record = &answered.record;
    if output == Output::Json {
        return terminal::json(&json!({
            "title": title, "run": record.run, "tokens": record.input.tokens, "reason": record.reason.word(),
            "explanation": record.explanation, "text": answered.text,
        }));
    }
    line(&format!(
        "{title} ({} tokens), run {}",
        record.input.tokens, record.run
    ))?;
    line(&format!("  {}", sentence(record)))?;
    line(&format!(
        "  answer: {}",
        answered
            .text
            .split_whitespace()
            .collect::<Vec<_>>()
            .join(" ")
    ))
}

/// Requests that generate, until every decode worker has one. Dropping the set cancels them.
async fn keep_busy(
    traffic: &Traffic,
    policy: &Policy,
) -> anyhow::Result<JoinSet<anyhow::Result<()>>> {
    let started = Instant::now();
    let mut generating = JoinSet::new();
    let mut number = 0;
    loop {
        let view = traffic.fleet().await?;
        let all = decode_workers(&view, policy).count();
        if all == 0 {
            bail!("no decode worker of RoutePolicy {} is ready", policy.name);
        }
        let waiting: Vec<String> = decode_workers(&view, policy)
            .filter(|worker| worker["runningSequences"].as_u64() == Some(0))
            .map(|worker| worker["id"].as_str().unwrap_or_default().to_owned())
            .collect();
        if number > 0 && waiting.is_empty() {
            return Ok(generating);
        }
        if started.elapsed() > BUSY_WAIT {
            bail!(
                "decode workers {} did not begin to generate within {} s",
                waiting.join(", "),
                BUSY_WAIT.as_secs()
            );
        }
        while let Some(ended) = generating.try_join_next() {
            ended.context("a task of the tour ended")??;
        }
        // All at once: each goes whole to the worker with the least prefill queued, so a worker with none gets one.
        if generating.len() < all * LAYERS {
            let burst = (number..number + all).map(|number| background(traffic, policy, number));
            for one in futures::future::try_join_all(burst).await? {
                generating.spawn(one.drain());
            }
            number += all;
        }
        // Reports come every 50 ms.
        tokio::time::sleep(Duration::from_millis(60)).await;
    }
}

async fn background(
    traffic: &Traffic,
    policy: &Policy,
    number: usize,
) -> anyhow::Result<Generating> {
    let (prompt, salt) = (prompts::busy(number), format!("tour-busy-{number}"));
    let ask = Ask {
        model: &policy.model,
        prompt: &prompt,
        mode: Some("Aggregated"),
        salt: &salt,
        max_tokens: BUSY,
    };
    traffic.generate(ask).await
}

fn decode_workers<'a>(view: &'a Value, policy: &'a Policy) -> impl Iterator<Item = &'a Value> {
    let in_pool = |worker: &&Value| {
        policy
            .decode_pools
            .iter()
            .any(|pool| worker["pool"] == pool.as_str())
    };
    view["workers"]
        .as_array()
        .into_iter()
        .flatten()
        .filter(move |worker| in_pool(worker) && worker["state"] == "Ready")
}

/// Whether a worker that takes part runs or queues anything. What a lost one ran when it was last heard of is over.
fn is_busy(worker: &Value) -> bool {
    worker["state"] != "Lost"
        && (worker["runningSequences"].as_u64() != Some(0)
            || worker["queuedTokens"].as_u64() != Some(0))
}

/// Returns when no worker runs or queues anything.
async fn idle(traffic: &Traffic) -> anyhow::Result<()> {
    let started = Instant::now();
    loop {
        let view = traffic.fleet().await?;
        let busy = view["workers"]
            .as_array()
            .into_iter()
            .flatten()
            .any(is_busy);
        if !busy {
            return Ok(());
        }
        if started.elapsed() > BUSY_WAIT {
            bail!(
                "the workers did not become idle within {} s",
                BUSY_WAIT.as_secs()
            );
        }
        tokio::time::sleep(Duration::from_millis(60)).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lost_worker_is_neither_busy_nor_to_be_kept_busy() {
        let worker = |state: &str, running: u64| json!({"id": "d", "pool": "decode", "state": state, "runningSequences": running, "queuedTokens": 0});
        assert!(is_busy(&worker("Ready", 1)) && is_busy(&worker("Draining", 1)));
        assert!(!is_busy(&worker("Ready", 0)) && !is_busy(&worker("Lost", 1)));
        let policy = Policy::new("p", "m", &[], &["decode"]);
        let view = json!({"workers": [worker("Ready", 0), worker("Lost", 0)]});
        assert_eq!(decode_workers(&view, &policy).count(), 1);
    }
}
