//! Against real servers on loopback: a worker that answers, one that is silent, one that says too much or nonsense, one that is gone.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use axum::Router;
use axum::http::StatusCode;
use axum::routing::get;
use baton_protocol::wire::worker_server::{Worker, WorkerServer};
use baton_protocol::wire::{self, DrainReply};
use futures::stream::Empty;
use tokio::net::TcpListener;
use tonic::{Request, Response, Status, Streaming};

use super::*;

async fn bind() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let address = listener.local_addr().unwrap();
    (listener, address)
}

async fn serve(routes: Router) -> SocketAddr {
    let (listener, address) = bind().await;
    tokio::spawn(async move { axum::serve(listener, routes).await });
    address
}

#[tokio::test]
async fn load_is_read_and_what_it_does_not_know_is_passed_over() {
    let load = r#"{"loadSequence":7,"queuedTokens":1,"queuedSequences":2,"runningSequences":3,"contextTokens":9,
        "stepRemainingMilliseconds":0.5,"leasesOpen":4,"draining":true,"lacksPlugIn":true,
        "blocks":{"total":9,"free":1,"cached":5,"active":1,"leased":1,"quarantined":0,"leaked":0}}"#;
    let address = serve(Router::new().route("/v1/load", get(move || async move { load }))).await;
    let load = Workers::default().load_at(address).await.unwrap();
    let expected = WorkerLoad {
        running_sequences: 3,
        queued_sequences: 2,
        leases_open: 4,
        draining: true,
        lacks_plug_in: true,
        cached_blocks: 5,
    };
    assert_eq!(load, expected);
}

#[tokio::test]
async fn a_card_is_read_whole() {
    let card = include_str!("tests/card.json");
    let address = serve(Router::new().route("/v1/card", get(move || async move { card }))).await;
    let read = Workers::default().card_at(address).await.unwrap();
    assert_eq!(read, serde_json::from_str(card).unwrap());
    assert_eq!((read.pool.as_str(), read.capacity.block_size), ("d", 16));
}

#[tokio::test]
async fn what_is_no_card_is_an_error_that_names_address_and_field() {
    let address = serve(Router::new().route("/v1/card", get(|| async { "{}" }))).await;
    let error = Workers::default().card_at(address).await.unwrap_err();
    let text = error.to_string();
    assert!(
        text.starts_with(&format!(
            "http://{address}/v1/card answers what is no card: "
        )),
        "{text}"
    );
    assert!(text.contains("worker"), "{text}");
}

#[tokio::test]
async fn an_answer_that_is_too_large_or_no_success_is_refused() {
    let routes = Router::new()
        .route("/v1/card", get(|| async { vec![b' '; LARGEST_PLUS_ONE] }))
        .route(
            "/v1/load",
            get(|| async { (StatusCode::SERVICE_UNAVAILABLE, "later") }),
        );
    let address = serve(routes).await;
    let card = Workers::default().card_at(address).await.unwrap_err();
    assert!(matches!(
        card,
        WorkerError::Fetch(FetchError::TooLarge { .. })
    ));
    let load = Workers::default().load_at(address).await.unwrap_err();
    assert!(matches!(
        load,
        WorkerError::Fetch(FetchError::Status { status, .. }) if status == 503
    ));
}

const LARGEST_PLUS_ONE: usize = crate::fetch::LARGEST + 1;

#[tokio::test]
async fn a_worker_that_is_gone_is_said_in_words_that_help() {
    let (listener, address) = bind().await;
    drop(listener);
    let error = Workers::default().card_at(address).await.unwrap_err();
    let text = error.to_string();
    assert!(
        text.contains(&address.to_string()) && text.contains("refused"),
        "{text}"
    );
    let error = drain(address, false).await.unwrap_err();
    assert!(error.to_string().contains(&address.to_string()), "{error}");
}

