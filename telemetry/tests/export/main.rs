//! What a collector on loopback gets, over both ways, and what happens when it is not there.

// The lint knows test functions only, and what they share is test code as well.
#![allow(clippy::unwrap_used)]

mod collector;

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use baton_telemetry::context::TraceContext;
use baton_telemetry::export::Exporter;
use baton_telemetry::settings::{Settings, TraceFlags};
use baton_telemetry::span::{Kind, Span};
use baton_telemetry::tracer::{Counts, OutcomeLabels, Tracer};
use collector::{Collector, Got};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

const SOON: Duration = Duration::from_secs(10);
const WAYS: [(&str, bool); 2] = [("grpc", false), ("http/protobuf", true)];

struct Exporting {
    tracer: Tracer,
    counts: Counts,
    stop: CancellationToken,
    task: JoinHandle<()>,
}

impl Exporting {
    fn begin(address: SocketAddr, protocol: &str, more: &[(&str, &str)]) -> Self {
        let flags = TraceFlags {
            otlp_endpoint: Some(format!("http://{address}")),
        };
        let settings = Settings::read(&flags, |name| {
            if name == "OTEL_EXPORTER_OTLP_PROTOCOL" {
                return Some(protocol.to_owned());
            }
            let found = more.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| (*value).to_owned())
        });
        let counts = Counts::default();
        let identity = [
            ("service.name", "baton-test".to_owned()),
            ("baton.role", "router".to_owned()),
        ];
        let (tracer, exporter) = Exporter::new(settings.unwrap().unwrap(), identity, &counts);
        let stop = CancellationToken::new();
        Self {
            tracer,
            counts,
            task: tokio::spawn(exporter.run(stop.clone())),
            stop,
        }
    }

    async fn end(self) -> Counts {
        self.stop.cancel();
        timeout(SOON, self.task).await.unwrap().unwrap();
        self.counts
    }
}

fn count(counts: &Counts, outcome: &'static str) -> u64 {
    counts.get_or_create(&OutcomeLabels { outcome }).get()
}

fn span(number: u64) -> Span {
    let context = TraceContext::root(None, &number.to_string(), true);
    Span::new(&context, None, "accept", Kind::Server, (number, number + 1))
}

/// The numbers of the spans that came.
fn numbers(got: &Got) -> Vec<u64> {
    let spans = got.request.resource_spans.iter();
    spans
        .flat_map(|resource| &resource.scope_spans)
        .flat_map(|scope| &scope.spans)
        .map(|span| span.start_time_unix_nano / 1_000)
        .collect()
}

async fn next(collector: &mut Collector) -> Got {
    timeout(SOON, collector.got.recv()).await.unwrap().unwrap()
}

#[tokio::test]
async fn spans_arrive_over_both_ways_with_what_the_process_is() {
    for (protocol, over_http) in WAYS {
        let mut collector = Collector::start(over_http, 0, 0).await;
        let variables = [
            ("OTEL_BSP_SCHEDULE_DELAY", "20"),
            ("OTEL_SERVICE_NAME", "mine"),
            ("OTEL_EXPORTER_OTLP_HEADERS", "x-key=secret"),
        ];
        let exporting = Exporting::begin(collector.address, protocol, &variables);
        exporting.tracer.put((0..3).map(span));
        let got = next(&mut collector).await;
        assert_eq!(numbers(&got), [0, 1, 2], "{protocol}");
        assert_eq!(got.key.as_deref(), Some("secret"), "{protocol}");
        let resource = got.request.resource_spans[0].resource.as_ref().unwrap();
        let shown = format!("{resource:?}");
        assert!(shown.contains("mine") && shown.contains("baton.role"));
        assert!(!shown.contains("baton-test"), "the environment's name wins");
        let counts = exporting.end().await;
        assert_eq!(count(&counts, "exported"), 3, "{protocol}");
    }
}

#[tokio::test]
async fn what_waits_at_the_end_is_sent() {
    let mut collector = Collector::start(false, 0, 0).await;
    let variables = [
        ("OTEL_BSP_SCHEDULE_DELAY", "3600000"),
        ("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4"),
    ];
    let exporting = Exporting::begin(collector.address, "grpc", &variables);
    exporting.tracer.put((0..6).map(span));
    // A whole batch is sent; two spans are taken already when the end comes.
    let mut all = numbers(&next(&mut collector).await);
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    exporting.tracer.put((6..10).map(span));
    let counts = exporting.end().await;
    while all.len() < 10 {
        let got = numbers(&next(&mut collector).await);
        assert!(got.len() <= 4, "{got:?} in one batch");
        all.extend(got);
    }
    assert_eq!(all, (0..10).collect::<Vec<u64>>());
    assert_eq!(count(&counts, "exported"), 10);
    assert_eq!(count(&counts, "failed"), 0);
}

#[tokio::test]
async fn a_collector_that_is_busy_is_asked_again() {
    for (protocol, over_http) in WAYS {
        let mut collector = Collector::start(over_http, 1, 1).await;
        let variables = [("OTEL_BSP_SCHEDULE_DELAY", "10")];
        let exporting = Exporting::begin(collector.address, protocol, &variables);
        exporting.tracer.put((0..2).map(span));
        assert_eq!(numbers(&next(&mut collector).await), [0, 1]);
        let counts = exporting.end().await;
        // It says itself that it did not want one of them.
        assert_eq!(count(&counts, "exported"), 1, "{protocol}");
        assert_eq!(count(&counts, "failed"), 1, "{protocol}");
    }
}

#[tokio::test]
async fn a_collector_that_is_not_there_holds_nobody_up() {
    // A port that was free a moment ago, and a listener that accepts and never answers.
    let free = {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        listener.local_addr().unwrap()
    };
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    for address in [free, silent.local_addr().unwrap()] {
        for (protocol, _) in WAYS {
            let variables = [
                ("OTEL_BSP_SCHEDULE_DELAY", "1"),
                ("OTEL_BSP_MAX_QUEUE_SIZE", "8"),
                ("OTEL_EXPORTER_OTLP_TIMEOUT", "60000"),
            ];
            let exporting = Exporting::begin(address, protocol, &variables);
            let began = Instant::now();
            exporting.tracer.put((0..10_000).map(span));
            assert!(began.elapsed() < Duration::from_secs(2), "putting waited");
            assert!(count(&exporting.counts, "dropped") >= 9_900);
            let began = Instant::now();
            let counts = exporting.end().await;
            // Some three seconds; a minute where the end waited for the exporter's own limit.
            assert!(began.elapsed() < Duration::from_secs(30), "the end waited");
            assert_eq!(count(&counts, "exported"), 0);
            let all = count(&counts, "failed") + count(&counts, "dropped");
            assert_eq!(all, 10_000, "every span is counted");
        }
    }
}
