//! One connection of a port, from its first byte to its last.

use std::convert::Infallible;
use std::error::Error as _;
use std::future::poll_fn;
use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use baton_system::network::Stream;
use bytes::Bytes;
use hyper::body::{Body as HttpBody, Frame, Incoming, SizeHint};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use rustix::net::sockopt;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tower::Service;

use super::counts::Counts;
use super::limits::FrontConfig;
use super::patience::Patient;
use super::seats::{Busy, Seat};
use super::tls::IdentityFiles;

/// Bytes of a head; of a body or an answer, what is between the network and the router at a time.
const BUFFER: usize = 32 << 10;

/// What the kernel holds of an answer. At most 250 KiB: two seconds of the fastest stream, and no more for one that is not read.
const SEND_BUFFER: usize = 128 << 10;

/// Without any word from the client, its machine is asked for one. Three answers missing and it is gone.
const KEEPALIVE: Duration = Duration::from_secs(15);

/// How long a client has to notice that it was refused, before the connection is cut off under what it still sends.
const LINGER: Duration = Duration::from_secs(1);

/// What all connections of a port share.
#[derive(Clone, Debug)]
pub(super) struct Port {
    pub(super) routes: Router,
    pub(super) config: FrontConfig,
    pub(super) identity: Option<Arc<IdentityFiles>>,
    pub(super) counts: Counts,
    /// Requests that have not begun are refused; connections end with their answer.
    pub(super) shutdown: CancellationToken,
}

/// Serves a connection until it ends, or has to give up its seat.
pub(super) async fn serve(stream: Stream, seat: Arc<Seat>, port: Port) {
    watch_over(&stream, port.config.write_timeout);
    let given_up = seat.given_up.clone();
    let served = async {
        let stream = Patient::new(stream, port.config.write_timeout);
        match &port.identity {
            None => converse(stream, seat, &port).await,
            Some(identity) => {
                let acceptor = identity.in_force().acceptor();
                match timeout(port.config.head_timeout, acceptor.accept(stream)).await {
                    Ok(Ok(stream)) => converse(stream, seat, &port).await,
                    Ok(Err(error)) => tracing::debug!("no TLS handshake: {error}"),
                    Err(_) => tracing::debug!("a TLS handshake took too long"),
                }
            }
        }
    };
    tokio::select! {
        biased;
        () = given_up.cancelled() => {}
        () = served => {}
    }
}

/// Lets the kernel notice a client whose machine is gone, and bounds what it keeps for one that does not read.
fn watch_over(stream: &Stream, patience: Duration) {
    let Stream::Machine(socket) = stream else {
        return;
    };
    let unacknowledged = u32::try_from(patience.as_millis()).unwrap_or(u32::MAX);
    let set = sockopt::set_socket_keepalive(socket, true)
        .and_then(|()| sockopt::set_tcp_keepidle(socket, KEEPALIVE))
        .and_then(|()| sockopt::set_tcp_keepintvl(socket, KEEPALIVE))
        .and_then(|()| sockopt::set_tcp_keepcnt(socket, 3))
        .and_then(|()| sockopt::set_tcp_user_timeout(socket, unacknowledged))
        .and_then(|()| sockopt::set_socket_send_buffer_size(socket, SEND_BUFFER));
    if let Err(error) = set {
        tracing::debug!(%error, "a connection keeps the system's own time limits");
    }
}

/// HTTP/1.1 and 1.0. A client that closes its sending side is taken to have gone (a close of both sides looks the same until it is too
/// late), and its run ends.
async fn converse<S>(stream: S, seat: Arc<Seat>, port: &Port)
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let service = service_fn(|request: http::Request<Incoming>| {
        let busy = seat.busy();
        let answer = port.routes.clone().call(request.map(Body::new));
        let answer = async move {
            let answer = answer.await?;
            Ok::<_, Infallible>(answer.map(|body| Answering { body, _busy: busy }))
        };
        Box::pin(answer)
    });
    // One that begins now is told to go elsewhere: closed before its request, it would not know why.
    let late = port.shutdown.is_cancelled();
    let mut connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(port.config.head_timeout)
        .max_buf_size(BUFFER)
        .keep_alive(!late)
        .serve_connection(TokioIo::new(stream), service);
    let mut shutdown = pin!(port.shutdown.cancelled());
    let mut told = late;
    let ended = poll_fn(|context| {
        if !told && shutdown.as_mut().poll(context).is_ready() {
            told = true;
            Pin::new(&mut connection).graceful_shutdown();
        }
        connection.poll_without_shutdown(context)
    });
    if let Err(error) = ended.await {
        // Clients that leave early are no fault.
        tracing::debug!("a connection broke off: {error}");
        if timed_out(&error) {
            seat.stalled();
        }
    }
    let stream = connection.into_parts().io.into_inner();
    part(stream).await;
}

/// What was written was not taken in time, as [`Patient`] or the kernel found.
fn timed_out(error: &hyper::Error) -> bool {
    let cause = error.source().and_then(|cause| cause.downcast_ref());
    cause.is_some_and(|cause: &io::Error| cause.kind() == io::ErrorKind::TimedOut)
}

/// Ends a connection so that the client can read what was said last: cut off while it still sends, it would lose that too.
pub(super) async fn part(mut stream: impl AsyncRead + AsyncWrite + Unpin) {
    let goodbye = async {
        stream.shutdown().await?;
        let mut sent = [0; 4096];
        while stream.read(&mut sent).await? > 0 {}
        Ok::<_, io::Error>(())
    };
    // What is left after this is cut off.
    let _ = timeout(LINGER, goodbye).await;
}

/// An answer that keeps its connection busy.
struct Answering {
    body: Body,
    _busy: Busy,
}

impl HttpBody for Answering {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
