//! Which transport a pair uses: the first that both have, in the policy's order; and the next one where the first turns out to be
//! closed to this pair.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use futures::future::BoxFuture;
use tokio_util::sync::CancellationToken;

use super::{
    BlockSink, BlockSource, End, FetchRequest, Listening, Obstacle, Transport, TransportError,
};

/// A way that a source offers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offer {
    /// Kind, as in [`Transport::kind`].
    pub kind: String,
    /// Where, in that transport's own form.
    pub address: String,
}

/// A way that a pair can go.
#[derive(Clone, Debug)]
pub struct Way {
    /// This worker's.
    pub transport: Arc<dyn Transport>,
    /// The source's.
    pub address: String,
}

/// The kinds in `order` that the source offers, that reach from here and that this worker has. An empty order is this worker's own.
pub fn ways(order: &[String], offers: &[Offer], have: &[Arc<dyn Transport>]) -> Vec<Way> {
    let shared = |kind: &str| {
        let transport = have.iter().find(|transport| transport.kind() == kind)?;
        let offer = offers.iter().find(|offer| offer.kind == kind)?;
        transport.reaches(&offer.address).then(|| Way {
            transport: Arc::clone(transport),
            address: offer.address.clone(),
        })
    };
    if order.is_empty() {
        return have
            .iter()
            .filter_map(|transport| shared(transport.kind()))
            .collect();
    }
    order.iter().filter_map(|kind| shared(kind)).collect()
}

/// A way that was left for the next.
#[derive(Debug)]
pub struct Left<'a> {
    /// Kind that was tried.
    pub from: &'static str,
    /// Kind that is tried instead.
    pub to: &'static str,
    /// What was in the way.
    pub obstacle: Obstacle,
    /// In words.
    pub error: &'a TransportError,
}

/// Told of every way that is left.
pub type OnLeft = Box<dyn Fn(&Left<'_>) + Send + Sync>;

/// Several ways as one: each is tried when the one before it is [`TransportError::Unusable`], and then stays in use.
pub struct Ways {
    ways: Vec<Way>,
    at: AtomicUsize,
    on_left: OnLeft,
}

impl fmt::Debug for Ways {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Ways")
            .field("ways", &self.ways)
            .field("at", &self.at)
            .finish_non_exhaustive()
    }
}

impl Ways {
    /// `None` when there is none.
    pub fn new(ways: Vec<Way>, on_left: OnLeft) -> Option<Self> {
        (!ways.is_empty()).then_some(Self {
            ways,
            at: AtomicUsize::new(0),
            on_left,
        })
    }

    fn current(&self) -> &Way {
        &self.ways[self.at.load(Ordering::Relaxed)]
    }

    /// Address of the way in use.
    pub fn address(&self) -> &str {
        &self.current().address
    }

    async fn read(
        &self,
        request: &FetchRequest,
        sink: &mut dyn BlockSink,
    ) -> Result<End, TransportError> {
        loop {
            let at = self.at.load(Ordering::Relaxed);
            let way = &self.ways[at];
            let request = FetchRequest {
                address: way.address.clone(),
                ..request.clone()
            };
            let error = match way.transport.fetch(&request, sink).await {
                Err(error) => error,
                Ok(end) => return Ok(end),
            };
            let (TransportError::Unusable { obstacle, .. }, Some(next)) =
                (&error, self.ways.get(at + 1))
            else {
                return Err(error);
            };
            (self.on_left)(&Left {
                from: way.transport.kind(),
                to: next.transport.kind(),
                obstacle: *obstacle,
                error: &error,
            });
            self.at.store(at + 1, Ordering::Relaxed);
        }
    }
}

impl Transport for Ways {
    /// Of the way in use.
    fn kind(&self) -> &'static str {
        self.current().transport.kind()
    }

    fn listen<'a>(
        &'a self,
        _: &'a str,
        _: Arc<dyn BlockSource>,
        _: CancellationToken,
    ) -> BoxFuture<'a, io::Result<Listening>> {
        Box::pin(std::future::ready(Err(io::ErrorKind::Unsupported.into())))
    }

    /// The request's address counts for nothing: each way has its own.
    fn fetch<'a>(
        &'a self,
        request: &'a FetchRequest,
        sink: &'a mut dyn BlockSink,
    ) -> BoxFuture<'a, Result<End, TransportError>> {
        Box::pin(self.read(request, sink))
    }
}

#[cfg(test)]
mod tests {
    use super::super::shm::{ShmOptions, ShmTransport};
    use super::super::tcp::TcpTransport;
    use super::*;

    fn chosen(order: &[&str], offers: &[(&str, &str)]) -> Vec<String> {
        let have: Vec<Arc<dyn Transport>> = vec![
            Arc::new(ShmTransport::new("here", ShmOptions::default())),
            Arc::new(TcpTransport::default()),
        ];
        let order: Vec<_> = order.iter().map(|kind| (*kind).to_owned()).collect();
        let offers: Vec<_> = offers
            .iter()
            .map(|(kind, address)| Offer {
                kind: (*kind).to_owned(),
                address: (*address).to_owned(),
            })
            .collect();
        ways(&order, &offers, &have)
            .iter()
            .map(|way| format!("{} at {}", way.transport.kind(), way.address))
            .collect()
    }

    #[test]
    fn the_policy_orders_and_both_must_have_it() {
        let both = [("Rdma", "r"), ("Shm", "here/p"), ("Tcp", "t")];
        assert_eq!(
            chosen(&["Rdma", "Tcp", "Shm"], &both),
            ["Tcp at t", "Shm at here/p"]
        );
        assert_eq!(chosen(&["Shm", "Tcp"], &[("Tcp", "t")]), ["Tcp at t"]);
        assert_eq!(chosen(&[], &both), ["Shm at here/p", "Tcp at t"]);
        assert!(chosen(&["Rdma"], &both).is_empty());
        assert!(chosen(&["Tcp"], &[]).is_empty());
    }

    #[test]
    fn shared_memory_of_another_host_is_no_way() {
        let offers = [("Shm", "there/p"), ("Tcp", "t")];
        assert_eq!(chosen(&["Shm", "Tcp"], &offers), ["Tcp at t"]);
    }
}
