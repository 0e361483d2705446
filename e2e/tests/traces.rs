//! One run is one connected trace, made by every process that had a part in it; and no trace tells what a client asked.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use baton_e2e::collector::{Collector, Trace};
use baton_e2e::fleet::Fleet;
use baton_e2e::manifest::Manifest;
use baton_e2e::openai::Ask;
use baton_e2e::record::Record;
use baton_e2e::{scenario, wait};
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;

const SOON: Duration = Duration::from_secs(20);

/// Microseconds by which clocks of processes on one machine may seem to differ: each is anchored to the machine's once.
const SLACK: u64 = 2_000;

const CLIENT_TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
const CLIENT_SPAN: &str = "b7ad6b7169203331";

fn prompt(salt: u32) -> Vec<u32> {
    (0..180)
        .map(|index| 3 + (index * 11 + salt) % 200)
        .collect()
}

fn ask(mode: &'static str, salt: u32, tokens: u32) -> Ask {
    Ask::ids("tiny", &prompt(salt), tokens)
        .with("ignore_eos", true)
        .mode(mode)
}

/// A fleet whose processes all export to the collector, soon.
async fn fleet(collector: &Collector, manifest: &Manifest, more: &[(&str, &str)]) -> Result<Fleet> {
    let endpoint = collector.endpoint();
    let mut variables = vec![
        ("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint.as_str()),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"),
        ("OTEL_BSP_SCHEDULE_DELAY", "30"),
    ];
    variables.extend_from_slice(more);
    Fleet::of_with(manifest, &variables).await
}

/// Asks as a client that has a trace of its own; the run's id.
async fn asked_within_a_trace(
    fleet: &Fleet,
    ask: &Ask,
    trace: &str,
    flags: &str,
) -> Result<String> {
    let parent = format!("00-{trace}-{CLIENT_SPAN}-{flags}");
    let mut headers = vec![("traceparent", parent.as_str())];
    headers.extend(ask.mode.map(|mode| ("x-baton-mode", mode)));
    let answer = fleet
        .api
        .post("/v1/completions", &headers, &ask.body)
        .await?
        .well()?;
    let run = answer.header("x-baton-run").context("no x-baton-run")?;
    Ok(run.to_owned())
}

/// A run without a client's trace has its own id for one.
fn own_trace(run: &str) -> &str {
    run.rsplit('-').next().unwrap_or_default()
}

fn has(trace: &Trace, spans: &[(&str, SpanKind, usize)]) -> bool {
    spans
        .iter()
        .all(|(name, kind, count)| trace.of(name, *kind).len() == *count)
}

#[test]
fn a_run_is_one_connected_trace_over_all_its_processes() {
    scenario(async {
        let collector = Collector::start().await?;
        let fleet = fleet(&collector, &Manifest::tiny(), &[]).await?;
        a_remote_run(&fleet, &collector).await?;
        a_local_run(&fleet, &collector).await?;
        a_client_that_is_not_sampled_is_followed(&fleet, &collector).await?;
        nothing_tells_what_was_asked(&collector)?;
        fleet.end().await
    });
}

