//! `Tcp`: always there. Bytes go from the source's block to the socket and from the socket into the reader's block, without a
//! buffer between. A connection serves one hand-off after another, so that only the first of a pair waits for it to be made and for
//! its window to grow.
//!
//! Socket buffers are left to the kernel, which grows them with the link; a fixed size would switch that off.

mod client;
pub(crate) mod frame;
mod kept;
mod server;

#[cfg(test)]
mod tests;

use std::io;
use std::sync::Arc;
use std::time::Duration;

use baton_system::network::{MachineNetwork, Network};
use futures::future::BoxFuture;
use tokio_util::sync::CancellationToken;

#[doc(hidden)]
pub use frame::{Recoded, recode as recode_frames};

use self::kept::Kept;
use super::{BlockSink, BlockSource, End, FetchRequest, Listening, Transport, TransportError};

/// How long each side waits, and for how many.
#[derive(Clone, Copy, Debug)]
pub struct TcpOptions {
    /// For the connection to be made.
    pub connect: Duration,
    /// For the peer's preamble and first frame.
    pub handshake: Duration,
    /// A source that has nothing to send says so this often.
    pub alive: Duration,
    /// A reader that hears nothing for this long gives up. Several times `alive` of the peer.
    pub silence: Duration,
    /// A source whose reader takes nothing for this long drops it.
    pub stalled: Duration,
    /// A connection that no hand-off has used for this long is closed by its reader.
    pub idle: Duration,
    /// Connections served at the same time, idle ones included. Each costs a socket and a few hundred bytes; more readers than
    /// this many decode sequences at once do not exist in a fleet whose pools are sized by blocks.
    pub readers: usize,
}

impl Default for TcpOptions {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(2),
            handshake: Duration::from_secs(2),
            alive: Duration::from_millis(500),
            silence: Duration::from_secs(3),
            stalled: Duration::from_secs(5),
            idle: Duration::from_secs(5),
            readers: 1024,
        }
    }
}

/// The transport. Cloning shares its idle connections.
#[derive(Clone, Debug)]
pub struct TcpTransport {
    options: TcpOptions,
    network: Arc<dyn Network>,
    kept: Arc<Kept>,
}

impl Default for TcpTransport {
    fn default() -> Self {
        Self::new(TcpOptions::default())
    }
}

impl TcpTransport {
    /// With these waits, on the machine's own network.
    pub fn new(options: TcpOptions) -> Self {
        Self {
            options,
            network: Arc::new(MachineNetwork),
            kept: Arc::default(),
        }
    }

    /// On another network.
    pub fn on(self, network: Arc<dyn Network>) -> Self {
        Self { network, ..self }
    }
}

impl Transport for TcpTransport {
    fn kind(&self) -> &'static str {
        "Tcp"
    }

    fn listen<'a>(
        &'a self,
        address: &'a str,
        source: Arc<dyn BlockSource>,
        stop: CancellationToken,
    ) -> BoxFuture<'a, io::Result<Listening>> {
        Box::pin(async move {
            let listener = self.network.listen(address).await?;
            let (kept, idle) = (Arc::clone(&self.kept), self.options.idle);
            let address = listener.local_addr()?.to_string();
            let serve = server::serve(listener, source, self.options, stop);
            Ok(Listening {
                address,
                // Whoever serves also fetches: one task closes what no fetch has used.
                run: Box::pin(async move {
                    tokio::select! {
                        () = serve => {}
                        () = kept.sweep(idle) => {}
                    }
                }),
            })
        })
    }

    fn fetch<'a>(
        &'a self,
        request: &'a FetchRequest,
        sink: &'a mut dyn BlockSink,
    ) -> BoxFuture<'a, Result<End, TransportError>> {
        Box::pin(client::fetch(
            &*self.network,
            &self.kept,
            self.options,
            request,
            sink,
        ))
    }
}
