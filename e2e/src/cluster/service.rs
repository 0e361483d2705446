//! What leads through a Service: endpoints and kube-proxy follow the pods, a moment later than their status says.

use std::time::Duration;

use anyhow::Result;
use serde_json::Value;

use crate::http::Client;
use crate::wait;

/// One answer of a pod that is there. A packet to a pod that is gone is lost without a word.
const ONE: Duration = Duration::from_secs(5);
/// With two pods behind a Service, one of a million rows of this length meets only one of them.
const ROW: u32 = 20;

/// JSON from a path, asked for once and not waited for long.
///
/// # Errors
/// No connection, no whole answer in time, another status than 200, or no JSON.
pub async fn once(client: Client, path: &str) -> Result<Value> {
    tokio::time::timeout(ONE, client.get_json(path)).await?
}

/// Waits until answers in a row are as wanted: from then on it leads nowhere else. `wanted` says what is wrong with one.
///
/// # Errors
/// They are not within the time; the error is what the last one lacked.
pub async fn settled(
    what: &str,
    within: Duration,
    client: Client,
    path: &str,
    wanted: impl Fn(&Value) -> Result<(), String>,
) -> Result<()> {
    wait::until(what, within, async || {
        for _ in 0..ROW {
            let answer = once(client, path).await;
            wanted(&answer.map_err(|error| format!("{error:#}"))?)?;
        }
        Ok(())
    })
    .await
}
