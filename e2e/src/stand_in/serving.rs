//! Connections of a stand-in: HTTP/1, all in the thread that accepts them.

use std::convert::Infallible;

use baton_system::network::ACCEPT_PAUSE;
use bytes::Bytes;
use http::{Request, Response};
use hyper::body::{self, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

use super::answers::Body;

/// Accepts and answers until it is dropped, with all of its connections then. Runs in a `LocalSet`.
pub async fn serve<S, F, A>(listener: TcpListener, answer: A)
where
    S: body::Body<Data = Bytes, Error = Infallible> + 'static,
    F: Future<Output = Response<Body<S>>> + 'static,
    A: Fn(Request<Incoming>) -> F + Clone + 'static,
{
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => {
                match accepted {
                    Ok((stream, _)) => {
                        connections.spawn_local(connection(stream, answer.clone()));
                    }
                    // No descriptor is left, as a rule: the next try would fail at once, too.
                    Err(_) => tokio::time::sleep(ACCEPT_PAUSE).await,
                }
            }
            // Reaped as they end.
            Some(_) = connections.join_next() => {}
        }
    }
}

async fn connection<S, F, A>(stream: TcpStream, answer: A)
where
    S: body::Body<Data = Bytes, Error = Infallible> + 'static,
    F: Future<Output = Response<Body<S>>> + 'static,
    A: Fn(Request<Incoming>) -> F + 'static,
{
    // An engine's server sends each frame at once.
    let _ = stream.set_nodelay(true);
    let service = service_fn(move |request| {
        let answered = answer(request);
        async move { Ok::<_, Infallible>(answered.await) }
    });
    // A client that goes away is no error.
    let _ = http1::Builder::new()
        .serve_connection(TokioIo::new(stream), service)
        .await;
}
