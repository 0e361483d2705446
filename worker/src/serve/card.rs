//! The card of this worker, written once when it starts.

use baton_placement::cost::{CHUNK_WITHOUT_OBJECTIVE, LARGEST_CHUNK, SMALLEST_CHUNK};
use baton_protocol::card::{
    Capacity, Card, ChunkPolicy, Dispatch, EngineName, ModelName, TextCheck, TransportOffer,
    WIRE_VERSIONS,
};
use baton_protocol::identity::{Fact, Rope};
use baton_protocol::ids::{Incarnation, WorkerId};

use super::StartError;
use crate::config::WorkerConfig;
use crate::model::ModelFacts;

/// What only the running process knows.
#[derive(Debug)]
pub(crate) struct Running<'a> {
    pub(crate) incarnation: Incarnation,
    pub(crate) facts: &'a ModelFacts,
    pub(crate) accelerator: String,
    pub(crate) blocks: usize,
    pub(crate) max_context: usize,
    pub(crate) control_address: String,
    pub(crate) transports: Vec<TransportOffer>,
    pub(crate) notices: Vec<String>,
}

/// The card without its address: addresses are known later than the identity that the KV pool needs.
pub(crate) fn write(config: &WorkerConfig, running: Running<'_>) -> Card {
    let engine = &config.engine;
    let identity = running.facts.identity(engine.block_size as usize);
    let layout = running.facts.layout();
    let narrow = |value: usize| u32::try_from(value).unwrap_or(u32::MAX);
    Card {
        worker: WorkerId::from(config.name.as_str()),
        incarnation: running.incarnation,
        roles: config.roles.clone(),
        pool: config.pool.clone(),
        pool_role: config.role,
        revision: config.revision.clone(),
        model: ModelName {
            name: config.model.name.clone(),
            revision: config.model.revision.clone(),
        },
        kv_identity: identity.digest(),
        identity,
        route_filter: running.facts.route_filter(),
        layout_digest: layout.digest(),
        layout,
        engine: EngineName {
            kind: engine.kind.word().to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            connector: "Baton".to_owned(),
        },
        accelerator: running.accelerator,
        capacity: Capacity {
            blocks: narrow(running.blocks),
            block_size: engine.block_size,
            max_sequences: engine.max_sequences,
            max_batched_tokens: engine.batched_tokens(),
            max_context: narrow(running.max_context),
        },
        transports: running.transports,
        topology: config.topology.clone(),
        chunk: match config.tpot_objective_milliseconds {
            Some(_) => ChunkPolicy::Bounded {
                minimum_tokens: SMALLEST_CHUNK,
                maximum_tokens: LARGEST_CHUNK.min(engine.batched_tokens()),
            },
            None => ChunkPolicy::Fixed {
                tokens: CHUNK_WITHOUT_OBJECTIVE.min(engine.batched_tokens()),
            },
        },
        dispatch: Dispatch::Grpc,
        text: TextCheck::Verified,
        control_address: running.control_address,
        notices: running.notices,
        wire_versions: WIRE_VERSIONS,
    }
}

/// Changes one fact of a card on purpose, for tests of cards that do not match: `field=value`. The digests follow, so that the
/// worker lives by what it claims.
///
/// # Errors
/// [`StartError::Fault`] lists the fields.
pub(crate) fn alter(card: &mut Card, change: &str) -> Result<(), StartError> {
    let unknown = || {
        StartError::Fault(format!(
            "BATON_FAULT_CARD: {change:?} changes nothing: write one of identity.weights, identity.kvDtype, identity.rope, \
         routeFilter.tokenizer, routeFilter.chatTemplate, layout.order, then = and the value"
        ))
    };
    let (field, value) = change.split_once('=').ok_or_else(unknown)?;
    let fact = || Fact::observed(value.to_owned());
    match field {
        "identity.weights" => card.identity.weights = fact(),
        "identity.kvDtype" => card.identity.kv_dtype = fact(),
        "identity.rope" => {
            card.identity.rope = Fact::observed(Rope {
                base: value.to_owned(),
                dimensions: card.identity.rope.known().map_or(0, |rope| rope.dimensions),
                scaling: "None".to_owned(),
            });
        }
        "routeFilter.tokenizer" => card.route_filter.tokenizer = fact(),
        "routeFilter.chatTemplate" => card.route_filter.chat_template = fact(),
        "layout.order" => card.layout.order = fact(),
        _ => return Err(unknown()),
    }
    card.kv_identity = card.identity.digest();
    card.layout_digest = card.layout.digest();
    Ok(())
}
