//! A descriptor, checked against what the reader has registered before anything is asked of its source.

use std::sync::Arc;

use baton_protocol::failure::HandoffFailure;
use baton_protocol::ids::{Generation, LeaseId};
use baton_protocol::wire;

use super::Handoff;
use crate::transport::Transport;
use crate::transport::choice::{Left, Offer, Ways, ways};

/// Why nothing is taken: the word for the record, and a sentence.
pub type Refused = (HandoffFailure, String);

/// What the reader has in its card.
#[derive(Clone, Copy, Debug)]
pub struct Own<'a> {
    /// Of its model and engine.
    pub kv_identity: &'a str,
    /// Of its blocks.
    pub layout_digest: &'a str,
}

/// What is to be taken, by the first way in `order` that both have (empty: the reader's own order). `on_left` hears of every way that
/// turns out to be closed.
///
/// # Errors
/// [`Refused`]: the pair is incompatible, the lease is no lease, or there is no way.
pub fn accept(
    descriptor: &wire::Descriptor,
    own: Own<'_>,
    transports: &[Arc<dyn Transport>],
    order: &[String],
    on_left: impl Fn(&Left<'_>) + Send + Sync + 'static,
) -> Result<Handoff, Refused> {
    for (cause, field, theirs, ours) in [
        (
            HandoffFailure::IdentityMismatch,
            "kvIdentity",
            descriptor.kv_identity.as_str(),
            own.kv_identity,
        ),
        (
            HandoffFailure::LayoutMismatch,
            "layoutDigest",
            descriptor.layout_digest.as_str(),
            own.layout_digest,
        ),
    ] {
        if theirs != ours {
            return Err((
                cause,
                format!(
                    "descriptor: {field} is {theirs}, this worker has {ours}: the pair is incompatible"
                ),
            ));
        }
    }
    let lease = LeaseId::from_wire(&descriptor.lease)
        .map_err(|error| (HandoffFailure::ProtocolError, error.to_string()))?;
    let offers: Vec<Offer> = descriptor
        .transports
        .iter()
        .map(|offer| Offer {
            kind: offer.kind.clone(),
            address: offer.address.clone(),
        })
        .collect();
    let Some(ways) = Ways::new(ways(order, &offers, transports), Box::new(on_left)) else {
        return Err((
            HandoffFailure::NoTransport,
            format!(
                "transports: worker {} offers none that this worker has and the policy allows: add Tcp to kvPool.transports of both",
                descriptor.worker
            ),
        ));
    };
    Ok(Handoff {
        lease,
        generation: Generation(descriptor.generation),
        skip_blocks: descriptor.skip_blocks,
        tokens: descriptor.tokens,
        address: ways.address().to_owned(),
        transport: Arc::new(ways),
    })
}
