//! `Local`: source and reader in one process; one copy from arena to arena.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;

use futures::future::BoxFuture;
use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;

use super::{
    Arrival, BlockSink, BlockSource, End, FetchRequest, Listening, Transport, TransportError,
};
use crate::kv::lease::Next;

#[derive(Clone, Debug)]
struct Served {
    source: Arc<dyn BlockSource>,
    stop: CancellationToken,
}

/// Sources of this process by address. Cloning shares the registry: workers in one process share one.
#[derive(Clone, Debug, Default)]
pub struct LocalTransport {
    sources: Arc<Mutex<HashMap<String, Served>>>,
}

impl LocalTransport {
    /// A registry without sources.
    pub fn new() -> Self {
        Self::default()
    }

    fn find(&self, address: &str) -> Result<Served, TransportError> {
        self.sources
            .lock()
            .get(address)
            .cloned()
            .ok_or_else(|| lost(address, io::ErrorKind::NotFound))
    }

    async fn read(
        &self,
        request: &FetchRequest,
        sink: &mut dyn BlockSink,
    ) -> Result<End, TransportError> {
        let Served { source, stop } = self.find(&request.address)?;
        let FetchRequest {
            lease,
            generation,
            transfer,
            ..
        } = request;
        if source.layout() != request.layout || source.block_bytes() != request.block_bytes {
            return Err(TransportError::Layout {
                address: request.address.clone(),
            });
        }
        let mut changes = source
            .watch(*lease, *generation, transfer)
            .map_err(TransportError::Gone)?;
        let mut index = request.first_block;
        let mut told = false;
        loop {
            if stop.is_cancelled() {
                return Err(lost(&request.address, io::ErrorKind::ConnectionReset));
            }
            // Seen before asking: a change in between is then not waited for.
            changes.mark_unchanged();
            match source.next(*lease, *generation, transfer, index) {
                Next::Block { entry, sealed } => {
                    if let (Some(end), false) = (sealed, told) {
                        told = true;
                        sink.sealed(end);
                    }
                    let before = source.header_before(entry.block);
                    let copied = sink
                        .place(index, &mut |target| {
                            source.bytes(entry.block, &mut |bytes| {
                                // Asked while the bytes are locked: if the lease lives now, nobody can have reused the block.
                                let now = source.next(*lease, *generation, transfer, index);
                                if !matches!(now, Next::Block { entry: now, .. } if now == entry) {
                                    return Ok(0);
                                }
                                target.copy_from_slice(bytes);
                                Ok(bytes.len())
                            })
                        })
                        .map_err(TransportError::Refused)?
                        .map_err(|cause| TransportError::Lost {
                            address: request.address.clone(),
                            cause,
                        })?;
                    if copied == 0 {
                        // The lease has ended: the next question tells why.
                        continue;
                    }
                    let arrival = Arrival {
                        index,
                        promised: entry.header,
                        before,
                        after: source.header_after(entry.block),
                        checksum: None,
                    };
                    sink.arrived(&arrival).map_err(TransportError::Refused)?;
                    index += 1;
                    // A copy takes the thread for as long as a block is large; others get their turn between blocks.
                    tokio::task::yield_now().await;
                }
                Next::Sealed { end } => {
                    if !told {
                        sink.sealed(end);
                    }
                    return Ok(End { end });
                }
                Next::Gone(gone) => return Err(TransportError::Gone(gone)),
                Next::Wait => {
                    tokio::select! {
                        // An error says that the lease has ended: the next question tells why.
                        _ = changes.changed() => {}
                        () = stop.cancelled() => {}
                    }
                }
            }
        }
    }
}

fn lost(address: &str, kind: io::ErrorKind) -> TransportError {
    TransportError::Lost {
        address: address.to_owned(),
        cause: kind.into(),
    }
}

impl Transport for LocalTransport {
    fn kind(&self) -> &'static str {
        "Local"
    }

    fn reaches(&self, address: &str) -> bool {
        self.sources.lock().contains_key(address)
    }

    fn listen<'a>(
        &'a self,
        address: &'a str,
        source: Arc<dyn BlockSource>,
        stop: CancellationToken,
    ) -> BoxFuture<'a, io::Result<Listening>> {
        Box::pin(async move {
            let served = Served {
                source,
                stop: stop.clone(),
            };
            let mut sources = self.sources.lock();
            if sources.contains_key(address) {
                return Err(io::ErrorKind::AddrInUse.into());
            }
            sources.insert(address.to_owned(), served);
            drop(sources);
            let (registry, name) = (Arc::clone(&self.sources), address.to_owned());
            Ok(Listening {
                address: address.to_owned(),
                run: Box::pin(async move {
                    stop.cancelled().await;
                    registry.lock().remove(&name);
                }),
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
