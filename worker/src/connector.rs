//! BatonConnector's daemon side: the KV of an engine in another process becomes blocks of this worker's pool, and back.
//!
//! The engine's plug-in (`worker/connectors/vllm`) copies each block that a prefill completes into shared memory of its own; this side
//! copies it into the pool, where leases, transports and verification are those of every worker. What comes from another worker is
//! proven in the pool before the plug-in hears of it, and copies it into the engine from a mapping that it cannot write.
//!
//! - [`message`]: what is said, as frames. [`descriptor`]: what an engine's answer carries to the other engine.
//! - [`handing`]: prompts that are computed here and read elsewhere; [`operations`]: who asks for their descriptors. [`taking`]: those
//!   that are read here.
//! - [`socket`]: the socket and its connections. [`session`]: the life of one engine.
//!
//! What holds: neither process maps the other's memory writable. A block of the pool that the plug-in was told of is held until the
//! plug-in says that it has copied it, or its connection has closed. When the engine goes, all that was its goes: leases, reservations,
//! cached contents.
//!
//! Absent: memory of devices. The plug-in copies to the host first.

pub mod descriptor;
mod handing;
pub mod message;
mod operations;
mod session;
mod socket;
mod taking;

#[cfg(test)]
mod tests;

use std::fmt::Debug;
use std::sync::Arc;

use baton_protocol::card::{Card, TransportOffer};
use baton_protocol::failure::HandoffFailure;
use baton_protocol::ids::{Incarnation, WorkerId};
use baton_system::entropy::Entropy;
use tokio_util::sync::CancellationToken;

pub use self::message::Layout;
pub use self::operations::{Operations, Untold};
pub use self::socket::Listener;

use crate::kv::KvPool;
use crate::kv::intake::Received;
use crate::kv::intake::client::{CallFailed, LeaseClient};
use crate::transport::Transport;
use crate::transport::choice::Left;

/// What engines are served with.
#[derive(Clone, Debug)]
pub struct Service {
    /// What the engine's blocks must look like.
    pub layout: Layout,
    /// Staging memory of that geometry.
    pub pool: KvPool,
    /// What descriptors say of this worker.
    pub registered: Registered,
    /// In the order in which they are tried.
    pub transports: Vec<Arc<dyn Transport>>,
    /// Who asks for the descriptors of prompts that are computed here.
    pub operations: Operations,
    /// Milliseconds from the last renewal to a lease's end.
    pub lease_milliseconds: u64,
    /// Lease ids are drawn from it.
    pub entropy: Arc<dyn Entropy>,
    /// The worker around it.
    pub worker: Arc<dyn Worker>,
    /// Ends everything.
    pub stop: CancellationToken,
}

/// A part of a worker's card.
#[derive(Clone, Debug)]
pub struct Registered {
    /// Its name.
    pub worker: WorkerId,
    /// Of this life of the engine.
    pub incarnation: Incarnation,
    /// Of its model and engine.
    pub kv_identity: String,
    /// Of the card's layout, which [`Layout::digest`] is a part of.
    pub layout_digest: String,
    /// Where the lease protocol is spoken.
    pub control_address: String,
    /// In the order in which they are offered.
    pub transports: Vec<TransportOffer>,
}

impl From<&Card> for Registered {
    fn from(card: &Card) -> Self {
        Self {
            worker: card.worker.clone(),
            incarnation: card.incarnation,
            kv_identity: card.kv_identity.clone(),
            layout_digest: card.layout_digest.clone(),
            control_address: card.control_address.clone(),
            transports: card.transports.clone(),
        }
    }
}

/// The worker that an engine is served in.
pub trait Worker: Debug + Send + Sync {
    /// The lease protocol to the worker at a control address.
    ///
    /// # Errors
    /// [`CallFailed`] when that is no address.
    fn owner(&self, control_address: &str) -> Result<Arc<dyn LeaseClient>, CallFailed>;

    /// A hand-off came through.
    fn taken(&self, received: &Received);

    /// A hand-off did not, and the engine computes the prompt.
    fn failed(&self, cause: HandoffFailure);

    /// A pair moves KV another way.
    fn left(&self, left: &Left<'_>);

    /// Leases or reservations are others than before.
    fn changed(&self);

    /// Both halves of an engine are served: what is asked of it from now on is handed over.
    fn engine_joined(&self);

    /// The engine's connections have closed: what it had is gone.
    fn engine_gone(&self);
}
