//! What a decision credits follows what the server's cache holds, whatever happens to the cache.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use baton_e2e::fleet::Fleet;
use baton_e2e::record::Record;
use baton_e2e::told;
use baton_e2e::vllm::{BLOCK, Server};
use baton_e2e::wait;

use super::equal::{Question, a_repeated_prompt_is_credited, ask, prompt};

/// Events and reports come within a second or two.
const SOON: Duration = Duration::from_secs(30);
/// Words of a prompt of about a hundred blocks.
const LONG: usize = 600;

/// Tokens of one prompt on the decode server.
#[derive(Clone, Copy, Debug)]
struct Seen {
    all: u64,
    /// As the decision had it.
    credited: u64,
    /// As vLLM says.
    reported: u64,
}

/// # Errors
/// A credit outlives what it stands for, or does not come back.
pub(crate) async fn a_reset_is_followed(fleet: &Fleet, number: usize) -> Result<()> {
    let decode = Server::of(fleet, "decode")?;
    a_repeated_prompt_is_credited(fleet, number).await?;
    decode.forget().await?;
    // vLLM tells of it with the first blocks that it stores afterwards, and not before.
    let other = asked(fleet, &question(number + 1, 200)).await?;
    ensure!(other.reported == 0, "{other:?} of a prompt that is new");
    wait::until("the router has heard of the reset", SOON, async || {
        let (_, cached) = blocks(fleet, "decode")
            .await
            .map_err(|error| format!("{error:#}"))?;
        // What the other prompt and its answer have left.
        if cached <= other.all / BLOCK + 1 {
            Ok(())
        } else {
            Err(format!("{cached} blocks are credited"))
        }
    })
    .await?;
    let again = asked(fleet, &question(number, 200)).await?;
    ensure!(
        (again.credited, again.reported) == (0, 0),
        "after a reset: {again:?}"
    );
    a_repeated_prompt_is_credited(fleet, number).await
}

/// More prompts than there is room for, then the same from the last to the first: the last ones are there, the first are not.
///
/// # Errors
/// More is credited than vLLM has, by more than what the question before may just have driven out.
pub(crate) async fn an_eviction_storm_is_followed(fleet: &Fleet, number: usize) -> Result<()> {
    let (total, _) = blocks(fleet, "decode").await?;
    let first = asked(fleet, &question(number, LONG)).await?;
    let count = total.div_ceil(first.all / BLOCK) + 2;
    let mut before = first;
    let mut seen = Vec::new();
    let last = number + usize::try_from(count)? - 1;
    let there_and_back = (number + 1..=last).chain((number..=last).rev());
    for number in there_and_back {
        let now = asked(fleet, &question(number, LONG)).await?;
        let race = before.all.next_multiple_of(BLOCK) + BLOCK;
        ensure!(
            now.credited <= now.reported + race,
            "question {number}: {now:?}, after {before:?}"
        );
        before = now;
        seen.push(now);
    }
    let back = &seen[seen.len() - usize::try_from(count)?..];
    let found = |seen: &&Seen| seen.reported > 0 && seen.credited > 0;
    let hits = back.iter().filter(found).count();
    let gone = back.iter().filter(|seen| seen.reported == 0).count();
    ensure!(hits > 0 && gone > 0, "{hits} found, {gone} gone: {back:?}");
    told(&format!(
        "{count} prompts over {total} blocks: {hits} found again and credited, {gone} gone and not credited"
    ));
    a_repeated_prompt_is_credited(fleet, last + 1).await
}

fn question(number: usize, words: usize) -> Question {
    Question::chat(&prompt(number, words)).with("max_tokens", 2)
}

/// Asks on the decode server alone.
async fn asked(fleet: &Fleet, question: &Question) -> Result<Seen> {
    let answer = Box::pin(ask(&fleet.api, question, Some("Aggregated"))).await?;
    let record = Record::of(&fleet.admin, answer.run()?).await?;
    let usage = &answer.body["usage"];
    let details = &usage["prompt_tokens_details"];
    Ok(Seen {
        all: usage["prompt_tokens"].as_u64().context("prompt_tokens")?,
        credited: record.chosen()?["cachedTokens"]["decode"]
            .as_u64()
            .context("cachedTokens.decode")?,
        // vLLM leaves it out where it is zero.
        reported: details["cached_tokens"].as_u64().unwrap_or(0),
    })
}

/// Blocks of a pool's worker: all, and those that the router knows to hold a prefix.
async fn blocks(fleet: &Fleet, role: &str) -> Result<(u64, u64)> {
    let workers = fleet.workers(Some(role)).await?;
    let worker = workers.first().context("no worker")?;
    let count = |name: &str| {
        worker["blocks"][name]
            .as_u64()
            .with_context(|| format!("blocks.{name} of {worker}"))
    };
    Ok((count("total")?, count("cached")?))
}
