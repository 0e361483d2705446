//! Where traces go: Baton's flag, and the variables that OpenTelemetry's specification names. Pure: the environment comes in.

use std::time::Duration;

use clap::Args;
use http::{HeaderMap, HeaderName, HeaderValue, Uri};

use crate::sampling::Sampler;

/// The flag of a process that can be traced.
#[derive(Clone, Debug, Default, PartialEq, Eq, Args)]
pub struct TraceFlags {
    /// Collector of traces (OTLP), http://HOST:4317 for gRPC or http://HOST:4318 for HTTP. Nothing is traced without it or
    /// OTEL_EXPORTER_OTLP_ENDPOINT.
    #[arg(long, env = "BATON_OTLP_ENDPOINT")]
    pub otlp_endpoint: Option<String>,
}

/// All that the export is set up with.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    pub endpoint: Endpoint,
    /// Sent with every export.
    pub headers: HeaderMap,
    /// Of one export.
    pub timeout: Duration,
    /// `service.name`, where the environment says one.
    pub service_name: Option<String>,
    /// Further facts about this process.
    pub resource: Vec<(String, String)>,
    pub sampler: Sampler,
    pub batching: Batching,
    /// Variables that were not understood; their defaults are in force. To be logged.
    pub warnings: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// The collector for gRPC, the whole address to post to for HTTP.
    pub uri: Uri,
    pub protocol: Protocol,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    Grpc,
    HttpProtobuf,
}

/// `OTEL_BSP_*`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Batching {
    /// Spans that wait; more are dropped and counted. A span is about 2 KiB, so the default holds 4 MiB.
    pub queue: usize,
    /// Spans sent at once.
    pub batch: usize,
    /// The longest that a span waits for others.
    pub delay: Duration,
}

impl Default for Batching {
    fn default() -> Self {
        Self {
            queue: 2048,
            batch: 512,
            delay: Duration::from_secs(5),
        }
    }
}

/// Settings that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SettingsError {
    #[error("{variable}={value}: give http://HOST:PORT of a collector")]
    Endpoint { variable: String, value: String },
    #[error(
        "{variable}={value}: traces are sent over plain http only: give a collector near by and let it send them on"
    )]
    Scheme { variable: String, value: String },
    #[error("{variable}={value}: use grpc or http/protobuf")]
    Protocol { variable: String, value: String },
    #[error(
        "{variable}: entry {entry} is no name=value: separate entries by commas and percent-encode their values"
    )]
    Header { variable: String, entry: usize },
}

