//! The one task that sends spans: in batches, one at a time, and the last ones within a bound when the process ends.
//!
//! A collector that is not there costs the queue's memory and one log line. `grpc` and `http` are the two ways to it.

mod grpc;
mod http;

use std::time::Duration;

use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::resource::v1::Resource;
use prometheus_client::metrics::counter::Counter;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, timeout, timeout_at};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use crate::otlp;
use crate::settings::{Batching, Protocol, Settings};
use crate::span::Span;
use crate::tracer::{Counts, OutcomeLabels, Tracer};

/// Pauses before a batch that could not be sent is tried again; after the last one it is given up.
const RETRIES: [Duration; 2] = [Duration::from_millis(500), Duration::from_secs(2)];

/// What waits when the process ends is sent within this; well below the grace of a pod.
const LAST: Duration = Duration::from_secs(3);

/// Sends what [`Tracer`]s put. Its owner spawns [`Exporter::run`] and waits for it.
#[derive(Debug)]
pub struct Exporter {
    spans: mpsc::Receiver<Span>,
    way: Way,
    resource: Resource,
    batching: Batching,
    timeout: Duration,
    exported: Counter,
    failed: Counter,
    dropped: Counter,
    /// Spans of the batch that is being sent.
    in_flight: u64,
    /// The collector did not take the last batch; it has been said.
    broken: bool,
}

#[derive(Debug)]
enum Way {
    Grpc(Box<grpc::Grpc>),
    Http(Box<http::Http>),
}

/// Why a batch was not taken.
#[derive(Clone, Debug, PartialEq, Eq)]
struct NotSent {
    message: String,
    /// Another try may help.
    again: bool,
}

impl Exporter {
    /// A tracer and what sends for it. `identity` says what the process is, `service.name` among it; the environment's own words
    /// win. Has to be called within a runtime.
    pub fn new(
        settings: Settings,
        identity: impl IntoIterator<Item = (&'static str, String)>,
        counts: &Counts,
    ) -> (Tracer, Self) {
        let Settings {
            endpoint,
            headers,
            timeout,
            service_name,
            resource,
            sampler,
            batching,
            warnings,
        } = settings;
        for warning in warnings {
            warn!("traces: {warning}; the default is in force");
        }
        info!(endpoint = %endpoint.uri, protocol = ?endpoint.protocol, "traces are exported");
        let own = identity
            .into_iter()
            .map(|(name, value)| (name.to_owned(), value));
        let service = service_name.map(|name| ("service.name".to_owned(), name));
        let way = match endpoint.protocol {
            Protocol::Grpc => Way::Grpc(Box::new(grpc::Grpc::new(endpoint.uri, headers, timeout))),
            Protocol::HttpProtobuf => Way::Http(Box::new(http::Http::new(endpoint.uri, headers))),
        };
        let (sender, spans) = mpsc::channel(batching.queue);
        let count = |outcome| counts.get_or_create(&OutcomeLabels { outcome }).clone();
        let exporter = Self {
            spans,
            way,
            resource: otlp::resource(own.chain(resource).chain(service)),
            batching,
            timeout,
            exported: count("exported"),
            failed: count("failed"),
            dropped: count("dropped"),
            in_flight: 0,
            broken: false,
        };
        (Tracer::new(sender, sampler, counts), exporter)
    }

    /// Sends until `stop`, and then what still waits, within three seconds.
    pub async fn run(mut self, stop: CancellationToken) {
        let overdue = async {
            stop.cancelled().await;
            sleep(LAST).await;
        };
        let in_time = tokio::select! {
            () = self.send_all(&stop) => true,
            () = overdue => false,
        };
        if !in_time {
            let mut left = self.in_flight;
            while self.spans.try_recv().is_ok() {
                left += 1;
            }
            self.dropped.inc_by(left);
            warn!(left, "the last spans were not taken in time");
        }
    }

    async fn send_all(&mut self, stop: &CancellationToken) {
        while let Some(batch) = next_batch(&mut self.spans, self.batching, stop).await {
            self.send(batch, stop).await;
        }
        self.spans.close();
        self.send_rest(stop).await;
    }

    async fn send_rest(&mut self, stop: &CancellationToken) {
        let mut rest = Vec::new();
        while let Ok(span) = self.spans.try_recv() {
            rest.push(span);
            if rest.len() == self.batching.batch {
                self.send(std::mem::take(&mut rest), stop).await;
            }
        }
        if !rest.is_empty() {
            self.send(rest, stop).await;
        }
    }

    async fn send(&mut self, spans: Vec<Span>, stop: &CancellationToken) {
        let count = u64::try_from(spans.len()).unwrap_or(u64::MAX);
        self.in_flight = count;
        let request = otlp::request(&self.resource, spans);
        let mut pauses = RETRIES.iter();
        loop {
            let answer = timeout(self.timeout, self.way.send(&request)).await;
            let not_sent = match answer {
                Ok(Ok(rejected)) => {
                    self.in_flight = 0;
                    let rejected = rejected.min(count);
                    self.exported.inc_by(count - rejected);
                    self.failed.inc_by(rejected);
                    if rejected > 0 {
                        debug!(rejected, "the collector did not want some spans");
                    }
                    if std::mem::take(&mut self.broken) {
                        info!("traces are exported again");
                    }
                    return;
                }
                Ok(Err(not_sent)) => not_sent,
                Err(_) => NotSent {
                    message: format!("no answer within {} ms", self.timeout.as_millis()),
                    again: true,
                },
            };
            if !std::mem::replace(&mut self.broken, true) {
                warn!(
                    "traces cannot be exported: {}; serving goes on, and this is said once",
                    not_sent.message
                );
            }
            match pauses.next() {
                Some(pause) if not_sent.again && !stop.is_cancelled() => tokio::select! {
                    () = sleep(*pause) => {}
                    () = stop.cancelled() => {}
                },
                _ => break,
            }
        }
        self.in_flight = 0;
        self.failed.inc_by(count);
    }
}

/// Spans to send next; `None` when no more can come, or after `stop`. Stopped while it collects it gives what it has taken.
async fn next_batch(
    spans: &mut mpsc::Receiver<Span>,
    batching: Batching,
    stop: &CancellationToken,
) -> Option<Vec<Span>> {
    let first = tokio::select! {
        biased;
        () = stop.cancelled() => None,
        first = spans.recv() => first,
    };
    let mut batch = vec![first?];
    let until = Instant::now() + batching.delay;
    while batch.len() < batching.batch {
        tokio::select! {
            biased;
            () = stop.cancelled() => break,
            next = timeout_at(until, spans.recv()) => match next {
                Ok(Some(span)) => batch.push(span),
                Ok(None) | Err(_) => break,
            },
        }
    }
    Some(batch)
}

impl Way {
    /// Spans that the collector took but did not want.
    async fn send(&mut self, request: &ExportTraceServiceRequest) -> Result<u64, NotSent> {
        match self {
            Self::Grpc(grpc) => grpc.send(request.clone()).await,
            Self::Http(http) => http.send(request).await,
        }
    }
}
