//! A collector of traces (OTLP over gRPC), as one would run beside a deployment: it keeps every span that any process exports.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{
    TraceService, TraceServiceServer,
};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_proto::tonic::common::v1::KeyValue;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use opentelemetry_proto::tonic::trace::v1::status::StatusCode;
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response, Status};

use crate::wait;

/// Attributes by name, values as text.
pub type Attributes = BTreeMap<String, String>;

/// A span as it arrived.
#[derive(Clone, Debug)]
pub struct Span {
    /// What the process says about itself.
    pub process: Attributes,
    /// Hexadecimal.
    pub trace: String,
    pub id: String,
    /// Empty: none.
    pub parent: String,
    pub name: String,
    pub kind: SpanKind,
    /// Microseconds since the Unix epoch.
    pub begin: u64,
    pub end: u64,
    pub attributes: Attributes,
    pub events: Vec<String>,
    pub failed: bool,
}

/// The spans of one trace.
#[derive(Clone, Debug)]
pub struct Trace(pub Vec<Span>);

/// A running collector.
#[derive(Debug)]
pub struct Collector {
    address: SocketAddr,
    spans: Kept,
    _tasks: JoinSet<()>,
}

#[derive(Clone, Debug, Default)]
struct Kept(Arc<Mutex<Vec<Span>>>);

impl Collector {
    /// Listens on a free port of loopback.
    ///
    /// # Errors
    /// There is none.
    pub async fn start() -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let spans = Kept::default();
        let server = tonic::transport::Server::builder()
            .add_service(TraceServiceServer::new(spans.clone()))
            .serve_with_incoming(TcpListenerStream::new(listener));
        let mut tasks = JoinSet::new();
        // A server that fails shows as spans that do not come.
        tasks.spawn(async move {
            let _ = server.await;
        });
        Ok(Self {
            address,
            spans,
            _tasks: tasks,
        })
    }

    /// For `OTEL_EXPORTER_OTLP_ENDPOINT`.
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Waits until a trace is whole, as the caller knows it.
    ///
    /// # Errors
    /// It does not become so.
    pub async fn trace(
        &self,
        id: &str,
        within: Duration,
        whole: impl Fn(&Trace) -> bool,
    ) -> Result<Trace> {
        wait::until(&format!("trace {id} is whole"), within, async || {
            let trace = self.so_far(id);
            if whole(&trace) {
                return Ok(trace);
            }
            Err(trace.shown())
        })
        .await
    }

    /// Spans of a trace that have come until now.
    pub fn so_far(&self, id: &str) -> Trace {
        let spans = self.spans.0.lock();
        let spans = spans.map(|spans| spans.clone()).unwrap_or_default();
        Trace(spans.into_iter().filter(|span| span.trace == id).collect())
    }

    /// Every span of every trace.
    pub fn all(&self) -> Vec<Span> {
        let spans = self.spans.0.lock();
        spans.map(|spans| spans.clone()).unwrap_or_default()
    }
}

impl Trace {
    /// One line for each span.
    pub fn shown(&self) -> String {
        let lines = self.0.iter().map(|span| {
            format!(
                "{} {:?} of {} ({} under {}) {:?}",
                span.name,
                span.kind,
                span.made_by(),
                span.id,
                span.parent,
                span.attributes
            )
        });
        lines.collect::<Vec<_>>().join("\n")
    }

    /// Spans of a name and kind.
    pub fn of(&self, name: &str, kind: SpanKind) -> Vec<&Span> {
        let spans = self.0.iter();
        spans
            .filter(|span| span.name == name && span.kind == kind)
            .collect()
    }

    /// The only span of a name and kind.
    ///
    /// # Errors
    /// There is none, or more than one.
    pub fn one(&self, name: &str, kind: SpanKind) -> Result<&Span> {
        match self.of(name, kind).as_slice() {
            [one] => Ok(one),
            more => anyhow::bail!("{} spans {name} {kind:?} in\n{}", more.len(), self.shown()),
        }
    }