#[tokio::test(start_paused = true)]
async fn a_silent_worker_costs_two_seconds_and_no_more() {
    // Accepts by its backlog and never answers.
    let (_listener, address) = bind().await;
    let began = tokio::time::Instant::now();
    let error = Workers::default().card_at(address).await.unwrap_err();
    assert!(
        matches!(error, WorkerError::Fetch(FetchError::Late { .. })),
        "{error}"
    );
    let error = drain(address, false).await.unwrap_err();
    assert!(matches!(error, WorkerError::Late { .. }), "{error}");
    assert_eq!(began.elapsed().as_secs(), 4);
}

/// Knows only to drain.
struct Draining {
    drained: AtomicU32,
    resumed: AtomicU32,
}

type NoStream<T> = Empty<Result<T, Status>>;

fn unknown<T>() -> Result<T, Status> {
    Err(Status::unimplemented("only drain"))
}

#[tonic::async_trait]
impl Worker for Draining {
    type WatchStream = NoStream<wire::WatchEvent>;
    type PrefillStream = NoStream<wire::PrefillEvent>;
    type DecodeStream = NoStream<wire::DecodeEvent>;
    type ArtifactStream = NoStream<wire::ArtifactChunk>;

    async fn watch(
        &self,
        _: Request<wire::WatchRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        unknown()
    }
    async fn prefill(
        &self,
        _: Request<wire::PrefillRequest>,
    ) -> Result<Response<Self::PrefillStream>, Status> {
        unknown()
    }
    async fn decode(
        &self,
        _: Request<Streaming<wire::DecodeRequest>>,
    ) -> Result<Response<Self::DecodeStream>, Status> {
        unknown()
    }
    async fn cancel(
        &self,
        _: Request<wire::CancelRequest>,
    ) -> Result<Response<wire::CancelReply>, Status> {
        unknown()
    }
    async fn claim(
        &self,
        _: Request<wire::ClaimRequest>,
    ) -> Result<Response<wire::ClaimReply>, Status> {
        unknown()
    }
    async fn renew(
        &self,
        _: Request<wire::RenewRequest>,
    ) -> Result<Response<wire::RenewReply>, Status> {
        unknown()
    }
    async fn complete(
        &self,
        _: Request<wire::CompleteRequest>,
    ) -> Result<Response<wire::CompleteReply>, Status> {
        unknown()
    }
    async fn release(
        &self,
        _: Request<wire::ReleaseRequest>,
    ) -> Result<Response<wire::ReleaseReply>, Status> {
        unknown()
    }
    async fn parameters(
        &self,
        _: Request<wire::ParametersRequest>,
    ) -> Result<Response<wire::ParametersReply>, Status> {
        unknown()
    }
    async fn artifact(
        &self,
        _: Request<wire::ArtifactRequest>,
    ) -> Result<Response<Self::ArtifactStream>, Status> {
        unknown()
    }
    async fn drain(&self, request: Request<DrainRequest>) -> Result<Response<DrainReply>, Status> {
        let count = if request.into_inner().undo {
            &self.resumed
        } else {
            &self.drained
        };
        count.fetch_add(1, Ordering::Relaxed);
        Ok(Response::new(DrainReply::default()))
    }
}

#[tokio::test]
async fn drain_and_its_undoing_arrive() {
    let worker = Arc::new(Draining {
        drained: AtomicU32::new(0),
        resumed: AtomicU32::new(0),
    });
    let (listener, address) = bind().await;
    let incoming = futures::stream::unfold(listener, |listener| async {
        let accepted = listener.accept().await.map(|(socket, _)| socket);
        Some((accepted, listener))
    });
    let service = WorkerServer::from_arc(worker.clone());
    tokio::spawn(
        tonic::transport::Server::builder()
            .add_service(service)
            .serve_with_incoming(incoming),
    );
    drain(address, false).await.unwrap();
    drain(address, false).await.unwrap();
    drain(address, true).await.unwrap();
    assert_eq!(worker.drained.load(Ordering::Relaxed), 2);
    assert_eq!(worker.resumed.load(Ordering::Relaxed), 1);
}
