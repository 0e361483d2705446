//! `baton ask`: one chat message, its answer as it comes, and why it went where it went.

use std::time::Duration;

use anyhow::{Context, bail};
use baton_placement::record::DecisionRecord;
use serde_json::{Value, json};

use crate::arguments::{AskArguments, Output};
use crate::client::{Client, run};
use crate::explain::sentence;
use crate::failure::{Verdict, wrong_input};
use crate::records::Records;
use crate::terminal;
use crate::up::processes::Processes;

/// The default of a router that was started without a word.
const ROUTER: &str = "127.0.0.1:8000";
/// A record is written when its run has ended, a moment after the client saw the end.
const RECORD_WAIT: Duration = Duration::from_secs(3);

/// # Errors
/// No router answers, or the request is refused.
pub(crate) async fn ask(arguments: AskArguments) -> anyhow::Result<Verdict> {
    let known = Processes::read(&arguments.records.state_dir).unwrap_or_default();
    let here = known
        .iter()
        .find(|process| process.role == "router")
        .map(|process| process.address.clone());
    let address = arguments
        .router
        .clone()
        .or(here)
        .unwrap_or_else(|| ROUTER.to_owned());
    let client = Client::new(&address);
    let model = match arguments.model.clone() {
        Some(model) => model,
        None => only_model(&client).await?,
    };

    let body = json!({
        "model": model,
        "messages": [{"role": "user", "content": arguments.text}],
        "max_tokens": arguments.max_tokens,
        "temperature": arguments.temperature,
        "stream": true,
        "stream_options": {"include_usage": true},
    });
    let headers: Vec<(&str, &str)> = arguments
        .mode
        .iter()
        .map(|mode| ("x-baton-mode", mode.as_str()))
        .collect();
    // A token that cannot be read is said before the answer is made, not instead of it.
    let records = Records::of(&arguments.records)?;
    let mut events = match client
        .stream("/v1/chat/completions", &headers, &body)
        .await?
    {
        Ok(events) => events,
        Err(answer) if answer.status.is_client_error() => {
            return Err(wrong_input(answer.complaint()));
        }
        Err(answer) => bail!("{}", answer.complaint()),
    };
    let run = run(&events.headers).context("the router gave no run id: is it a Baton router?")?;
    let table = arguments.output.output == Output::Table;
    let mut text = String::new();
    let mut usage = Value::Null;
    loop {
        let event = match events.next().await {
            Ok(Some(event)) => event,
            Ok(None) => break,
            Err(error) => {
                if table && !text.is_empty() {
                    terminal::line("")?;
                }
                return Err(error.context(format!("run {run}")));
            }
        };
        if let Some(piece) = event["choices"][0]["delta"]["content"].as_str() {
            text.push_str(piece);
            if table {
                terminal::part(piece)?;
            }
        }
        if event["usage"].is_object() {
            usage = event["usage"].clone();
        }
    }
    let record = wait_for_record(&records, &run, RECORD_WAIT).await;
    if table {
        terminal::line("")?;
        terminal::line("")?;
        terminal::line(&format!("run {run}"))?;
        match record {
            Ok(record) => terminal::line(&sentence(&record))?,
            Err(error) => terminal::note(&format!("why it went there cannot be said: {error:#}")),
        }
    } else {
        let decision = record.as_ref().ok();
        let reason = decision.map(|record| record.reason.word());
        let explanation = decision.map(|record| record.explanation.clone());
        terminal::json(
            &json!({"run": run, "text": text, "usage": usage, "reason": reason, "explanation": explanation}),
        )?;
    }
    Ok(Verdict::Good)
}

async fn only_model(client: &Client) -> anyhow::Result<String> {
    let body = client.get_good("/v1/models").await?;
    let models: Vec<&str> = body["data"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|model| model["id"].as_str())
        .collect();
    match models.as_slice() {
        [] => bail!(
            "{} serves no model yet: wait until baton up is ready",
            client.base()
        ),
        [model] => Ok((*model).to_owned()),
        several => Err(wrong_input(format!(
            "several models are served, name one with --model: {}",
            several.join(", ")
        ))),
    }
}

/// The record of a run that has ended, once it is there.
pub(crate) async fn wait_for_record(
    records: &Records,
    run: &str,
    within: Duration,
) -> anyhow::Result<DecisionRecord> {
    let wait = async {
        loop {
            if let Some(record) = records
                .find(run)
                .await?
                .filter(|record| record.outcome.is_some())
            {
                return Ok(record);
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    match tokio::time::timeout(within, wait).await {
        Ok(found) => found,
        Err(_) => bail!("no record of run {run} after {} s", within.as_secs()),
    }
}
