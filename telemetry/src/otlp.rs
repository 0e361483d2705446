//! Spans as messages of the OpenTelemetry protocol. Pure.

use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value as AnyValueKind;
use opentelemetry_proto::tonic::common::v1::{
    AnyValue, ArrayValue, InstrumentationScope, KeyValue,
};
use opentelemetry_proto::tonic::resource::v1::Resource;
use opentelemetry_proto::tonic::trace::v1::span::{Event, SpanKind};
use opentelemetry_proto::tonic::trace::v1::status::StatusCode;
use opentelemetry_proto::tonic::trace::v1::{ResourceSpans, ScopeSpans, Span as Message, Status};

use crate::span::{Attributes, Kind, Span, Value};

/// Bits of a span's `flags`: sampled, and whether it is known and true that the parent is another process's.
const SAMPLED: u32 = 0x001;
const PARENT_KNOWN: u32 = 0x100;
const PARENT_REMOTE: u32 = 0x200;

/// One export of spans of this process.
pub fn request(resource: &Resource, spans: Vec<Span>) -> ExportTraceServiceRequest {
    ExportTraceServiceRequest {
        resource_spans: vec![ResourceSpans {
            resource: Some(resource.clone()),
            scope_spans: vec![ScopeSpans {
                scope: Some(InstrumentationScope {
                    name: "baton".to_owned(),
                    version: env!("CARGO_PKG_VERSION").to_owned(),
                    ..InstrumentationScope::default()
                }),
                spans: spans.into_iter().map(message).collect(),
                schema_url: String::new(),
            }],
            schema_url: String::new(),
        }],
    }
}

/// What the process is. A later pair takes the place of an earlier one of its name.
pub fn resource(pairs: impl IntoIterator<Item = (String, String)>) -> Resource {
    let mut attributes: Vec<KeyValue> = Vec::new();
    for (key, text) in pairs {
        attributes.retain(|known| known.key != key);
        attributes.push(pair(&key, &Value::Text(text)));
    }
    Resource {
        attributes,
        ..Resource::default()
    }
}

fn message(span: Span) -> Message {
    let remote = if span.parent_is_remote && span.parent.is_some() {
        PARENT_REMOTE
    } else {
        0
    };
    let kind = match span.kind {
        Kind::Internal => SpanKind::Internal,
        Kind::Server => SpanKind::Server,
        Kind::Client => SpanKind::Client,
    };
    let events = span.events.into_iter().map(|event| Event {
        time_unix_nano: nanoseconds(event.at),
        name: event.name,
        attributes: attributes(&event.attributes),
        dropped_attributes_count: 0,
    });
    Message {
        trace_id: span.trace.bytes().to_vec(),
        span_id: span.id.bytes().to_vec(),
        parent_span_id: span.parent.map_or_else(Vec::new, |id| id.bytes().to_vec()),
        flags: SAMPLED | PARENT_KNOWN | remote,
        name: span.name.to_owned(),
        kind: kind.into(),
        start_time_unix_nano: nanoseconds(span.begin),
        end_time_unix_nano: nanoseconds(span.end),
        attributes: attributes(&span.attributes),
        events: events.collect(),
        status: span.error.map(|message| Status {
            message,
            code: StatusCode::Error.into(),
        }),
        ..Message::default()
    }
}

fn nanoseconds(microseconds: u64) -> u64 {
    microseconds.saturating_mul(1_000)
}

fn attributes(attributes: &Attributes) -> Vec<KeyValue> {
    attributes
        .iter()
        .map(|(name, value)| pair(name, value))
        .collect()
}

fn pair(name: &str, value: &Value) -> KeyValue {
    let text = |text: &String| AnyValueKind::StringValue(text.clone());
    let kind = match value {
        Value::Text(value) => text(value),
        Value::Integer(value) => AnyValueKind::IntValue(*value),
        Value::Float(value) => AnyValueKind::DoubleValue(*value),
        Value::Flag(value) => AnyValueKind::BoolValue(*value),
        Value::Texts(values) => AnyValueKind::ArrayValue(ArrayValue {
            values: values
                .iter()
                .map(|value| AnyValue {
                    value: Some(text(value)),
                })
                .collect(),
        }),
    };
    KeyValue {
        key: name.to_owned(),
        value: Some(AnyValue { value: Some(kind) }),
        ..KeyValue::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::context::TraceContext;
    use crate::span::SpanEvent;

    #[test]
    fn a_span_keeps_its_place_times_and_facts() {
        let parent = TraceContext::root(None, "r", true);
        let context = parent.child("decode", "1");
        let times = (1_000, 2_000);
        let mut span = Span::new(&context, Some(&parent), "decode", Kind::Server, times);
        span.attributes.set("baton.attempt", 1_u32);
        span.events.push(SpanEvent {
            name: "streaming".to_owned(),
            at: 1_500,
            attributes: Attributes::default(),
        });
        span.fail("decode-lost", "worker d is gone");
        let request = request(&resource([]), vec![span]);
        let sent = &request.resource_spans[0].scope_spans[0].spans[0];
        assert_eq!(sent.trace_id, parent.trace.bytes());
        assert_eq!(sent.parent_span_id, parent.span.bytes());
        assert_eq!(sent.span_id, context.span.bytes());
        assert_eq!(sent.start_time_unix_nano, 1_000_000);
        assert_eq!(sent.end_time_unix_nano, 2_000_000);
        assert_eq!(sent.events[0].time_unix_nano, 1_500_000);
        assert_eq!(sent.kind(), SpanKind::Server);
        assert_eq!(sent.flags, 0x301);
        let status = sent.status.as_ref().unwrap();
        assert_eq!(status.code(), StatusCode::Error);
        assert_eq!(status.message, "worker d is gone");
        let keys: Vec<&str> = sent.attributes.iter().map(|pair| &*pair.key).collect();
        assert_eq!(keys, ["baton.attempt", "error.type"]);
    }

    #[test]
    fn a_root_has_no_parent() {
        let root = TraceContext::root(None, "r", true);
        let span = Span::new(&root, None, "accept", Kind::Server, (1, 2));
        let request = request(&resource([]), vec![span]);
        let sent = &request.resource_spans[0].scope_spans[0].spans[0];
        assert!(sent.parent_span_id.is_empty() && sent.status.is_none());
        assert_eq!(sent.flags, 0x101);
    }

    #[test]
    fn a_later_fact_about_the_process_replaces_an_earlier_one() {
        let pairs = [
            ("service.name", "a"),
            ("region", "b"),
            ("service.name", "c"),
        ];
        let resource = resource(pairs.map(|(name, value)| (name.to_owned(), value.to_owned())));
        let keys: Vec<&str> = resource.attributes.iter().map(|pair| &*pair.key).collect();
        assert_eq!(keys, ["region", "service.name"]);
    }
}
