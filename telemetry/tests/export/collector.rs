//! A collector on loopback, over gRPC or HTTP, that keeps what it gets and can be told to fail first.

use std::net::SocketAddr;
use std::sync::Arc;

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{
    TraceService, TraceServiceServer,
};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTracePartialSuccess, ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use prost::Message as _;
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, mpsc};
use tokio::task::JoinSet;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::Status;

#[derive(Debug)]
pub(crate) struct Collector {
    pub(crate) address: SocketAddr,
    pub(crate) got: mpsc::UnboundedReceiver<Got>,
    _tasks: JoinSet<()>,
}

/// One export, and the `x-key` header that came with it.
#[derive(Debug)]
pub(crate) struct Got {
    pub(crate) request: ExportTraceServiceRequest,
    pub(crate) key: Option<String>,
}

#[derive(Clone, Debug)]
struct Answers {
    /// One permit for each failure that is left.
    failures: Arc<Semaphore>,
    rejected: i64,
    got: mpsc::UnboundedSender<Got>,
}

impl Collector {
    /// Fails so many times first, and then says of so many spans that it does not want them.
    pub(crate) async fn start(over_http: bool, failures: usize, rejected: i64) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (sender, got) = mpsc::unbounded_channel();
        let answers = Answers {
            failures: Arc::new(Semaphore::new(failures)),
            rejected,
            got: sender,
        };
        let mut tasks = JoinSet::new();
        if over_http {
            tasks.spawn(serve_http(listener, answers));
        } else {
            let server = tonic::transport::Server::builder()
                .add_service(TraceServiceServer::new(answers))
                .serve_with_incoming(TcpListenerStream::new(listener));
            tasks.spawn(async move { server.await.unwrap() });
        }
        Self {
            address,
            got,
            _tasks: tasks,
        }
    }
}

impl Answers {
    /// `None`: it fails.
    fn answer(&self, got: Got) -> Option<ExportTraceServiceResponse> {
        if let Ok(failure) = self.failures.try_acquire() {
            failure.forget();
            return None;
        }
        let _ = self.got.send(got);
        Some(ExportTraceServiceResponse {
            partial_success: Some(ExportTracePartialSuccess {
                rejected_spans: self.rejected,
                error_message: String::new(),
            }),
        })
    }

    async fn serve(
        self,
        request: Request<Incoming>,
    ) -> Result<Response<Full<Bytes>>, hyper::Error> {
        let (head, body) = request.into_parts();
        assert_eq!(head.uri.path(), "/v1/traces");
        assert_eq!(head.headers["content-type"], "application/x-protobuf");
        let key = head.headers.get("x-key");
        let key = key.and_then(|key| key.to_str().ok()).map(str::to_owned);
        let body = body.collect().await?.to_bytes();
        let request = ExportTraceServiceRequest::decode(body).unwrap();
        let mut response = Response::new(Full::new(Bytes::new()));
        match self.answer(Got { request, key }) {
            Some(answer) => *response.body_mut() = Full::new(answer.encode_to_vec().into()),
            None => *response.status_mut() = StatusCode::SERVICE_UNAVAILABLE,
        }
        Ok(response)
    }
}

#[tonic::async_trait]
impl TraceService for Answers {
    async fn export(
        &self,
        request: tonic::Request<ExportTraceServiceRequest>,
    ) -> Result<tonic::Response<ExportTraceServiceResponse>, Status> {
        let key = request.metadata().get("x-key");
        let key = key.and_then(|key| key.to_str().ok()).map(str::to_owned);
        let request = request.into_inner();
        self.answer(Got { request, key })
            .map(tonic::Response::new)
            .ok_or_else(|| Status::unavailable("not yet"))
    }
}

async fn serve_http(listener: TcpListener, answers: Answers) {
    let mut connections = JoinSet::new();
    while let Ok((stream, _)) = listener.accept().await {
        let answers = answers.clone();
        connections.spawn(async move {
            let service = service_fn(move |request| answers.clone().serve(request));
            // A client that is gone ends its connection.
            let _ = auto::Builder::new(TokioExecutor::new())
                .serve_connection(TokioIo::new(stream), service)
                .await;
        });
    }
}
