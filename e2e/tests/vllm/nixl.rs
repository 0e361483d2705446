//! vLLM's own connector: it moves the KV, and its word is what there is.

use std::time::Duration;

use anyhow::{Result, ensure};
use baton_e2e::fleet::Fleet;
use baton_e2e::told;
use baton_e2e::vllm::{Changed, Server, Vllm};

use super::equal::{self, Question, ask, same};
use super::events::Side;
use super::gated::Gated;
use super::{aborts, deaths, events, leases, odd};

/// A prompt of 200 KB fits, and little more: of 16,600 tokens where each has twelve letters.
const TEXTS: [(&str, &str); 4] = [
    ("maxModelLength: 4096", "maxModelLength: 18432"),
    ("\"400\"", "\"640\""),
    // Several are waited for until they end.
    ("leaseSeconds: 30", "leaseSeconds: 15"),
    // A leg is held until a server has started, which takes minutes beside other work. A link that was shut is still shut for the question
    // that is to find it so.
    (
        "  objective:\n",
        "  timeouts: {totalSeconds: 1200}\n  topology: {breaker: {openSeconds: 60}}\n  objective:\n",
    ),
];
const LARGE: usize = 200 << 10;
/// Longer than a lease.
const GIVEN_BACK: Duration = Duration::from_secs(90);

/// # Errors
/// What does not hold.
pub(crate) async fn connector(vllm: &Vllm) -> Result<()> {
    let changed = Changed {
        arguments: "--max-num-batched-tokens, \"1024\"",
        texts: &TEXTS,
        ..Changed::default()
    };
    let fleet = vllm.pair("vllm-cpu.yaml", changed).await?;
    equal::handed_over_or_not(&fleet, "EngineTrusted", &[60, 300]).await?;
    the_connector_says_so(&fleet).await?;
    odd::requests_answer_as_they_do_directly(vllm, &fleet, &[Some("Disaggregated")]).await?;
    for (side, number) in [(Side::Decode, 51), (Side::Prefill, 54)] {
        events::a_reset_is_followed(&fleet, side, number).await?;
    }
    for (side, number) in [(Side::Decode, 200), (Side::Prefill, 230)] {
        events::an_eviction_storm_is_followed(&fleet, side, number).await?;
    }
    a_large_prompt_is_handed_over(vllm, &fleet).await?;
    let gated = Gated::over(&fleet).await?;
    aborts::in_each_phase(&fleet, &gated).await?;
    leases::end_before_they_are_read(&fleet, &gated).await?;
    deaths::of_the_servers(vllm, &fleet, &gated).await?;
    for pool in ["prefill", "decode"] {
        Server::of(&fleet, pool)?
            .has_given_all_back(GIVEN_BACK)
            .await?;
    }
    deaths::fails_between_the_legs(&fleet, &gated).await?;
    drop(gated);
    fleet.end().await
}

async fn a_large_prompt_is_handed_over(vllm: &Vllm, fleet: &Fleet) -> Result<()> {
    let question = Question::completion(vllm.long_text(LARGE)?);
    let through = ask(&fleet.api, &question, Some("Disaggregated")).await?;
    let decode = Server::of(fleet, "decode")?;
    let direct = ask(&decode.client, &question.clone().salted("direct"), None).await?;
    same(&question, &direct, &through)?;
    let tokens = &through.body["usage"]["prompt_tokens"];
    ensure!(tokens.as_u64() > Some(16_000), "{}", through.body);
    told(&format!("200 KB, {tokens} tokens, answered alike"));
    Ok(())
}

async fn the_connector_says_so(fleet: &Fleet) -> Result<()> {
    let metrics = Server::of(fleet, "decode")?.metrics().await?;
    let bytes = metrics.count("vllm:nixl_bytes_transferred_sum", &[]);
    ensure!(bytes > 0.0, "NIXL counts no byte");
    ensure!(
        metrics.count("vllm:nixl_num_failed_transfers_total", &[]) == 0.0,
        "transfers failed"
    );
    let metrics = Server::of(fleet, "prefill")?.metrics().await?;
    ensure!(
        metrics.count("vllm:nixl_num_notifications_after_expiry_total", &[]) == 0.0,
        "late reads"
    );
    Ok(())
}
