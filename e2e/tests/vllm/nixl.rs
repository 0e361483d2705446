//! vLLM's own connector: it moves the KV, and its word is what there is.

use anyhow::{Result, ensure};
use baton_e2e::fleet::Fleet;
use baton_e2e::vllm::{Server, Vllm};

use super::equal;

/// # Errors
/// What does not hold.
pub(crate) async fn connector(vllm: &Vllm) -> Result<()> {
    let fleet = vllm
        .pair("vllm-cpu.yaml", "--max-num-batched-tokens, \"1024\"", &[])
        .await?;
    equal::handed_over_or_not(&fleet, "EngineTrusted", &[60, 300]).await?;
    the_connector_says_so(&fleet).await?;
    equal::a_repeated_prompt_is_credited(&fleet, 51).await?;
    fleet.end().await
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