impl Settings {
    /// `None`: nothing is traced. `variable` reads the environment.
    ///
    /// # Errors
    /// A collector is named, but not as one that can be sent to.
    pub fn read(
        flags: &TraceFlags,
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<Option<Self>, SettingsError> {
        // The specification takes an empty variable for one that is not set.
        let variable = |name: &str| variable(name).filter(|value| !value.trim().is_empty());
        if variable("OTEL_SDK_DISABLED").is_some_and(|value| value.eq_ignore_ascii_case("true"))
            || variable("OTEL_TRACES_EXPORTER").is_some_and(|value| value == "none")
        {
            return Ok(None);
        }
        let Some(endpoint) = endpoint(flags, &variable)? else {
            return Ok(None);
        };
        let mut warnings = Vec::new();
        let sampler = match variable("OTEL_TRACES_SAMPLER") {
            None => Sampler::default(),
            Some(name) => {
                let argument = variable("OTEL_TRACES_SAMPLER_ARG");
                Sampler::parse(&name, argument.as_deref()).unwrap_or_else(|error| {
                    warnings.push(error.to_string());
                    Sampler::default()
                })
            }
        };
        let mut number = |name: &str, default: u64| match variable(name) {
            None => default,
            Some(text) => match text.parse() {
                Ok(number) if number > 0 => number,
                _ => {
                    warnings.push(format!("{name}={text}: use a whole number above 0"));
                    default
                }
            },
        };
        let standard = Batching::default();
        let size = |number: u64| usize::try_from(number).unwrap_or(usize::MAX);
        let queue = size(number("OTEL_BSP_MAX_QUEUE_SIZE", standard.queue as u64));
        let batching = Batching {
            queue,
            batch: size(number(
                "OTEL_BSP_MAX_EXPORT_BATCH_SIZE",
                standard.batch as u64,
            ))
            .min(queue),
            delay: Duration::from_millis(number("OTEL_BSP_SCHEDULE_DELAY", 5_000)),
        };
        let timeout = number("OTEL_EXPORTER_OTLP_TIMEOUT", 10_000);
        let timeout = number("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", timeout);
        Ok(Some(Self {
            endpoint,
            headers: headers(&variable)?,
            timeout: Duration::from_millis(timeout),
            service_name: variable("OTEL_SERVICE_NAME"),
            resource: resource(&variable, &mut warnings),
            sampler,
            batching,
            warnings,
        }))
    }
}

fn endpoint(
    flags: &TraceFlags,
    variable: &impl Fn(&str) -> Option<String>,
) -> Result<Option<Endpoint>, SettingsError> {
    const TRACES: &str = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT";
    const ALL: &str = "OTEL_EXPORTER_OTLP_ENDPOINT";
    let given = flags
        .otlp_endpoint
        .clone()
        .map(|value| ("--otlp-endpoint", value))
        .or_else(|| variable(TRACES).map(|value| (TRACES, value)))
        .or_else(|| variable(ALL).map(|value| (ALL, value)));
    let Some((name, value)) = given else {
        return Ok(None);
    };
    let wrong = || SettingsError::Endpoint {
        variable: name.to_owned(),
        value: value.clone(),
    };
    let uri: Uri = value.trim().parse().map_err(|_| wrong())?;
    match uri.scheme_str() {
        Some("http") => {}
        Some("https") => {
            return Err(SettingsError::Scheme {
                variable: name.to_owned(),
                value,
            });
        }
        _ => return Err(wrong()),
    }
    let authority = uri.authority().map_or("", |authority| authority.as_str());
    let has_port = authority
        .rsplit(':')
        .next()
        .is_some_and(|port| port.parse::<u64>().is_ok());
    if uri.host().is_none_or(str::is_empty) || (has_port && uri.port_u16().is_none()) {
        return Err(wrong());
    }
    let protocol = match protocol(variable)? {
        Some(protocol) => protocol,
        // Where nobody says, the registered port of gRPC does.
        None if uri.port_u16() == Some(4317) => Protocol::Grpc,
        None => Protocol::HttpProtobuf,
    };
    // An address of all signals gets the path of this one; one of traces alone is used as it is, but for a missing path.
    let needs_path = name != TRACES || matches!(uri.path(), "" | "/");
    let uri = if protocol == Protocol::HttpProtobuf && needs_path {
        let base = value.trim().trim_end_matches('/');
        format!("{base}/v1/traces").parse().map_err(|_| wrong())?
    } else {
        uri
    };
    Ok(Some(Endpoint { uri, protocol }))
}

fn protocol(variable: &impl Fn(&str) -> Option<String>) -> Result<Option<Protocol>, SettingsError> {
    for name in [
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL",
        "OTEL_EXPORTER_OTLP_PROTOCOL",
    ] {
        if let Some(value) = variable(name) {
            return match value.as_str() {
                "grpc" => Ok(Some(Protocol::Grpc)),
                "http/protobuf" => Ok(Some(Protocol::HttpProtobuf)),
                _ => Err(SettingsError::Protocol {
                    variable: name.to_owned(),
                    value,
                }),
            };
        }
    }
    Ok(None)
}

/// `name=value,name=value`, values percent-encoded. Values may be secrets: errors name the entry only.
fn headers(variable: &impl Fn(&str) -> Option<String>) -> Result<HeaderMap, SettingsError> {
    let mut headers = HeaderMap::new();
    for name in [
        "OTEL_EXPORTER_OTLP_HEADERS",
        "OTEL_EXPORTER_OTLP_TRACES_HEADERS",
    ] {
        let Some(list) = variable(name) else {
            continue;
        };
        for (index, entry) in list.split(',').enumerate() {
            if entry.trim().is_empty() {
                continue;
            }
            let header = entry.split_once('=').and_then(|(name, value)| {
                let name: HeaderName = name.trim().to_ascii_lowercase().parse().ok()?;
                let mut value = HeaderValue::from_bytes(&percent_decoded(value.trim())).ok()?;
                value.set_sensitive(true);
                Some((name, value))
            });
            let Some((header, value)) = header else {
                return Err(SettingsError::Header {
                    variable: name.to_owned(),
                    entry: index + 1,
                });
            };
            headers.insert(header, value);
        }
    }
    Ok(headers)
}

fn resource(
    variable: &impl Fn(&str) -> Option<String>,
    warnings: &mut Vec<String>,
) -> Vec<(String, String)> {
    let list = variable("OTEL_RESOURCE_ATTRIBUTES").unwrap_or_default();
    let entries = list.split(',').filter(|entry| !entry.trim().is_empty());
    entries
        .filter_map(|entry| match entry.split_once('=') {
            Some((name, value)) => {
                let value = percent_decoded(value.trim());
                let value = String::from_utf8_lossy(&value).into_owned();
                Some((name.trim().to_owned(), value))
            }
            None => {
                warnings.push(format!(
                    "OTEL_RESOURCE_ATTRIBUTES: {entry} is no name=value: separate entries by commas and percent-encode their values"
                ));
                None
            }
        })
        .collect()
}

fn percent_decoded(text: &str) -> Vec<u8> {
    let bytes = text.as_bytes();
    let mut decoded = Vec::with_capacity(bytes.len());
    let mut rest = bytes;
    while let [first, after @ ..] = rest {
        // Two digits and no sign, which `from_str_radix` would take.
        let pair = after
            .get(..2)
            .filter(|pair| *first == b'%' && pair.iter().all(u8::is_ascii_hexdigit))
            .and_then(|pair| std::str::from_utf8(pair).ok());
        match pair.and_then(|pair| u8::from_str_radix(pair, 16).ok()) {
            Some(byte) => {
                decoded.push(byte);
                rest = &after[2..];
            }
            _ => {
                decoded.push(*first);
                rest = after;
            }
        }
    }
    decoded
}

#[cfg(test)]
mod tests;
