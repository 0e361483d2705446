//! What a decision credits follows what the server's cache holds, whatever happens to the cache.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use baton_e2e::fleet::Fleet;
use baton_e2e::record::Record;
use baton_e2e::told;
use baton_e2e::vllm::{BLOCK, Server};
use baton_e2e::wait;

use super::equal::{self, Question, ask, prompt};
use super::gated::REMOTE;

/// Events and reports come within a second or two.
const SOON: Duration = Duration::from_secs(30);
/// Words of a prompt of about a hundred blocks.
const LONG: usize = 600;

/// Whose cache is looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    /// Asked through hand-offs: the record has what its server said of its leg.
    Prefill,
    /// Asked alone.
    Decode,
}

impl Side {
    /// Its pool, its role, and its name in a record.
    fn word(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }
}

/// Tokens of one prompt on that server.
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
pub(crate) async fn a_reset_is_followed(fleet: &Fleet, side: Side, number: usize) -> Result<()> {
    a_repeated_prompt_is_credited(fleet, side, number).await?;
    Server::of(fleet, side.word())?.forget().await?;
    // vLLM tells of it with the first blocks that it stores afterwards, and not before.
    let other = asked(fleet, side, &question(number + 1, 200)).await?;
    ensure!(other.reported == 0, "{other:?} of a prompt that is new");
    wait::until("the router has heard of the reset", SOON, async || {
        let (_, cached) = blocks(fleet, side)
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
    let again = asked(fleet, side, &question(number, 200)).await?;
    ensure!(
        (again.credited, again.reported) == (0, 0),
        "after a reset of {side:?}: {again:?}"
    );
    a_repeated_prompt_is_credited(fleet, side, number).await
}

/// More prompts than there is room for, then the same from the last to the first: the last ones are there, the first are not.
///
/// # Errors
/// More is credited than vLLM has, by more than what a question may just have driven out.
pub(crate) async fn an_eviction_storm_is_followed(
    fleet: &Fleet,
    side: Side,
    number: usize,
) -> Result<()> {
    let (total, _) = blocks(fleet, side).await?;
    let first = asked(fleet, side, &question(number, LONG)).await?;
    is_credited(fleet, side, &question(number, LONG)).await?;
    let count = total.div_ceil(first.all / BLOCK) + 2;
    let mut before = first;
    let mut seen = Vec::new();
    let last = number + usize::try_from(count)? - 1;
    let there_and_back = (number + 1..=last).chain((number..=last).rev());
    for number in there_and_back {
        let question = question(number, LONG);
        let now = asked(fleet, side, &question).await?;
        let race = before.all.next_multiple_of(BLOCK) + BLOCK;
        ensure!(
            now.credited <= now.reported + race,
            "question {number} of {side:?}: {now:?}, after {before:?}"
        );
        before = now;
        seen.push(now);
        // The router learns in order what becomes of the cache: once it knows of these blocks it knows what they have driven out, however
        // long that took. Asked again at once, a prompt drives out no more than the place of its answer.
        is_credited(fleet, side, &question).await?;
    }
    let back = &seen[seen.len() - usize::try_from(count)?..];
    let found = |seen: &&Seen| seen.reported > 0 && seen.credited > 0;
    let hits = back.iter().filter(found).count();
    let gone = back.iter().filter(|seen| seen.reported == 0).count();
    ensure!(hits > 0 && gone > 0, "{hits} found, {gone} gone: {back:?}");
    told(&format!(
        "{count} prompts over {total} blocks of {side:?}: {hits} found again and credited, {gone} gone and not credited"
    ));
    a_repeated_prompt_is_credited(fleet, side, last + 1).await
}

/// The second time the decision credits what vLLM then says that the server had cached.
async fn a_repeated_prompt_is_credited(fleet: &Fleet, side: Side, number: usize) -> Result<()> {
    if side == Side::Decode {
        return equal::a_repeated_prompt_is_credited(fleet, number).await;
    }
    let question = question(number, 200);
    asked(fleet, side, &question).await?;
    is_credited(fleet, side, &question).await
}

/// Asks what was just asked until the decision credits what vLLM then says that the server had cached: its events are on their way.
async fn is_credited(fleet: &Fleet, side: Side, question: &Question) -> Result<()> {
    wait::until("the prompt is credited", SOON, async || {
        let again = asked(fleet, side, question)
            .await
            .map_err(|error| format!("{error:#}"))?;
        if again.credited == again.reported && again.credited > 0 {
            Ok(())
        } else {
            Err(format!("{again:?}"))
        }
    })
    .await
}

fn question(number: usize, words: usize) -> Question {
    Question::chat(&prompt(number, words)).with("max_tokens", 2)
}

async fn asked(fleet: &Fleet, side: Side, question: &Question) -> Result<Seen> {
    let (mode, kind) = match side {
        Side::Prefill => {
            // Else it has all of the prompt from the last time, and fetches nothing.
            Server::of(fleet, "decode")?.forget().await?;
            (REMOTE, "Remote")
        }
        Side::Decode => (Some("Aggregated"), "Local"),
    };
    let answer = Box::pin(ask(&fleet.api, question, mode)).await?;
    let record = Record::of(&fleet.admin, answer.run()?).await?;
    let kept = record.kind()? == kind && record.0["fallback"].is_null();
    ensure!(kept, "{side:?} was not asked: {}", record.0);
    let usage = &answer.body["usage"];
    let reported = match side {
        // To the decode server a whole prompt that came from elsewhere was cached, with Baton's connector.
        Side::Prefill => &record.0["outcome"]["cachedTokens"],
        Side::Decode => &usage["prompt_tokens_details"]["cached_tokens"],
    };
    Ok(Seen {
        all: usage["prompt_tokens"].as_u64().context("prompt_tokens")?,
        credited: record.chosen()?["cachedTokens"][side.word()]
            .as_u64()
            .with_context(|| format!("cachedTokens of {side:?} in {}", record.0))?,
        // vLLM leaves it out where it is zero.
        reported: reported.as_u64().unwrap_or(0),
    })
}

/// Blocks of a pool's worker: all, and those that the router knows to hold a prefix.
async fn blocks(fleet: &Fleet, side: Side) -> Result<(u64, u64)> {
    let workers = fleet.workers(Some(side.word())).await?;
    let worker = workers.first().context("no worker")?;
    let count = |name: &str| {
        worker["blocks"][name]
            .as_u64()
            .with_context(|| format!("blocks.{name} of {worker}"))
    };
    Ok((count("total")?, count("cached")?))
}
