//! `Shm`: source and reader on one host. The reader maps the source's arena and copies each block once.
//!
//! The source listens on a Unix socket of the abstract namespace: it has no file to guard or to leave behind. Each side asks the
//! kernel whose process the other is and talks to its own user only. A reader that names a lease which it has claimed is given the
//! arena's file, then the place of each block as it is published. It can see the whole arena from then on, as a debugger of the same
//! user could; that is why another user gets `Tcp`. The socket is how the source knows: until the reader says that it is done, or its
//! end closes, the lease's blocks are not reused.
//!
//! An address is the host's id, a slash, and the socket's name. The id is made of the boot and the network namespace, which is as
//! far as abstract sockets reach.

mod client;
mod connection;
mod server;

#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use parking_lot::Mutex;
use tokio::net::UnixListener;
use tokio_util::sync::CancellationToken;

use self::client::Peer;
use super::{BlockSink, BlockSource, End, FetchRequest, Listening, Transport, TransportError};

/// How long each side waits, and for how many.
#[derive(Clone, Copy, Debug)]
pub struct ShmOptions {
    /// For the connection, and for the peer's preamble and first frame.
    pub handshake: Duration,
    /// A source that has nothing to tell says so this often.
    pub alive: Duration,
    /// A reader that hears nothing for this long gives up. Several times `alive` of the peer.
    pub silence: Duration,
    /// A source whose reader takes nothing for this long drops it.
    pub stalled: Duration,
    /// A connection and a mapping that no hand-off has used for this long are given up by their reader. While it is mapped a
    /// dead source's memory is not freed.
    pub idle: Duration,
    /// Connections served at the same time, idle ones included. Each costs a socket and a few hundred bytes; a reader keeps at most
    /// [`IDLE`] that it does not use.
    pub readers: usize,
    /// The user that both processes must be of.
    pub user: u32,
}

/// Idle connections that a reader keeps to one source: more hand-offs than this between one pair rarely run at once, and the next
/// one connects anew.
pub const IDLE: usize = 4;

impl Default for ShmOptions {
    fn default() -> Self {
        Self {
            handshake: Duration::from_secs(2),
            alive: Duration::from_millis(500),
            silence: Duration::from_secs(3),
            stalled: Duration::from_secs(5),
            idle: Duration::from_secs(5),
            readers: 1024,
            user: rustix::process::geteuid().as_raw(),
        }
    }
}

/// The transport. Cloning shares what it has mapped.
#[derive(Clone, Debug)]
pub struct ShmTransport {
    host: Arc<str>,
    options: ShmOptions,
    /// By address. One for each source on this host that a hand-off came from lately.
    peers: Arc<Mutex<HashMap<String, Peer>>>,
}

impl ShmTransport {
    /// On the host of this id; see [`host`].
    pub fn new(host: &str, options: ShmOptions) -> Self {
        Self {
            host: host.into(),
            options,
            peers: Arc::default(),
        }
    }

    /// An address to listen at. `name` is used once among the host's processes.
    pub fn address(&self, name: &str) -> String {
        format!("{}/{name}", self.host)
    }

    /// The abstract socket of an address of this host.
    fn socket(&self, address: &str) -> Option<PathBuf> {
        let name = address.strip_prefix(&*self.host)?.strip_prefix('/')?;
        // A leading zero byte is how the abstract namespace is written.
        Some(PathBuf::from(format!("\0baton-kv/{name}")))
    }

    /// Gives up what no hand-off has used lately.
    fn sweep(&self) {
        let idle = self.options.idle;
        self.peers.lock().retain(|_, peer| peer.sweep(idle));
    }

    /// Arenas that are mapped now.
    pub fn mapped(&self) -> usize {
        self.peers.lock().len()
    }
}

/// This host's id: processes with the same one reach each other's abstract sockets.
///
/// # Errors
/// What the system says when it shows neither boot nor namespace.
pub fn host() -> io::Result<String> {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    let namespace = std::fs::read_link("/proc/self/ns/net")?;
    let mut digest = blake3::Hasher::new();
    digest.update(boot.trim().as_bytes());
    digest.update(namespace.as_os_str().as_encoded_bytes());
    Ok(digest.finalize().to_hex()[..16].to_owned())
}

impl Transport for ShmTransport {
    fn kind(&self) -> &'static str {
        "Shm"
    }

    fn reaches(&self, address: &str) -> bool {
        self.socket(address).is_some()
    }

    fn listen<'a>(
        &'a self,
        address: &'a str,
        source: Arc<dyn BlockSource>,
        stop: CancellationToken,
    ) -> BoxFuture<'a, io::Result<Listening>> {
        Box::pin(async move {
            let unsupported = |reason: String| io::Error::new(io::ErrorKind::Unsupported, reason);
            let socket = self.socket(address).ok_or_else(|| {
                unsupported(format!("{address} is no address of host {}", self.host))
            })?;
            match source.arena().map(|arena| arena.file()) {
                Some(Ok(_)) => {}
                Some(Err(reason)) => return Err(unsupported(reason.to_owned())),
                None => return Err(unsupported("this source shares no memory".to_owned())),
            }
            let listener = UnixListener::bind(socket)?;
            let transport = self.clone();
            let serve = server::serve(listener, source, self.options, stop.clone());
            let run = async move {
                let mut sweeps = tokio::time::interval(transport.options.idle.max(SHORTEST_SWEEP));
                let sweep = async {
                    loop {
                        sweeps.tick().await;
                        transport.sweep();
                    }
                };
                tokio::select! {
                    () = serve => {}
                    () = sweep => {}
                }
            };
            Ok(Listening {
                address: address.to_owned(),
                run: Box::pin(run),
            })
        })
    }

    fn fetch<'a>(
        &'a self,
        request: &'a FetchRequest,
        sink: &'a mut dyn BlockSink,
    ) -> BoxFuture<'a, Result<End, TransportError>> {
        Box::pin(self.read(request, sink))
    }
}

/// An interval of zero would spin.
const SHORTEST_SWEEP: Duration = Duration::from_millis(10);
