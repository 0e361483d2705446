//! The front over scripted runs: what a client sees for what a run does.

use std::fmt;
use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::response::Response;
use baton_placement::policy::{Overrides, Policy};
use baton_protocol::failure::FailureClass;
use baton_protocol::wire;
use bytes::Bytes;
use http::{HeaderMap, Request};
use http_body_util::BodyExt;
use prometheus_client::encoding::text::encode;
use prometheus_client::registry::Registry;
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tower::ServiceExt;

use super::access::Access;
use super::counts::Counts;
use super::{Front, FrontConfig};
use crate::clock::Clock;
use crate::clock::Moment;
use crate::policy::PolicyHandle;
use crate::run::{
    Dispatch, ModelListing, PassedOn, RunEvent, RunFailure, RunHandle, RunRequest, RunSink,
    TextArtifacts, Usage, channel,
};
use crate::text::template::TemplateArtifact;
use baton_text::samples::tokenizer_json;

mod abuse;
mod admission;
mod answers;
mod connections;
mod encrypted;
mod passing;
mod refusals;
mod requests;

/// A dispatch whose runs play a script, or, without one, are left to the test.
struct Scripted {
    policy: Arc<PolicyHandle>,
    artifacts: Option<Arc<TextArtifacts>>,
    /// The policy's workers are engines.
    engines: Option<PassedOn>,
    script: Vec<RunEvent>,
    /// Every run that was started; the test keeps its sink, or drops it.
    started: mpsc::UnboundedSender<(RunRequest, RunSink)>,
}

impl fmt::Debug for Scripted {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Scripted")
    }
}

impl Dispatch for Scripted {
    fn policy(&self, model: &str) -> Option<Arc<PolicyHandle>> {
        ["tiny", "org/alias"]
            .contains(&model)
            .then(|| self.policy.clone())
    }

    fn refused(&self, model: &str) -> Option<String> {
        (model == "spoilt").then(|| "p2".to_owned())
    }

    fn models(&self) -> Vec<ModelListing> {
        ["tiny", "org/alias"]
            .map(|id| ModelListing {
                id: id.to_owned(),
                created: 5,
                max_context: Some(100),
            })
            .to_vec()
    }

    fn artifacts(&self, _: &PolicyHandle) -> Option<Arc<TextArtifacts>> {
        self.artifacts.clone()
    }

    fn passed_on(&self, _: &PolicyHandle) -> Option<PassedOn> {
        self.engines.clone()
    }

    fn passes_on(&self) -> bool {
        self.engines.is_some()
    }

    fn ready(&self) -> Result<(), String> {
        Ok(())
    }

    fn start(&self, request: RunRequest) -> RunHandle {
        let (sink, handle) = channel("run-7".into());
        for event in &self.script {
            sink.events.try_send(event.clone()).unwrap();
        }
        self.started.send((request, sink)).unwrap();
        handle
    }
}

type Started = mpsc::UnboundedReceiver<(RunRequest, RunSink)>;

/// What a test may change of the front before it is built.
struct Setup {
    scripted: Scripted,
    config: FrontConfig,
    access: Access,
    counts: Counts,
    started: Started,
}

impl Setup {
    fn new(script: Vec<RunEvent>) -> Self {
        let (sender, started) = mpsc::unbounded_channel();
        let mut policy = Policy::new("p", "tiny", &[], &["decode"]);
        policy.overrides = Overrides::Allowed;
        Self {
            scripted: Scripted {
                policy: Arc::new(PolicyHandle::new(policy, Moment::default())),
                artifacts: Some(Arc::new(artifacts(
                    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}",
                ))),
                engines: None,
                script,
                started: sender,
            },
            config: FrontConfig::default(),
            access: Access::default(),
            counts: Counts::default(),
            started,
        }
    }

    /// What scrapers see of the front, now and later.
    fn seen(&self) -> impl Fn(&[&str]) + use<> {
        let mut registry = Registry::with_prefix("baton");
        self.counts.register(&mut registry);
        move |lines| {
            let mut text = String::new();
            encode(&mut text, &registry).unwrap();
            for line in lines {
                let there = text.lines().any(|other| other == *line);
                assert!(there, "{line} is missing in\n{text}");
            }
        }
    }

    fn build(self) -> (Router, Started) {
        let (front, started) = self.front();
        (front.routes(), started)
    }

    fn front(self) -> (Arc<Front>, Started) {
        let front = Front::new(
            Arc::new(self.scripted),
            self.config,
            self.access,
            Clock::start(),
            [7; 32],
            self.counts,
        );
        (front, self.started)
    }
}

