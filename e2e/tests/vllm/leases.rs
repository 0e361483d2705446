//! Leases that end before their blocks are read, with vLLM's own connector: the decode leg is not sent where the router can know, and
//! where it cannot, the late read is noticed and its link shut.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use baton_e2e::fleet::Fleet;
use baton_e2e::gate::Held;
use baton_e2e::told;
use baton_e2e::vllm::Server;
use baton_e2e::wait;
use tokio::sync::oneshot;

use super::equal::{Answered, Question, ask, prompt, same};
use super::gated::Gated;

/// Longer than a lease, and than a busy machine's answer to a question for metrics.
const EXPIRED: Duration = Duration::from_secs(90);
/// Counters are read once a second.
const SOON: Duration = Duration::from_secs(30);
const LATE: &str = "vllm:nixl_num_notifications_after_expiry_total";

/// Two prompts whose leases end, at once: of the first the decode leg is on its way all the while, of the second the answer of the server
/// that prefilled it.
///
/// # Errors
/// What does not hold.
pub(crate) async fn end_before_they_are_read(fleet: &Fleet, gated: &Gated) -> Result<()> {
    let (prefill, decode) = (Server::of(fleet, "prefill")?, Server::of(fleet, "decode")?);
    let (late, guarded) = (
        Question::completion(prompt(400, 60)),
        Question::completion(prompt(401, 60)),
    );
    let before = prefill.metrics().await?;
    let (second, may_begin) = oneshot::channel();
    let hold = async {
        gated.decode.has_caught(1).await?;
        gated.prefill.hold(Held::Bodies);
        second
            .send(())
            .ok()
            .context("the second question is gone")?;
        gated.prefill.has_caught(1).await?;
        prefill.has_given_all_back(EXPIRED).await?;
        gated.prefill.hold(Held::Nothing);
        gated.decode.has_caught(2).await?;
        gated.decode.hold(Held::Nothing);
        anyhow::Ok(())
    };
    gated.decode.hold(Held::Requests);
    let (first, second, held) = tokio::join!(
        gated.ask(&late),
        async {
            may_begin.await.context("the first question is gone")?;
            gated.ask(&guarded).await
        },
        hold
    );
    held?;
    let (first, second) = (first?, second?);
    is_right(&decode, &guarded, &second).await?;
    let record = gated.record(&second).await?;
    record.check_order()?;
    ensure!(record.kind()? == "Remote", "{}", record.0);
    ensure!(
        record.0["fallback"]["cause"] == "lease-gone",
        "the decode leg was sent: {}",
        record.0["fallback"]
    );

    let record = gated.record(&first).await?;
    record.check_order()?;
    let kept = record.kind()? == "Remote" && record.0["fallback"].is_null();
    ensure!(kept, "the decode leg was not sent: {}", record.0);
    // Nobody has taken the blocks yet, so that they still hold what they held; nothing promises that.
    is_right(&decode, &late, &first).await?;
    // An idle server hears of the read, and counts it, when it computes next: until then nothing has taken those blocks.
    let question = Question::completion(prompt(403, 10));
    Box::pin(ask(&prefill.client, &question, None)).await?;
    counts(&prefill, LATE, before.count(LATE, &[]) + 1.0, SOON).await?;
    gated.counts("baton_engine_late_reads_total").await?;
    told(
        "a lease ended: the router sent no decode leg, and of the one that was on its way it told, and shut the link",
    );
    // Shut until a probe works, and none is made for the policy's minute.
    let next = Question::completion(prompt(402, 40));
    let through = gated.ask(&next).await?;
    is_right(&decode, &next, &through).await?;
    let record = gated.record(&through).await?;
    ensure!(
        record.kind()? == "Local" && record.0["filtered"]["BreakerOpen"].as_u64() > Some(0),
        "the link is open: {}: {}",
        record.0["filtered"],
        record.text("explanation")
    );
    gated.hands_over(fleet, 410..450).await.map(|_| ())
}

async fn is_right(decode: &Server, question: &Question, through: &Answered) -> Result<()> {
    let direct = question.clone().salted("direct");
    let direct = Box::pin(ask(&decode.client, &direct, None)).await?;
    same(question, &direct, through)
}

/// Waits until a counter of a server is at least so high.
async fn counts(server: &Server, name: &str, count: f64, within: Duration) -> Result<()> {
    wait::until(name, within, async || {
        let metrics = server.metrics().await.map_err(|error| error.to_string())?;
        let found = metrics.count(name, &[]);
        (found >= count)
            .then_some(())
            .ok_or_else(|| format!("{found} of {count}"))
    })
    .await
}
