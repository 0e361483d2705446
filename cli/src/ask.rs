//! `baton ask`: one chat message, its answer as it comes, and why it went where it went.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use serde_json::{Value, json};

use crate::arguments::{AskArguments, Output};
use crate::client::{Client, run};
use crate::explain::sentence;
use crate::failure::{Verdict, wrong_input};
use crate::records::{Awaited, Records};
use crate::terminal;
use crate::up::processes::{Process, Processes};

/// The default of a router that was started without a word.
const ROUTER: &str = "127.0.0.1:8000";
/// A record is written when its run has ended, a moment after the client saw the end.
const RECORD_WAIT: Duration = Duration::from_secs(3);
/// A router that crashed is started again within this, unless it crashes again and again.
const ROUTER_WAIT: Duration = Duration::from_secs(10);

/// # Errors
/// No router answers, or the request is refused.
pub(crate) async fn ask(arguments: AskArguments) -> anyhow::Result<Verdict> {
    let address = match arguments.router.clone() {
        Some(address) => address,
        None => router_of(&arguments.records.state_dir, ROUTER_WAIT).await?,
    };
    let client = Client::new(&address)?;
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
    let mut awaited = Awaited::from_now(&records);
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
    let record = awaited.record(&run, RECORD_WAIT).await;
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

/// The router of a state directory. One that is being started again is waited for; where nobody runs, the default.
async fn router_of(state_dir: &Path, within: Duration) -> anyhow::Result<String> {
    let wait = async {
        loop {
            let known = Processes::read(state_dir).unwrap_or_default();
            if let Some(router) = known.iter().find(|process| process.role == "router") {
                return router.address.clone();
            }
            // Its workers run on, so it comes back, at the same address.
            if !known.iter().any(Process::is_alive) {
                return ROUTER.to_owned();
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    tokio::time::timeout(within, wait).await.map_err(|_| {
        anyhow!(
            "the router of {} is away and was not back within {} s: {} says why",
            state_dir.display(),
            within.as_secs(),
            state_dir.join("logs/router.log").display()
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(role: &str, pid: u32) -> Process {
        Process {
            name: role.to_owned(),
            role: role.to_owned(),
            pid,
            address: format!("{role}:1"),
        }
    }

    #[tokio::test]
    async fn the_router_is_the_one_of_the_state_directory_and_waited_for_while_its_workers_run() {
        let folder = tempfile::tempdir().unwrap();
        let router = |within| router_of(folder.path(), within);
        assert_eq!(
            router(Duration::ZERO).await.unwrap(),
            ROUTER,
            "nothing is there"
        );
        let processes = Processes::new(folder.path()).unwrap();
        assert_eq!(router(Duration::ZERO).await.unwrap(), ROUTER, "nobody runs");
        // No process has the largest id.
        processes
            .started(process("decode", i32::MAX as u32))
            .unwrap();
        assert_eq!(
            router(Duration::ZERO).await.unwrap(),
            ROUTER,
            "left by one that was killed"
        );
        processes
            .started(process("decode", std::process::id()))
            .unwrap();
        let error = router(Duration::ZERO).await.unwrap_err().to_string();
        assert!(
            error.contains("is away and was not back within 0 s"),
            "{error}"
        );
        let (found, _) = tokio::join!(router(Duration::from_secs(60)), async {
            processes.started(process("router", 1))
        });
        assert_eq!(found.unwrap(), "router:1");
    }
}