/// A model of one token a byte of ASCII, two halves of "€", and an end: printable characters have their codes less 33 as ids.
fn artifacts(chat_template: &str) -> TextArtifacts {
    let mut tokens: Vec<String> = ('!'..='~').map(String::from).collect();
    tokens.extend(["Ġ", "Ċ", "âĤ", "¬", "<|end|>"].map(str::to_owned));
    let tokens: Vec<&str> = tokens.iter().map(String::as_str).collect();
    let decoder = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false});
    let template = TemplateArtifact {
        chat_template: chat_template.to_owned(),
        bos_token: None,
        eos_token: Some("<|end|>".to_owned()),
        add_bos: false,
    };
    TextArtifacts {
        tokenizer_digest: "tokenizer".to_owned(),
        tokenizer: Bytes::from(tokenizer_json(&tokens, &["<|end|>"], &decoder)),
        chat_template_digest: chat_template.to_owned(),
        chat_template: Bytes::from(serde_json::to_vec(&template).unwrap()),
        max_context: 100,
    }
}

const SPACE: u32 = 94;
const EURO: [u32; 2] = [96, 97];
const END: u32 = 98;

fn ids(text: &str) -> Vec<u32> {
    text.chars()
        .map(|character| {
            if character == ' ' {
                SPACE
            } else {
                u32::from(character) - 33
            }
        })
        .collect()
}

/// For salts of API keys.
fn salts() -> super::keys::SaltKey {
    super::keys::SaltKey::new(&baton_protocol::hash::HashKey::from_bytes(&[1; 32]))
}

fn token(id: u32) -> RunEvent {
    RunEvent::Token { id, logprobs: None }
}

/// A run that says `text`, a token a character, and finishes.
fn says(text: &str, reason: wire::FinishReason) -> Vec<RunEvent> {
    let mut script: Vec<RunEvent> = ids(text).into_iter().map(token).collect();
    script.push(RunEvent::Finished {
        reason,
        usage: Usage {
            prompt_tokens: 9,
            cached_tokens: 4,
            output_tokens: u32::try_from(text.len()).unwrap(),
        },
    });
    script
}

fn failed(status: u16) -> RunEvent {
    RunEvent::Failed(RunFailure {
        engine: None,
        told: false,
        class: FailureClass::NoWorker,
        status,
        message: "no decode worker is ready".to_owned(),
        param: None,
        code: "no_worker",
        retry_after_seconds: Some(3),
    })
}

fn post(path: &str, body: impl Into<Body>) -> Request<Body> {
    Request::post(path).body(body.into()).unwrap()
}

/// A chat request of one message with further fields.
fn chat(fields: &Value) -> Request<Body> {
    post(
        "/v1/chat/completions",
        with_fields(
            json!({"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}),
            fields,
        ),
    )
}

fn completion(fields: &Value) -> Request<Body> {
    post(
        "/v1/completions",
        with_fields(json!({"model": "tiny", "prompt": "hi"}), fields),
    )
}

fn with_fields(mut body: Value, fields: &Value) -> String {
    for (name, value) in fields.as_object().unwrap() {
        body[name] = value.clone();
    }
    body.to_string()
}

struct Reply {
    status: u16,
    headers: HeaderMap,
    text: String,
}

impl Reply {
    async fn read(response: Response) -> Self {
        let (head, body) = response.into_parts();
        let bytes = body.collect().await.unwrap().to_bytes();
        Self {
            status: head.status.as_u16(),
            headers: head.headers,
            text: String::from_utf8(bytes.to_vec()).unwrap(),
        }
    }

    fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|error| panic!("{error}: {}", self.text))
    }

    fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name)?.to_str().ok()
    }

    /// The data of all events but `[DONE]`, and whether that came.
    fn events(&self) -> (Vec<Value>, bool) {
        let mut events = Vec::new();
        let mut done = false;
        for event in self.text.split_terminator("\n\n") {
            assert!(!done, "an event after [DONE]: {event}");
            let data = event
                .strip_prefix("event: error\n")
                .unwrap_or(event)
                .strip_prefix("data: ")
                .unwrap();
            if data == "[DONE]" {
                done = true;
            } else {
                events.push(serde_json::from_str(data).unwrap());
            }
        }
        (events, done)
    }
}

/// One request to a front whose runs play `script`.
async fn ask(script: Vec<RunEvent>, request: Request<Body>) -> Reply {
    let (routes, _started) = Setup::new(script).build();
    Reply::read(routes.oneshot(request).await.unwrap()).await
}