    /// Checks that the spans hang together: each id once, each parent there, but for the root's own, and each span of one machine
    /// within its parent's time.
    ///
    /// # Errors
    /// They do not.
    pub fn connected(&self, above: &str, slack: u64) -> Result<()> {
        let root = self.one("accept", SpanKind::Server)?;
        ensure!(
            root.parent == above,
            "the root's parent is {:?} instead of {above:?}",
            root.parent
        );
        let ids: BTreeSet<&str> = self.0.iter().map(|span| span.id.as_str()).collect();
        ensure!(ids.len() == self.0.len(), "an id twice:\n{}", self.shown());
        for span in &self.0 {
            ensure!(span.begin <= span.end, "{} ends first", span.name);
            if span.id == root.id {
                continue;
            }
            let parent = self.0.iter().find(|one| one.id == span.parent);
            let parent = parent
                .with_context(|| format!("{} hangs in the air:\n{}", span.name, self.shown()))?;
            // What a failed or cancelled call had begun ends after it.
            let cut = parent.failed || span.attributes.contains_key("baton.status");
            let within =
                parent.begin <= span.begin + slack && (cut || span.end <= parent.end + slack);
            ensure!(
                within,
                "{} of {} is {}..{}, its parent {} {}..{}",
                span.name,
                span.made_by(),
                span.begin,
                span.end,
                parent.name,
                parent.begin,
                parent.end
            );
        }
        Ok(())
    }
}

impl Span {
    /// The worker that made it, or the service.
    pub fn made_by(&self) -> &str {
        let worker = self.process.get("baton.worker");
        let name = worker.or_else(|| self.process.get("service.name"));
        name.map_or("", String::as_str)
    }

    /// An attribute as text.
    ///
    /// # Errors
    /// It has none of that name.
    pub fn attribute(&self, name: &str) -> Result<&str> {
        let value = self.attributes.get(name);
        value
            .map(String::as_str)
            .with_context(|| format!("{} has no {name}: {:?}", self.name, self.attributes))
    }
}

#[tonic::async_trait]
impl TraceService for Kept {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        let mut arrived = Vec::new();
        for of_process in request.into_inner().resource_spans {
            let process = of_process
                .resource
                .map(|resource| texts(&resource.attributes))
                .unwrap_or_default();
            let spans = of_process
                .scope_spans
                .into_iter()
                .flat_map(|scope| scope.spans);
            arrived.extend(spans.map(|span| {
                Span {
                    process: process.clone(),
                    trace: hexadecimal(&span.trace_id),
                    id: hexadecimal(&span.span_id),
                    parent: hexadecimal(&span.parent_span_id),
                    kind: span.kind(),
                    begin: span.start_time_unix_nano / 1_000,
                    end: span.end_time_unix_nano / 1_000,
                    attributes: texts(&span.attributes),
                    events: span.events.into_iter().map(|event| event.name).collect(),
                    failed: span
                        .status
                        .is_some_and(|status| status.code() == StatusCode::Error),
                    name: span.name,
                }
            }));
        }
        if let Ok(mut spans) = self.0.lock() {
            spans.extend(arrived);
        }
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn texts(attributes: &[KeyValue]) -> Attributes {
    attributes
        .iter()
        .map(|pair| {
            let value = pair.value.as_ref().and_then(|value| value.value.as_ref());
            (pair.key.clone(), value.map_or_else(String::new, text))
        })
        .collect()
}

fn text(value: &Value) -> String {
    match value {
        Value::StringValue(text) => text.clone(),
        Value::IntValue(number) => number.to_string(),
        Value::DoubleValue(number) => number.to_string(),
        Value::BoolValue(flag) => flag.to_string(),
        Value::ArrayValue(array) => {
            let values = array.values.iter().filter_map(|value| value.value.as_ref());
            values.map(text).collect::<Vec<_>>().join(",")
        }
        other => format!("{other:?}"),
    }
}
