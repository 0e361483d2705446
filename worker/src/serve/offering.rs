//! The transports that a worker offers: started in the order of its configuration.

use std::net::SocketAddr;
use std::sync::Arc;

use baton_protocol::card::Card;
use baton_system::network::Network;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::{StartError, local};
use crate::config::{TransportName, WorkerConfig};
use crate::kv::KvPool;
use crate::transport::choice::Offer;
use crate::transport::fault::{Fault, FaultySource};
use crate::transport::local::LocalTransport;
use crate::transport::shm::{ShmOptions, ShmTransport};
use crate::transport::tcp::TcpTransport;
use crate::transport::{BlockSource, Transport};

/// What transports are started from.
pub(crate) struct Offering<'a> {
    pub(crate) config: &'a WorkerConfig,
    pub(crate) listen: SocketAddr,
    pub(crate) advertise: Option<&'a str>,
    pub(crate) local: Option<LocalTransport>,
    pub(crate) host: Option<&'a str>,
    pub(crate) fault: Option<Fault>,
    pub(crate) network: Arc<dyn Network>,
    pub(crate) stop: CancellationToken,
}

/// What serves now.
pub(crate) struct Offered {
    /// In the configuration's order.
    pub(crate) transports: Vec<Arc<dyn Transport>>,
    pub(crate) offers: Vec<Offer>,
    /// What is configured and not offered, and why, in sentences for the card.
    pub(crate) notices: Vec<String>,
}

impl Offering<'_> {
    /// Starts every transport of the configuration that there is, in its order. `Shm` that cannot be had is a sentence in the card:
    /// its readers take the next transport.
    pub(crate) async fn listen(
        self,
        pool: &KvPool,
        card: &Card,
        tasks: &mut JoinSet<()>,
    ) -> Result<Offered, StartError> {
        let mut source: Arc<dyn BlockSource> = Arc::new(pool.clone());
        if let Some(fault) = self.fault {
            tracing::warn!(
                ?fault,
                "BATON_FAULT is set: this worker sends wrong blocks on purpose"
            );
            source = Arc::new(FaultySource::new(source, fault));
        }
        let mut transports: Vec<Arc<dyn Transport>> = Vec::new();
        let mut offers = Vec::new();
        let mut notices = Vec::new();
        for name in &self.config.kv_pool.transports {
            let (transport, address): (Arc<dyn Transport>, String) = match name {
                TransportName::Tcp => (
                    Arc::new(TcpTransport::default().on(Arc::clone(&self.network))),
                    self.listen.to_string(),
                ),
                TransportName::Local => match &self.local {
                    Some(local) => (Arc::new(local.clone()), local::address(card)),
                    // Alone in its process there is nobody to read from it.
                    None => continue,
                },
                TransportName::Shm => match self.host {
                    Some(host) => {
                        let shm = ShmTransport::new(host, ShmOptions::default());
                        let address = shm.address(&card.incarnation.to_string());
                        (Arc::new(shm), address)
                    }
                    // A host that has no id, or a simulated one.
                    None => {
                        notices.push("Shm is not offered: this host has no id".to_owned());
                        continue;
                    }
                },
            };
            let listening = match transport
                .listen(&address, Arc::clone(&source), self.stop.clone())
                .await
            {
                Ok(listening) => listening,
                Err(error) if *name == TransportName::Shm => {
                    tracing::warn!(%error, "Shm is not offered");
                    notices.push(format!("Shm is not offered: {error}"));
                    continue;
                }
                Err(cause) => {
                    return Err(StartError::Port {
                        flag: "--transfer",
                        address,
                        cause,
                    });
                }
            };
            let address = match (name, listening.address.parse()) {
                (TransportName::Tcp, Ok(bound)) => advertised(self.advertise, bound),
                _ => listening.address.clone(),
            };
            offers.push(Offer {
                kind: name.word().to_owned(),
                address,
            });
            transports.push(transport);
            tasks.spawn(listening.run);
        }
        if offers.is_empty() {
            return Err(StartError::NoTransport {
                worker: self.config.name.clone(),
            });
        }
        Ok(Offered {
            transports,
            offers,
            notices,
        })
    }
}

/// The address that others are told.
pub(crate) fn advertised(host: Option<&str>, bound: SocketAddr) -> String {
    match host {
        Some(host) if host.contains(':') => format!("[{host}]:{}", bound.port()),
        Some(host) => format!("{host}:{}", bound.port()),
        None => bound.to_string(),
    }
}
