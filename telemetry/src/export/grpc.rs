//! OTLP over gRPC.

use std::time::Duration;

use http::{HeaderMap, Uri};
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_client::TraceServiceClient;
use tonic::metadata::MetadataMap;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request};

use super::NotSent;

#[derive(Debug)]
pub(super) struct Grpc {
    client: TraceServiceClient<Channel>,
    headers: MetadataMap,
}

impl Grpc {
    /// Connects with the first export, and again when the connection is lost.
    pub(super) fn new(collector: Uri, headers: HeaderMap, timeout: Duration) -> Self {
        let endpoint = Endpoint::from(collector).connect_timeout(timeout);
        Self {
            client: TraceServiceClient::new(endpoint.connect_lazy()),
            headers: MetadataMap::from_headers(headers),
        }
    }

    pub(super) async fn send(
        &mut self,
        message: ExportTraceServiceRequest,
    ) -> Result<u64, NotSent> {
        let mut request = Request::new(message);
        *request.metadata_mut() = self.headers.clone();
        match self.client.export(request).await {
            Ok(answer) => Ok(answer.into_inner().partial_success.map_or(0, |partial| {
                u64::try_from(partial.rejected_spans).unwrap_or(0)
            })),
            Err(status) => Err(NotSent {
                message: format!("{:?}: {}", status.code(), status.message()),
                // The codes of the OTLP specification.
                again: matches!(
                    status.code(),
                    Code::Cancelled
                        | Code::DeadlineExceeded
                        | Code::Aborted
                        | Code::OutOfRange
                        | Code::Unavailable
                        | Code::DataLoss
                        | Code::ResourceExhausted
                ),
            }),
        }
    }
}
