//! Settings as the variables give them.

use super::*;

fn read(flag: Option<&str>, variables: &[(&str, &str)]) -> Result<Option<Settings>, SettingsError> {
    let flags = TraceFlags {
        otlp_endpoint: flag.map(str::to_owned),
    };
    Settings::read(&flags, |name| {
        variables
            .iter()
            .find(|(known, _)| *known == name)
            .map(|(_, value)| (*value).to_owned())
    })
}

fn settings(variables: &[(&str, &str)]) -> Settings {
    read(None, variables).unwrap().unwrap()
}

fn endpoint_of(flag: Option<&str>, variables: &[(&str, &str)]) -> (String, Protocol) {
    let settings = read(flag, variables).unwrap().unwrap();
    (
        settings.endpoint.uri.to_string(),
        settings.endpoint.protocol,
    )
}

#[test]
fn nothing_is_traced_unless_a_collector_is_named() {
    assert_eq!(read(None, &[]), Ok(None));
    assert_eq!(
        read(None, &[("OTEL_EXPORTER_OTLP_ENDPOINT", "  ")]),
        Ok(None)
    );
    let endpoint = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://c:4317");
    for off in [
        ("OTEL_SDK_DISABLED", "true"),
        ("OTEL_TRACES_EXPORTER", "none"),
    ] {
        assert_eq!(read(None, &[endpoint, off]), Ok(None), "{off:?}");
    }
}

#[test]
fn the_flag_wins_then_the_variable_of_traces() {
    let all = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://all:4318/base/");
    let traces = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://t:4318/x");
    assert_eq!(
        endpoint_of(Some("http://flag:4317"), &[all, traces]),
        ("http://flag:4317/".to_owned(), Protocol::Grpc)
    );
    assert_eq!(
        endpoint_of(None, &[all, traces]),
        ("http://t:4318/x".to_owned(), Protocol::HttpProtobuf)
    );
    assert_eq!(
        endpoint_of(None, &[all]),
        (
            "http://all:4318/base/v1/traces".to_owned(),
            Protocol::HttpProtobuf
        )
    );
}

#[test]
fn the_protocol_is_said_or_follows_from_the_port() {
    let at = |port| ("OTEL_EXPORTER_OTLP_ENDPOINT", port);
    let said = ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc");
    assert_eq!(endpoint_of(None, &[at("http://c:4317")]).1, Protocol::Grpc);
    assert_eq!(
        endpoint_of(None, &[at("http://c:9")]).1,
        Protocol::HttpProtobuf
    );
    assert_eq!(
        endpoint_of(None, &[at("http://c:9"), said]).1,
        Protocol::Grpc
    );
    let traces = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf");
    assert_eq!(
        endpoint_of(None, &[at("http://c:4317"), said, traces]).1,
        Protocol::HttpProtobuf
    );
    let unknown = ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json");
    let error = read(None, &[at("http://c:1"), unknown]).unwrap_err();
    assert!(error.to_string().contains("http/protobuf"), "{error}");
}

#[test]
fn an_endpoint_that_cannot_be_sent_to_is_an_error_that_names_it() {
    for value in ["c:4317", "ftp://c", "http://", "", "http://c:99999"] {
        let error = read(Some(value), &[]).unwrap_err().to_string();
        assert!(error.contains("--otlp-endpoint"), "{value}: {error}");
    }
    let error = read(None, &[("OTEL_EXPORTER_OTLP_ENDPOINT", "https://c:4317")])
        .unwrap_err()
        .to_string();
    assert!(error.contains("OTEL_EXPORTER_OTLP_ENDPOINT"), "{error}");
    assert!(error.contains("plain http"), "{error}");
}

#[test]
fn headers_are_read_and_never_shown() {
    let endpoint = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://c:4317");
    let list = ("OTEL_EXPORTER_OTLP_HEADERS", "X-Key = a%20b ,other=1");
    let settings = settings(&[endpoint, list]);
    assert_eq!(settings.headers["x-key"], "a b");
    assert_eq!(settings.headers["other"], "1");
    assert!(!format!("{settings:?}").contains("a b"));
    let secret = ("OTEL_EXPORTER_OTLP_HEADERS", "fine=1,secret");
    let error = read(None, &[endpoint, secret]).unwrap_err().to_string();
    assert!(
        error.contains("entry 2") && !error.contains("secret"),
        "{error}"
    );
}

#[test]
fn what_is_not_understood_is_said_and_defaults_are_in_force() {
    let settings = settings(&[
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://c:4317"),
        ("OTEL_TRACES_SAMPLER", "jaeger_remote"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "-4"),
        ("OTEL_RESOURCE_ATTRIBUTES", "region=a,nonsense"),
    ]);
    assert_eq!(settings.sampler, Sampler::default());
    assert_eq!(settings.batching, Batching::default());
    assert_eq!(settings.resource, [("region".to_owned(), "a".to_owned())]);
    assert_eq!(settings.warnings.len(), 3, "{:?}", settings.warnings);
}

#[test]
fn sizes_and_times_are_taken_and_a_batch_fits_the_queue() {
    let settings = settings(&[
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://c:4317"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "100"),
        ("OTEL_BSP_SCHEDULE_DELAY", "20"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "700"),
        ("OTEL_SERVICE_NAME", "mine"),
    ]);
    assert_eq!(
        (settings.batching.queue, settings.batching.batch),
        (100, 100)
    );
    assert_eq!(settings.batching.delay, Duration::from_millis(20));
    assert_eq!(settings.timeout, Duration::from_millis(700));
    assert_eq!(settings.service_name.as_deref(), Some("mine"));
    assert!(settings.warnings.is_empty());
}