async fn a_remote_run(fleet: &Fleet, collector: &Collector) -> Result<()> {
    let run = asked_within_a_trace(fleet, &ask("Disaggregated", 1, 8), CLIENT_TRACE, "01").await?;
    let trace = collector
        .trace(CLIENT_TRACE, SOON, |trace| {
            has(
                trace,
                &[
                    ("accept", SpanKind::Server, 1),
                    ("place", SpanKind::Internal, 1),
                    ("prefill", SpanKind::Client, 1),
                    ("decode", SpanKind::Client, 1),
                    ("prefill", SpanKind::Server, 1),
                    ("transfer", SpanKind::Client, 1),
                    ("transfer", SpanKind::Server, 1),
                    ("decode", SpanKind::Server, 1),
                ],
            )
        })
        .await?;
    trace.connected(CLIENT_SPAN, SLACK)?;
    for span in &trace.0 {
        let of_reader = span.name == "transfer" && span.kind == SpanKind::Server;
        if !of_reader {
            ensure!(span.attribute("baton.run")? == run, "{span:?}");
        }
        ensure!(!span.failed, "{span:?}");
    }

    let accept = trace.one("accept", SpanKind::Server)?;
    ensure!(accept.made_by() == "baton-router", "{accept:?}");
    for (name, value) in [
        ("gen_ai.request.model", "tiny"),
        ("gen_ai.usage.input_tokens", "180"),
        ("gen_ai.usage.output_tokens", "8"),
        ("gen_ai.response.finish_reasons", "length"),
        ("baton.status", "Completed"),
        ("baton.attempts", "1"),
    ] {
        ensure!(accept.attribute(name)? == value, "{name} in {accept:?}");
    }
    let record = Record::of(&fleet.admin, &run).await?;
    let states: Vec<String> = record.states()?.iter().map(ToString::to_string).collect();
    ensure!(
        accept.events == states,
        "the trace says {:?}, the record {states:?}",
        accept.events
    );

    let place = trace.one("place", SpanKind::Internal)?;
    ensure!(place.attribute("baton.plan")? == "remote", "{place:?}");
    ensure!(
        place.attribute("baton.reason")? == record.0["reason"].as_str().unwrap_or_default(),
        "{place:?}"
    );
    let (source, target) = (
        place.attribute("baton.prefill_worker")?,
        place.attribute("baton.decode_worker")?,
    );
    for (name, kind, worker) in [
        ("prefill", SpanKind::Server, source),
        ("transfer", SpanKind::Server, source),
        ("transfer", SpanKind::Client, target),
        ("decode", SpanKind::Server, target),
    ] {
        let span = trace.one(name, kind)?;
        ensure!(span.made_by() == worker, "{worker} did not make {span:?}");
    }
    let transfer = trace.one("transfer", SpanKind::Client)?;
    let bytes = record.0["actual"]["bytes"].to_string();
    ensure!(
        transfer.attribute("baton.bytes")? == bytes,
        "{bytes} in {transfer:?}"
    );
    ensure!(
        Some(transfer.attribute("baton.transport")?) == record.0["actual"]["transport"].as_str(),
        "{transfer:?}"
    );
    // What is said to follow does: KV is moved before it is decoded with.
    let decode = trace.one("decode", SpanKind::Server)?;
    ensure!(
        transfer.end <= decode.begin + SLACK,
        "{transfer:?} {decode:?}"
    );
    Ok(())
}

async fn a_local_run(fleet: &Fleet, collector: &Collector) -> Result<()> {
    let run = ask("Aggregated", 2, 4).send(&fleet.api).await?.run;
    let trace = collector
        .trace(own_trace(&run), SOON, |trace| {
            has(
                trace,
                &[
                    ("accept", SpanKind::Server, 1),
                    ("decode", SpanKind::Server, 1),
                    ("prefill", SpanKind::Server, 1),
                ],
            )
        })
        .await?;
    trace.connected("", SLACK)?;
    ensure!(trace.of("transfer", SpanKind::Client).is_empty());
    let place = trace.one("place", SpanKind::Internal)?;
    ensure!(place.attribute("baton.plan")? == "local", "{place:?}");
    let prefill = trace.one("prefill", SpanKind::Server)?;
    let decode = trace.one("decode", SpanKind::Server)?;
    ensure!(
        prefill.made_by() == place.attribute("baton.decode_worker")?
            && prefill.end <= decode.begin + SLACK,
        "{prefill:?} {decode:?}"
    );
    Ok(())
}

async fn a_client_that_is_not_sampled_is_followed(
    fleet: &Fleet,
    collector: &Collector,
) -> Result<()> {
    let trace = "1af7651916cd43dd8448eb211c80319c";
    asked_within_a_trace(fleet, &ask("Disaggregated", 3, 4), trace, "00").await?;
    // A later run's trace is whole: had this one been exported, it would be there.
    let run = ask("Disaggregated", 4, 4).send(&fleet.api).await?.run;
    collector
        .trace(own_trace(&run), SOON, |trace| {
            has(
                trace,
                &[
                    ("accept", SpanKind::Server, 1),
                    ("prefill", SpanKind::Server, 1),
                    ("decode", SpanKind::Server, 1),
                ],
            )
        })
        .await?;
    let spans = collector.so_far(trace);
    ensure!(spans.0.is_empty(), "{}", spans.shown());
    Ok(())
}

/// The tiny model's texts are token ids, and a hundred and eighty of them in a row are a prompt.
fn nothing_tells_what_was_asked(collector: &Collector) -> Result<()> {
    let spans = collector.all();
    ensure!(spans.len() > 15, "{} spans", spans.len());
    for span in spans {
        for (name, value) in &span.attributes {
            ensure!(
                value.len() < 200,
                "{name} of {} is long: {value}",
                span.name
            );
            ensure!(
                !["prompt", "token_ids", "messages", "content", "salt"]
                    .iter()
                    .any(|word| name.contains(word)),
                "{name} of {}",
                span.name
            );
        }
    }
    Ok(())
}

