//! OTLP over HTTP, protobuf bodies.

use bytes::Bytes;
use http::header::{CONTENT_TYPE, HeaderValue};
use http::{HeaderMap, Method, Request, StatusCode, Uri};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use prost::Message as _;

use super::NotSent;

/// An answer holds a number and a sentence.
const LONGEST_ANSWER: usize = 64 << 10;

#[derive(Debug)]
pub(super) struct Http {
    client: Client<HttpConnector, Full<Bytes>>,
    uri: Uri,
    headers: HeaderMap,
}

impl Http {
    pub(super) fn new(uri: Uri, mut headers: HeaderMap) -> Self {
        headers.insert(
            CONTENT_TYPE,
            HeaderValue::from_static("application/x-protobuf"),
        );
        Self {
            client: Client::builder(TokioExecutor::new()).build_http(),
            uri,
            headers,
        }
    }

    pub(super) async fn send(
        &mut self,
        message: &ExportTraceServiceRequest,
    ) -> Result<u64, NotSent> {
        let mut request = Request::new(Full::new(Bytes::from(message.encode_to_vec())));
        *request.method_mut() = Method::POST;
        *request.uri_mut() = self.uri.clone();
        request.headers_mut().extend(self.headers.clone());
        let lost = |error: String| NotSent {
            message: error,
            again: true,
        };
        let answer = self
            .client
            .request(request)
            .await
            .map_err(|error| lost(format!("{}: {error}", self.uri)))?;
        let status = answer.status();
        if !status.is_success() {
            return Err(NotSent {
                message: format!("{} answered {status}", self.uri),
                // The codes of the OTLP specification.
                again: matches!(
                    status,
                    StatusCode::TOO_MANY_REQUESTS
                        | StatusCode::BAD_GATEWAY
                        | StatusCode::SERVICE_UNAVAILABLE
                        | StatusCode::GATEWAY_TIMEOUT
                ),
            });
        }
        let body = Limited::new(answer.into_body(), LONGEST_ANSWER)
            .collect()
            .await
            .map_err(|error| lost(error.to_string()))?
            .to_bytes();
        // A body that is none of ours takes nothing back: the status has said that all were taken.
        let partial = ExportTraceServiceResponse::decode(body)
            .ok()
            .and_then(|answer| answer.partial_success);
        Ok(partial.map_or(0, |partial| {
            u64::try_from(partial.rejected_spans).unwrap_or(0)
        }))
    }
}
