//! The way through the fleet changes no token: one real model, twenty prompts, every mode, alone and eight at a time.
//!
//! One fleet serves all of it. Some passes salt the cache, so that every prefix is computed anew in that mode; others do
//! not, so that prefixes computed in one mode are used in another. Log-probabilities are compared digit by digit: KV that
//! differed in a single bit would show in them long before it showed in a token.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use baton_e2e::fleet::Fleet;
use baton_e2e::openai::{Ask, Completion, Output};
use baton_e2e::prompts;
use baton_e2e::record::Record;
use baton_e2e::scenario;
use futures::{StreamExt, TryStreamExt, stream};

const MODEL: &str = "smollm2-135m-instruct";
const OUTPUT_TOKENS: u32 = 12;
const AGGREGATED: &str = "Aggregated";
const DISAGGREGATED: &str = "Disaggregated";
const CONDITIONAL: &str = "Conditional";

/// A link stays in use however slow a busy machine makes it: what is handed over is the subject here.
const BREAKER: &str = "  topology: {breaker: {failures: 1000}}\n";

/// One way through all prompts.
struct Pass {
    mode: &'static str,
    at_once: usize,
    /// `None`: the cache is shared with every other pass without a salt.
    salt: Option<&'static str>,
    sampled: bool,
}

const fn pass(
    mode: &'static str,
    at_once: usize,
    salt: Option<&'static str>,
    sampled: bool,
) -> Pass {
    Pass {
        mode,
        at_once,
        salt,
        sampled,
    }
}

const GREEDY: [Pass; 6] = [
    pass(AGGREGATED, 1, Some("aggregated-alone"), false),
    pass(DISAGGREGATED, 1, Some("disaggregated-alone"), false),
    pass(DISAGGREGATED, 8, None, false),
    pass(CONDITIONAL, 8, Some("conditional-together"), false),
    pass(AGGREGATED, 8, None, false),
    pass(CONDITIONAL, 1, None, false),
];

const SAMPLED: [Pass; 6] = [
    pass(CONDITIONAL, 1, None, true),
    pass(AGGREGATED, 1, None, true),
    pass(AGGREGATED, 8, None, true),
    pass(DISAGGREGATED, 1, None, true),
    pass(DISAGGREGATED, 8, Some("sampled-together"), true),
    pass(CONDITIONAL, 8, None, true),
];

#[test]
fn every_mode_gives_the_same_tokens_alone_and_eight_at_a_time() {
    scenario(async {
        let fleet = Fleet::quickstart_with(BREAKER).await?;
        let prompts = prompts::twenty();
        let greedy = compare(&fleet, &prompts, &GREEDY).await?;
        the_lengths_are_those_promised(&greedy)?;
        let sampled = compare(&fleet, &prompts, &SAMPLED).await?;
        sampling_is_not_greedy(&greedy, &sampled)?;
        another_seed_gives_other_tokens(&fleet, &prompts[1], &sampled[1]).await?;
        nothing_is_left_behind(&fleet).await?;
        fleet.end().await
    });
}

/// Runs every pass and compares it with the first; that is returned.
async fn compare(fleet: &Fleet, prompts: &[String], passes: &[Pass]) -> Result<Vec<Output>> {
    let mut expected: Option<Vec<Output>> = None;
    for pass in passes {
        let begun = Instant::now();
        let answers = run(fleet, prompts, pass).await?;
        report(pass, &answers, begun.elapsed());
        check_records(fleet, pass, &answers).await?;
        let outputs: Vec<Output> = answers.into_iter().map(|answer| answer.output).collect();
        let Some(expected) = &expected else {
            expected = Some(outputs);
            continue;
        };
        for (index, (output, expected)) in outputs.iter().zip(expected).enumerate() {
            ensure!(
                output == expected,
                "prompt {index} in {}, {} at a time, salt {:?}:\n{output:?}\nbut first\n{expected:?}",
                pass.mode,
                pass.at_once,
                pass.salt
            );
        }
    }
    expected.context("no pass")
}

async fn run(fleet: &Fleet, prompts: &[String], pass: &Pass) -> Result<Vec<Completion>> {
    let asks: Vec<Ask> = (0u64..)
        .zip(prompts)
        .map(|(index, prompt)| {
            let mut ask = Ask::new(MODEL, prompt, OUTPUT_TOKENS).mode(pass.mode);
            if let Some(salt) = pass.salt {
                ask = ask.with("cache_salt", salt);
            }
            if pass.sampled {
                ask = ask
                    .with("temperature", 1.0)
                    .with("top_p", 0.95)
                    .with("seed", 1000 + index);
            }
            ask
        })
        .collect();
    stream::iter(asks.iter().map(|ask| ask.send(&fleet.api)))
        .buffered(pass.at_once)
        .try_collect()
        .await
}

