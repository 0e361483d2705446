//! The same answers, whichever server computed the prompt.

use anyhow::{Context, Result, ensure};
use baton_e2e::fleet::Fleet;
use baton_e2e::http::Client;
use baton_e2e::record::Record;
use baton_e2e::vllm::{MODEL, Server, assembled, comparable, differences};
use serde_json::{Value, json};

/// A request, and where it goes.
#[derive(Clone, Debug)]
pub(crate) struct Question {
    pub(crate) path: &'static str,
    pub(crate) body: Value,
}

pub(crate) const CHAT: &str = "/v1/chat/completions";
pub(crate) const COMPLETIONS: &str = "/v1/completions";

impl Question {
    pub(crate) fn chat(text: &str) -> Self {
        let body = json!({
            "model": MODEL, "messages": [{"role": "user", "content": text}],
            "max_tokens": 16, "temperature": 0, "logprobs": true, "top_logprobs": 2,
        });
        Self { path: CHAT, body }
    }

    pub(crate) fn completion(prompt: impl Into<Value>) -> Self {
        let body = json!({"model": MODEL, "prompt": prompt.into(), "max_tokens": 16, "temperature": 0, "logprobs": 2});
        Self {
            path: COMPLETIONS,
            body,
        }
    }

    #[must_use]
    pub(crate) fn with(mut self, field: &str, value: impl Into<Value>) -> Self {
        self.body[field] = value.into();
        self
    }

    /// A cache of its own: nothing that was asked before counts.
    #[must_use]
    pub(crate) fn salted(self, salt: &str) -> Self {
        self.with("cache_salt", salt)
    }
}

/// An answer: status, the body or the stream as one, and the run's id where it went through Baton.
#[derive(Clone, Debug)]
pub(crate) struct Answered {
    pub(crate) status: u16,
    pub(crate) body: Value,
    pub(crate) run: Option<String>,
}

impl Answered {
    /// # Errors
    /// It went past Baton.
    pub(crate) fn run(&self) -> Result<&str> {
        self.run.as_deref().context("x-baton-run is missing")
    }
}

/// Asks in whole or as a stream.
///
/// # Errors
/// No answer, or a stream that breaks off.
pub(crate) async fn ask(
    client: &Client,
    question: &Question,
    mode: Option<&str>,
) -> Result<Answered> {
    let headers: Vec<_> = mode
        .map(|mode| ("x-baton-mode", mode))
        .into_iter()
        .collect();
    let open = client.open(question.path, &headers, &question.body).await?;
    let (status, run) = (open.status, open.header("x-baton-run").map(str::to_owned));
    let streamed = open
        .header("content-type")
        .is_some_and(|kind| kind.starts_with("text/event-stream"));
    let body = if streamed {
        let mut events = open.events();
        let mut all = Vec::new();
        while let Some(event) = events.next().await? {
            all.push(event.data);
        }
        assembled(&all)?
    } else {
        open.whole().await?.json()?
    };
    Ok(Answered { status, body, run })
}

/// A text that no earlier question began with.
pub(crate) fn prompt(number: usize, words: usize) -> String {
    let words: Vec<String> = (0..words)
        .map(|word| format!("word{}", (word * 7919 + number * 104_729) % 9973))
        .collect();
    format!("Question {number}. {}", words.join(" "))
}

/// Questions of several lengths, whole and streamed, as chat and as completions: through Baton with the prompt computed on the other
/// server, and directly at the server that decodes, which computes all of it. Every field is the same.
///
/// # Errors
/// The first that differs.
pub(crate) async fn handed_over_or_not(
    fleet: &Fleet,
    assurance: &str,
    lengths: &[usize],
) -> Result<()> {
    let decode = Server::of(fleet, "decode")?;
    for (index, words) in lengths.iter().enumerate() {
        let text = prompt(index, *words);
        let mut questions = vec![Question::chat(&text), Question::completion(text.clone())];
        if index % 2 == 1 {
            for question in &mut questions {
                question.body["stream"] = true.into();
                question.body["stream_options"] = json!({"include_usage": true});
            }
        }
        for question in &questions {
            let before = decode.transferred_tokens().await?;
            let through = ask(&fleet.api, question, Some("Disaggregated")).await?;
            ensure!(through.status == 200, "{through:?}");
            let alone = question.clone().salted(&format!("alone-{index}"));
            let direct = ask(&decode.client, &alone, None).await?;
            same(question, &direct, &through)?;

            let tokens = through.body["usage"]["prompt_tokens"]
                .as_f64()
                .context("usage.prompt_tokens is missing")?;
            decode.has_transferred(before + tokens).await?;
            let record = Record::of(&fleet.admin, through.run()?).await?;
            record.check_order()?;
            ensure!(record.kind()? == "Remote", "{}", record.0);
            ensure!(record.text("assurance") == assurance, "{}", record.0);
            ensure!(record.0["fallback"].is_null(), "{}", record.0);
        }
    }
    Ok(())
}

/// # Errors
/// The fields that differ.
pub(crate) fn same(question: &Question, direct: &Answered, through: &Answered) -> Result<()> {
    ensure!(
        direct.status == through.status,
        "{question:?}: directly {direct:?}, through Baton {through:?}"
    );
    let found = differences(
        &comparable(direct.body.clone()),
        &comparable(through.body.clone()),
    );
    ensure!(
        found.is_empty(),
        "{question:?}: directly and through Baton: {}",
        found.join("; ")
    );
    Ok(())
}

/// A prompt asked twice on the decode server alone: the second time the decision credits what vLLM then says it had cached.
///
/// # Errors
/// They are not equal, or nothing was cached.
pub(crate) async fn a_repeated_prompt_is_credited(fleet: &Fleet, number: usize) -> Result<()> {
    let question = Question::chat(&prompt(number, 200));
    let first = ask(&fleet.api, &question, Some("Aggregated")).await?;
    ensure!(first.status == 200, "{first:?}");
    // The events of the first are on their way.
    baton_e2e::wait::until(
        "the prompt is credited",
        std::time::Duration::from_secs(30),
        async || {
            let again = ask(&fleet.api, &question, Some("Aggregated"))
                .await
                .map_err(|error| format!("{error:#}"))?;
            let record = Record::of(
                &fleet.admin,
                again.run().map_err(|error| error.to_string())?,
            )
            .await
            .map_err(|error| format!("{error:#}"))?;
            let chosen = record.chosen().map_err(|error| error.to_string())?;
            let credited = chosen["cachedTokens"]["decode"].as_u64();
            let reported = again.body["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64();
            if credited == reported && credited.is_some_and(|tokens| tokens > 0) {
                return Ok(());
            }
            Err(format!(
                "credited {credited:?}, reported {reported:?}, {}",
                record.0["input"]
            ))
        },
    )
    .await
}
