//! gRPC over a network: lazy channels, and the connections of a server.

use std::io;
use std::sync::Arc;

use futures::stream;
use http::Uri;
use hyper_util::rt::TokioIo;
use tonic::transport::server::Connected;
use tonic::transport::{Channel, Endpoint};
use tower::service_fn;

use super::{Listener, Network, Stream};

/// A channel to the endpoint's host and port that connects when it is first used, and again when the connection is lost.
pub fn channel(network: Arc<dyn Network>, endpoint: &Endpoint) -> Channel {
    endpoint.connect_with_connector_lazy(service_fn(move |uri: Uri| {
        let network = Arc::clone(&network);
        async move {
            let address = uri.authority().map_or("", |authority| authority.as_str());
            network.connect(address).await.map(TokioIo::new)
        }
    }))
}

/// What a server serves: every connection of `listener`. It never ends; what was not accepted is logged.
pub fn incoming(listener: Listener) -> impl futures::Stream<Item = io::Result<Stream>> {
    stream::unfold(listener, |listener| async move {
        let (stream, _) = listener.accept_next().await;
        Some((Ok(stream), listener))
    })
}

impl Connected for Stream {
    type ConnectInfo = ();

    fn connect_info(&self) -> Self::ConnectInfo {}
}
