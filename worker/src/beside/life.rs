//! One life of the server's process: its card, what its cache holds, its load, until it ends.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use baton_placement::coefficients::WorkerCoefficients;
use baton_protocol::card::Card;
use baton_protocol::hash::BlockHash;
use baton_protocol::wire;
use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::index::{Counts, Index};
use super::staging::Staging;
use crate::kv::events::EventsSince;
use crate::serve::service::watch::Watched;

/// Shared by the tasks that follow the server and by those that tell of it.
#[derive(Debug)]
pub(crate) struct Life {
    pub(crate) card: Card,
    pub(crate) card_json: String,
    /// By digest.
    pub(crate) artifacts: HashMap<String, Bytes>,
    index: Mutex<Index>,
    changes: watch::Sender<u64>,
    pub(crate) load: watch::Sender<wire::Load>,
    pub(crate) coefficients: watch::Sender<WorkerCoefficients>,
    draining: watch::Receiver<bool>,
    /// Times that batches were lost, and that a replay was asked for.
    pub(crate) gaps: AtomicU64,
    pub(crate) replays: AtomicU64,
    /// Of Baton's connector inside the server.
    pub(crate) staging: Option<Staging>,
    pub(crate) ended: CancellationToken,
}

impl Life {
    pub(crate) fn new(
        card: Card,
        artifacts: HashMap<String, Bytes>,
        index: Index,
        load: wire::Load,
        coefficients: WorkerCoefficients,
        draining: watch::Receiver<bool>,
        (staging, ended): (Option<Staging>, CancellationToken),
    ) -> Result<Arc<Self>, serde_json::Error> {
        Ok(Arc::new(Self {
            card_json: card.to_json()?,
            card,
            artifacts,
            index: Mutex::new(index),
            changes: watch::Sender::new(0),
            load: watch::Sender::new(load),
            coefficients: watch::Sender::new(coefficients),
            draining,
            gaps: AtomicU64::new(0),
            replays: AtomicU64::new(0),
            staging,
            ended,
        }))
    }

    /// Ends it for all who follow it, and waits for what its connector has to say to others.
    pub(crate) async fn end(&self) {
        self.ended.cancel();
        if let Some(staging) = &self.staging {
            staging.closed().await;
        }
    }

    /// Routers are to send it nothing: it drains, or what it computed could not be handed over.
    pub(crate) fn takes_none(&self) -> bool {
        *self.draining.borrow() || self.lacks_plug_in()
    }

    /// Its server's prompts would be computed for nobody.
    pub(crate) fn lacks_plug_in(&self) -> bool {
        self.staging.as_ref().is_some_and(Staging::takes_none)
    }

    /// Changes the index, and tells watchers of it.
    pub(crate) fn with_index<T>(&self, change: impl FnOnce(&mut Index) -> T) -> T {
        let (result, last) = {
            let mut index = self.index.lock();
            let result = change(&mut index);
            (result, index.last())
        };
        self.changes.send_replace(last);
        result
    }

    /// Blocks that can be hit, those that wait for their parent, and what was counted.
    pub(crate) fn cache(&self) -> (usize, usize, Counts) {
        let index = self.index.lock();
        (index.len(), index.waiting(), index.counts())
    }

    pub(crate) fn lost(&self) {
        self.gaps.fetch_add(1, Ordering::Relaxed);
    }
}

impl Watched for Life {
    fn incarnation(&self) -> u64 {
        self.card.incarnation.0
    }

    fn card_json(&self) -> &str {
        &self.card_json
    }

    fn cache_changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    fn events_since(&self, sequence: u64) -> EventsSince {
        self.index.lock().since(sequence)
    }

    fn snapshot(&self) -> (u64, Vec<BlockHash>) {
        self.index.lock().snapshot()
    }

    fn load(&self) -> watch::Receiver<wire::Load> {
        self.load.subscribe()
    }

    fn coefficients(&self) -> watch::Receiver<WorkerCoefficients> {
        self.coefficients.subscribe()
    }

    fn draining(&self) -> watch::Receiver<bool> {
        self.draining.clone()
    }

    fn ended(&self) -> &CancellationToken {
        &self.ended
    }
}
