//! Connections that are kept, and what happens when an engine has closed one.

use std::time::Duration;

use crate::front::end;
use crate::pull::{ANSWER, PARAMETERS, prefill_answer};
use crate::steady::steady;
use crate::{NIXL, one, pair, policy};

const BODY: &str = r#"{"model":"m","prompt":"a"}"#;
/// For how long the router takes an idle connection for an open one.
pub(crate) const IDLE: Duration = Duration::from_secs(2);

#[tokio::test]
async fn a_connection_serves_one_request_after_another() {
    steady(IDLE, async || {
        let (served, mut d) = one().await;
        for earlier in 0..3 {
            let reply = served.post("Aggregated", "/v1/completions", BODY);
            let call = d.call().await;
            assert_eq!(call.earlier, earlier);
            call.answer(200, "application/json", ANSWER).await;
            end(reply).await;
        }
    })
    .await;
}

#[tokio::test]
async fn a_request_that_meets_a_closed_connection_is_sent_again_with_the_same_id() {
    steady(IDLE, async || {
        let (served, mut d) = one().await;
        let reply = served.post("Aggregated", "/v1/completions", BODY);
        d.call().await.answer(200, "application/json", ANSWER).await;
        end(reply).await;
        let reply = served.post("Aggregated", "/v1/completions", BODY);
        let stale = d.call().await;
        assert_eq!(stale.earlier, 1);
        let id = stale.header("x-request-id").unwrap().to_owned();
        stale.hang_up().await;
        let again = d.call().await;
        assert_eq!(
            (again.earlier, again.header("x-request-id")),
            (0, Some(id.as_str()))
        );
        again.answer(200, "application/json", ANSWER).await;
        assert_eq!(end(reply).await.body, ANSWER);
    })
    .await;
}

#[tokio::test]
async fn kv_is_never_fetched_twice() {
    steady(IDLE, async || {
        let (served, mut p, mut d) = pair(&policy(), NIXL).await;
        // One connection to the decode worker is idle.
        let reply = served.post("Aggregated", "/v1/completions", BODY);
        d.call().await.answer(200, "application/json", ANSWER).await;
        end(reply).await;
        let reply = served.post("Disaggregated", "/v1/completions", BODY);
        p.call()
            .await
            .answer(200, "application/json", prefill_answer().as_bytes())
            .await;
        let fetching = d.call().await;
        assert_eq!(
            (
                fetching.earlier,
                fetching.json()["kv_transfer_params"].to_string()
            ),
            (
                1,
                PARAMETERS.parse::<serde_json::Value>().unwrap().to_string()
            )
        );
        // It may have fetched, and its source have given the blocks to another request: nobody knows.
        fetching.hang_up().await;
        let whole = d.call().await;
        assert!(whole.json().get("kv_transfer_params").is_none());
        whole.answer(200, "application/json", ANSWER).await;
        let reply = end(reply).await;
        assert_eq!(reply.body, ANSWER);
        let record = served.record(&reply.run()).await;
        assert_eq!(record.fallback.unwrap().cause, "source-lost");
    })
    .await;
}