#[allow(
    clippy::print_stdout,
    reason = "how long a pass took is worth knowing when it fails"
)]
fn report(pass: &Pass, answers: &[Completion], took: Duration) {
    let tokens = |count: fn(&Completion) -> u64| answers.iter().map(count).sum::<u64>();
    println!(
        "{:13} {} at a time, {}, salt {:?}: {} prompt tokens, {} cached, {:.1} s",
        pass.mode,
        pass.at_once,
        if pass.sampled { "sampled" } else { "greedy" },
        pass.salt,
        tokens(|answer| answer.output.prompt_tokens),
        tokens(|answer| answer.cached_tokens),
        took.as_secs_f64()
    );
}

/// Equal tokens prove nothing if the modes did the same: the records say what was done.
async fn check_records(fleet: &Fleet, pass: &Pass, answers: &[Completion]) -> Result<()> {
    for (index, answer) in answers.iter().enumerate() {
        let record = Record::of(&fleet.admin, &answer.run).await?;
        let about = || format!("prompt {index} in {}: {}", pass.mode, record.0);
        ensure!(record.text("mode") == pass.mode, "mode: {}", about());
        record.check_order().with_context(about)?;
        ensure!(record.0["fallback"].is_null(), "fell back: {}", about());
        match pass.mode {
            AGGREGATED => ensure!(record.kind()? == "Local", "not local: {}", about()),
            DISAGGREGATED => {
                ensure!(record.kind()? == "Remote", "not remote: {}", about());
                ensure!(
                    record.text("assurance") == "Verified",
                    "not verified: {}",
                    about()
                );
                // Under a salt of its own a prompt is new to the decode worker, so its KV has to come from the other. Only of
                // a prompt that begins as an earlier one may a part be there already, never the last block.
                if pass.salt.is_some() {
                    ensure!(record.bytes() > 0, "no bytes moved: {}", about());
                }
            }
            _ => {}
        }
    }
    Ok(())
}

fn the_lengths_are_those_promised(outputs: &[Output]) -> Result<()> {
    let lengths: Vec<u64> = outputs.iter().map(|output| output.prompt_tokens).collect();
    let (shortest, longest) = (lengths.iter().min(), lengths.iter().max());
    ensure!(
        shortest.is_some_and(|tokens| (8..=16).contains(tokens))
            && longest.is_some_and(|tokens| (500..=650).contains(tokens)),
        "prompts have {lengths:?} tokens"
    );
    ensure!(
        outputs
            .iter()
            .all(|output| output.tokens.len() as u64 == output.output_tokens),
        "a token without its log-probability"
    );
    ensure!(
        outputs
            .iter()
            .filter(|output| output.output_tokens == u64::from(OUTPUT_TOKENS))
            .count()
            > 10,
        "most answers are empty: nothing was compared"
    );
    Ok(())
}

fn sampling_is_not_greedy(greedy: &[Output], sampled: &[Output]) -> Result<()> {
    let differing = greedy
        .iter()
        .zip(sampled)
        .filter(|(greedy, sampled)| greedy.text != sampled.text)
        .count();
    ensure!(
        differing > 5,
        "only {differing} of twenty sampled answers differ from the greedy ones"
    );
    Ok(())
}

async fn another_seed_gives_other_tokens(
    fleet: &Fleet,
    prompt: &str,
    sampled: &Output,
) -> Result<()> {
    for seed in 1..=5 {
        let ask = Ask::new(MODEL, prompt, OUTPUT_TOKENS)
            .with("temperature", 1.0)
            .with("top_p", 0.95)
            .with("seed", seed);
        if ask.send(&fleet.api).await?.output.text != sampled.text {
            return Ok(());
        }
    }
    anyhow::bail!("six seeds give the same answer: {}", sampled.text)
}

/// Within the time of a lease every worker is empty, and the router counted no hand-off that was not proven right.
async fn nothing_is_left_behind(fleet: &Fleet) -> Result<()> {
    fleet.idle(Duration::from_secs(35)).await?;
    let metrics = fleet.metrics().await?;
    ensure!(
        metrics.count("baton_fallbacks_total", &[]) == 0.0,
        "the router fell back"
    );
    ensure!(
        metrics.count("baton_transfer_bytes_total", &[]) > 0.0,
        "no bytes were counted as moved"
    );
    Ok(())
}