#[test]
fn a_hand_off_that_fails_shows_as_a_second_attempt() {
    scenario(async {
        let collector = Collector::start().await?;
        let faults = [("BATON_FAULT", "flip-byte:1")];
        let fleet = fleet(&collector, &Manifest::tiny(), &faults).await?;
        let run = ask("Disaggregated", 5, 8).send(&fleet.api).await?.run;
        let trace = collector
            .trace(own_trace(&run), SOON, |trace| {
                has(
                    trace,
                    &[
                        ("accept", SpanKind::Server, 1),
                        ("decode", SpanKind::Client, 2),
                        ("transfer", SpanKind::Client, 1),
                        ("transfer", SpanKind::Server, 1),
                        ("prefill", SpanKind::Server, 2),
                        ("decode", SpanKind::Server, 1),
                    ],
                )
            })
            .await?;
        trace.connected("", SLACK)?;
        let accept = trace.one("accept", SpanKind::Server)?;
        ensure!(
            !accept.failed && accept.attribute("baton.fallback")? == "checksum-mismatch",
            "{accept:?}"
        );
        for kind in [SpanKind::Client, SpanKind::Server] {
            let transfer = trace.one("transfer", kind)?;
            ensure!(transfer.failed, "{transfer:?}");
        }
        let attempts = trace.of("decode", SpanKind::Client);
        let attempt = |number: &str| {
            let mut found = attempts.iter();
            found
                .find(|span| {
                    span.attributes
                        .get("baton.attempt")
                        .is_some_and(|one| one == number)
                })
                .with_context(|| format!("no attempt {number}"))
        };
        let (first, second) = (attempt("1")?, attempt("2")?);
        ensure!(
            first.failed && first.attribute("error.type")? == "checksum-mismatch",
            "{first:?}"
        );
        ensure!(
            !second.failed && first.end <= second.begin + SLACK,
            "{second:?}"
        );
        // What was computed after the failure belongs to the second attempt.
        let decode = trace.one("decode", SpanKind::Server)?;
        ensure!(decode.parent == second.id, "{}", trace.shown());
        fleet.end().await
    });
}

#[test]
fn a_client_that_hangs_up_ends_its_trace() {
    scenario(async {
        let collector = Collector::start().await?;
        let fleet = fleet(&collector, &Manifest::slow(), &[]).await?;
        let mut stream = ask("Disaggregated", 6, 400).stream(&fleet.api).await?;
        for _ in 0..3 {
            stream
                .text()
                .await?
                .context("ended before the third token")?;
        }
        let run = stream.run.clone();
        drop(stream);
        let trace = collector
            .trace(own_trace(&run), SOON, |trace| {
                has(
                    trace,
                    &[
                        ("accept", SpanKind::Server, 1),
                        ("decode", SpanKind::Client, 1),
                        ("decode", SpanKind::Server, 1),
                    ],
                )
            })
            .await?;
        let accept = trace.one("accept", SpanKind::Server)?;
        ensure!(
            accept.attribute("baton.status")? == "Cancelled" && !accept.failed,
            "{accept:?}"
        );
        ensure!(
            accept
                .events
                .last()
                .is_some_and(|event| event == "cancelled")
        );
        let decode = trace.one("decode", SpanKind::Server)?;
        ensure!(
            decode.attribute("baton.status")? == "Cancelled" && !decode.failed,
            "{decode:?}"
        );
        fleet.end().await
    });
}

#[test]
fn a_collector_that_is_gone_holds_no_request_up() {
    scenario(async {
        let gone = Collector::start().await?.endpoint();
        let variables = [
            ("BATON_OTLP_ENDPOINT", gone.as_str()),
            ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"),
            ("OTEL_BSP_SCHEDULE_DELAY", "10"),
        ];
        let fleet = Fleet::of_with(&Manifest::tiny(), &variables).await?;
        for salt in 0..20 {
            ask("Disaggregated", salt, 2).send(&fleet.api).await?;
        }
        wait::until("the spans that were lost are counted", SOON, async || {
            let metrics = fleet.metrics().await.map_err(|error| error.to_string())?;
            let spans = |outcome| metrics.count("baton_spans_total", &[("outcome", outcome)]);
            let lost = spans("failed") + spans("dropped");
            (lost > 0.0 && spans("exported") == 0.0)
                .then_some(())
                .ok_or(format!("{lost} lost, {} exported", spans("exported")))
        })
        .await?;
        let logs = fleet.state().join("logs");
        let mut said = 0;
        for entry in std::fs::read_dir(logs)? {
            let text = std::fs::read_to_string(entry?.path())?;
            let times = text.matches("traces cannot be exported").count();
            ensure!(times <= 1, "said {times} times");
            said += times;
        }
        ensure!(said > 0, "nobody said that the collector is gone");
        fleet.end().await
    });
}
