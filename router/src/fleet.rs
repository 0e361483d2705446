//! The fleet as this router sees it: one task per worker follows its Watch stream; placement reads an immutable view.
//!
//! - [`discovery`]: which workers there are.
//! - [`watch`]: one worker's stream, followed for ever. [`state`]: what is known from it (pure).
//! - [`own`]: this router's dispatches that no report counts yet (pure).
//! - [`pairs`]: whose KV means the same on whom (pure). [`topology`]: where a worker is (pure).
//! - [`snapshot`]: all of it as placement reads it (pure). `standing`: what of that is shared by snapshots. [`view`]: the snapshot of now.
//! - [`alarms`]: what an engine's counters say against its links (pure). [`fetches`]: of which hand-offs they say it (pure).
//! - [`artifacts`]: tokenizers and chat templates by digest.
//! - [`listing`]: `GET /v1/fleet`.

pub mod alarms;
pub mod artifacts;
pub mod discovery;
pub mod fetches;
pub mod listing;
pub mod own;
pub mod pairs;
#[cfg(test)]
pub(crate) use baton_protocol::samples;
pub mod snapshot;
mod standing;
pub mod state;
pub mod topology;
pub mod view;
pub mod watch;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use arc_swap::ArcSwap;
use baton_placement::coefficients::CoefficientSet;
use baton_placement::fleet::OwnDispatches;
use baton_placement::index::{ExactIndex, PrefixHits, PrefixIndex};
use baton_protocol::card::Card;
use baton_protocol::hash::{BlockHash, BlockHasher, HashKey};
use baton_protocol::ids::{Incarnation, WorkerId};
use baton_protocol::wire::{self, worker_client::WorkerClient};
use parking_lot::{Mutex, RwLock};
use tokio::sync::Notify;
use tonic::transport::Channel;

use crate::clock::{Clock, Moment};
use crate::learning::{Learning, LinkUse};
use crate::metrics::Metrics;
use alarms::Rises;
use artifacts::Artifacts;
use discovery::Listed;
use fetches::{Blame, Counted, FetchTicket, Fetches, Seen};
use own::{OwnLedger, Ticket};
use pairs::Pairs;
use snapshot::Promise;
use standing::{Standing, carded};
use state::{Change, Tracked, WatchError};
pub use view::{Member, View};

/// A promise of bytes on a link, to be given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PromiseTicket(u64);

#[derive(Debug)]
struct Inner {
    tracked: BTreeMap<WorkerId, Tracked>,
    clients: HashMap<WorkerId, WorkerClient<Channel>>,
    free_slots: Vec<u32>,
    next_slot: u32,
    version: u64,
    own: OwnLedger,
    fetches: Fetches,
    promises: HashMap<PromiseTicket, Promise>,
    next_promise: u64,
    pairs: Arc<Pairs>,
    coefficients: Arc<CoefficientSet>,
    digest: String,
    coefficients_made: Moment,
    /// Cards or levels have come or gone since.
    renamed: bool,
    /// How many workers the set names, and which fitted links ([`Learning::links`]).
    named: (usize, u64),
    /// What views share until a card, a place or a constant changes.
    standing: Option<Arc<Standing>>,
}

/// Shared by the Watch tasks, which write, and dispatch, which reads.
#[derive(Debug)]
pub struct Workers {
    pub clock: Clock,
    /// That share the workers, this one included.
    routers: AtomicU32,
    key: HashKey,
    inner: Mutex<Inner>,
    index: RwLock<ExactIndex>,
    view: ArcSwap<View>,
    /// Rises with everything that a view would show.
    changes: AtomicU64,
    pub artifacts: Artifacts,
    learning: Arc<Learning>,
    metrics: Arc<Metrics>,
}

impl Workers {
    pub fn new(
        clock: Clock,
        routers: u32,
        key: HashKey,
        artifacts: Artifacts,
        learning: Arc<Learning>,
        metrics: Arc<Metrics>,
    ) -> Self {
        let coefficients = Arc::new(CoefficientSet::default());
        let inner = Inner {
            tracked: BTreeMap::new(),
            clients: HashMap::new(),
            free_slots: Vec::new(),
            next_slot: 0,
            version: 0,
            own: OwnLedger::default(),
            fetches: Fetches::default(),
            promises: HashMap::new(),
            next_promise: 0,
            pairs: Arc::default(),
            digest: coefficients.digest(),
            coefficients,
            coefficients_made: Moment::default(),
            renamed: true,
            named: (0, 0),
            standing: None,
        };
        let view = View::empty(&inner);
        Self {
            clock,
            routers: AtomicU32::new(routers),
            key,
            inner: Mutex::new(inner),
            index: RwLock::default(),
            view: ArcSwap::from_pointee(view),
            changes: AtomicU64::new(0),
            artifacts,
            learning,
            metrics,
        }
    }

    fn changed(&self) {
        self.changes.fetch_add(1, Ordering::AcqRel);
    }

    /// What this router has sent to workers and no report counts yet, and the bytes that its runs will still move: how many of
    /// each. None of an idle router's.
    pub fn outstanding(&self) -> (usize, usize) {
        let inner = self.inner.lock();
        (inner.own.len(), inner.promises.len())
    }

    /// What each worker holds of a prompt, and the hash of its first block.
    pub fn hits(
        &self,
        view: &View,
        tokens: &[u32],
        cache_salt: &str,
    ) -> (PrefixHits, Option<BlockHash>) {
        let mut kinds: Vec<(&str, u32)> = Vec::new();
        for member in view.members.iter() {
            let kind = (
                member.card.kv_identity.as_str(),
                member.card.capacity.block_size,
            );
            if !kinds.contains(&kind) {
                kinds.push(kind);
            }
        }
        let mut hits = PrefixHits::default();
        let mut first = None;
        for (identity, block_size) in kinds {
            let chain = BlockHasher::new(&self.key, identity, cache_salt)
                .chain(tokens, block_size as usize);
            first = first.or(chain.first().copied());
            hits.merge(&self.index.read().matches(&chain));
        }
        (hits, first)
    }

    /// How many routers share the workers, this one included.
    pub fn shared_by(&self, routers: u32) {
        if self.routers.swap(routers, Ordering::Relaxed) != routers {
            self.changed();
        }
    }

    /// A worker was found: it is known from now on, without a card yet.
    pub(crate) fn add(&self, listed: &Listed, client: WorkerClient<Channel>) {
        let id = &listed.name;
        let mut inner = self.inner.lock();
        let slot = inner.free_slots.pop().unwrap_or_else(|| {
            let slot = inner.next_slot;
            inner.next_slot += 1;
            slot
        });
        let mut tracked = Tracked::new(id.clone(), slot);
        tracked.listed(listed.domains.clone(), listed.leaving);
        inner.tracked.insert(id.clone(), tracked);
        inner.clients.insert(id.clone(), client);
        self.changed();
    }

    /// The same worker is listed in another way.
    pub(crate) fn relist(&self, listed: &Listed) {
        let mut inner = self.inner.lock();
        let inner = &mut *inner;
        if let Some(tracked) = inner.tracked.get_mut(&listed.name) {
            tracked.listed(listed.domains.clone(), listed.leaving);
            // It may name a level of which the set has no prior yet.
            inner.renamed = true;
        }
        self.changed();
    }

    /// A worker is no longer listed.
    pub(crate) fn remove(&self, id: &WorkerId) {
        let mut inner = self.inner.lock();
        inner.clients.remove(id);
        inner.fetches.forget(id);
        if let Some(tracked) = inner.tracked.remove(id) {
            self.index.write().remove_worker(tracked.slot);
            inner.free_slots.push(tracked.slot);
        }
        self.artifacts.keep(&inner.artifacts());
        inner.judge_pairs();
        self.changed();
    }

    pub(crate) fn connected(&self, id: &WorkerId) {
        let now = self.clock.now();
        if let Some(tracked) = self.inner.lock().tracked.get_mut(id) {
            tracked.connected(now);
        }
        self.changed();
    }

    pub(crate) fn disconnected(&self, id: &WorkerId) {
        if let Some(tracked) = self.inner.lock().tracked.get_mut(id) {
            tracked.disconnected();
        }
        self.changed();
    }

    /// What keeps a worker from being of full use, for `GET /v1/fleet`; none: nothing any more.
    pub(crate) fn complain_of(&self, id: &WorkerId, trouble: Option<String>) {
        if let Some(tracked) = self.inner.lock().tracked.get_mut(id) {
            tracked.trouble = trouble;
        }
        self.changed();
    }

    /// A worker has said that it is not what its card says: its card is read again.
    pub(crate) fn doubt_card(&self, id: &WorkerId) {
        if let Some(tracked) = self.inner.lock().tracked.get_mut(id) {
            tracked.doubt_card();
        }
    }

    /// Told when a worker's card is doubted.
    pub(crate) fn doubted(&self, id: &WorkerId) -> Arc<Notify> {
        let inner = self.inner.lock();
        inner
            .tracked
            .get(id)
            .map(Tracked::doubted)
            .unwrap_or_default()
    }

    /// Told of each report of a worker's load.
    pub(crate) fn reported(&self, id: &WorkerId) -> Option<Arc<Notify>> {
        Some(self.inner.lock().tracked.get(id)?.reported())
    }

    pub(crate) fn resume(&self, id: &WorkerId) -> Option<state::Resume> {
        self.inner.lock().tracked.get(id)?.resume()
    }

    /// Takes one event of a worker's stream.
    pub(crate) fn apply(
        &self,
        id: &WorkerId,
        event: wire::WatchEvent,
    ) -> Result<Change, WatchError> {
        let now = self.clock.now();
        let mut inner = self.inner.lock();
        let inner = &mut *inner;
        let Some(tracked) = inner.tracked.get_mut(id) else {
            return Ok(Change::Nothing);
        };
        let incarnation = Incarnation(event.incarnation);
        let same_start = |card: &&Arc<Card>| card.incarnation == incarnation;
        let before = tracked.card.as_ref().filter(same_start).and(tracked.load);
        let result = tracked.apply(event, &mut *self.index.write(), now);
        match &result {
            Ok(Change::Load { load_sequence }) => {
                if let Some(after) = &tracked.load {
                    let rises = Rises::between(before.as_ref(), after);
                    let counted = Counted {
                        failed: rises.failed_transfers,
                        ended: rises.ended_transfers,
                    };
                    let others = self.routers.load(Ordering::Relaxed) > 1;
                    let fetches = &mut inner.fetches;
                    let blame = fetches.reported(id, incarnation, *load_sequence, counted, others);
                    self.heed(id, rises, &blame, now);
                }
                inner.own.reported(id, incarnation, *load_sequence);
            }
            Ok(Change::Card(_)) => inner.judge_pairs(),
            Err(WatchError::Gap { .. }) => {
                self.metrics.index_gaps.inc();
            }
            _ => {}
        }
        self.changed();
        result
    }

    /// An engine's counters have risen. Where nothing is known of the links of what is to blame, every link to it counts.
    fn heed(&self, id: &WorkerId, rises: Rises, blame: &Blame, now: Moment) {
        if rises == Rises::default() {
            return;
        }
        let view = self.view.load();
        let Some(member) = view.members.iter().find(|member| member.id == *id) else {
            return;
        };
        if rises.late_reads > 0 {
            tracing::error!(
                worker = %id,
                late_reads = rises.late_reads,
                "KV of this worker was read after its lease: an answer may have been made from another request's; its links are shut, lengthen its engine's lease"
            );
            self.metrics.late_reads.inc_by(rises.late_reads);
            self.learning.distrust_from(&member.path, now);
        }
        let counted = rises.failed_transfers.saturating_add(rises.ended_transfers);
        if counted > 0 {
            let ended = rises.ended_transfers;
            tracing::warn!(worker = %id, failed_transfers = counted, ended, "its engine could not fetch KV");
            self.metrics.engine_failed_transfers.inc_by(counted);
        }
        let failed = blame.failed;
        match &blame.links {
            _ if failed == 0 => {}
            Some(links) => self.learning.failed_over(links, failed, now),
            None => self.learning.failed_to(&member.path, failed, now),
        }
    }

    /// A worker's engine is about to be sent to fetch. `None`: the worker has not reported yet.
    pub(crate) fn fetch_begins(
        &self,
        worker: &WorkerId,
        link: Option<LinkUse>,
    ) -> Option<FetchTicket> {
        let mut inner = self.inner.lock();
        let tracked = inner.tracked.get(worker)?;
        tracked.load?;
        let incarnation = tracked.card.as_ref()?.incarnation;
        Some(inner.fetches.begins(worker, incarnation, link))
    }

    /// What it was sent to fetch is there, or was given up; `asked`: it will still be asked what was seen of it.
    pub(crate) fn fetch_over(&self, worker: &WorkerId, ticket: FetchTicket, asked: bool) {
        let mut inner = self.inner.lock();
        let load = inner.tracked.get(worker).and_then(|tracked| tracked.load);
        let last = load.map_or(0, |load| load.load_sequence);
        if asked {
            inner.fetches.over(worker, ticket, last);
        } else {
            inner.fetches.ended(worker, ticket, last);
        }
    }

    /// It has failed by the engine's own word, and its link was told, or it was given up from here.
    pub(crate) fn fetch_charged(&self, worker: &WorkerId, ticket: FetchTicket) {
        self.inner.lock().fetches.charged(worker, ticket);
    }

    /// What the reports of the worker have said of it, and how old the last one is.
    pub(crate) fn fetch_seen(
        &self,
        worker: &WorkerId,
        ticket: FetchTicket,
    ) -> Option<(Seen, Duration)> {
        let now = self.clock.now();
        let inner = self.inner.lock();
        let seen = inner.fetches.seen(worker, ticket)?;
        Some((seen, now.since(inner.tracked.get(worker)?.load_at)))
    }

    /// Adds a dispatch to the estimate of its worker.
    pub fn dispatched(
        &self,
        worker: &WorkerId,
        incarnation: Incarnation,
        dispatch: OwnDispatches,
    ) -> Ticket {
        let ticket = self
            .inner
            .lock()
            .own
            .dispatch(worker, incarnation, dispatch);
        self.changed();
        ticket
    }

    /// The worker counts the dispatch from this load report on.
    pub fn admitted(&self, ticket: Ticket, worker: &WorkerId, load_sequence: u64) {
        let mut inner = self.inner.lock();
        let inner = &mut *inner;
        inner.own.admitted(ticket, load_sequence);
        // The report may have come before the admission.
        if let Some(tracked) = inner.tracked.get(worker)
            && let (Some(card), Some(load)) = (&tracked.card, &tracked.load)
        {
            inner
                .own
                .reported(worker, card.incarnation, load.load_sequence);
        }
        self.changed();
    }

    pub fn ended(&self, ticket: Ticket) {
        self.inner.lock().own.ended(ticket);
        self.changed();
    }

    /// Bytes that a run will move.
    pub fn promise(&self, promise: Promise) -> PromiseTicket {
        let mut inner = self.inner.lock();
        let ticket = PromiseTicket(inner.next_promise);
        inner.next_promise += 1;
        inner.promises.insert(ticket, promise);
        self.changed();
        ticket
    }

    pub fn moved(&self, ticket: PromiseTicket) {
        self.inner.lock().promises.remove(&ticket);
        self.changed();
    }

    /// What was learnt elsewhere has changed: breakers, link fits.
    pub fn learnt_more(&self) {
        self.changed();
    }

    /// Runs `read` on what is known of each worker.
    pub fn with_tracked<T>(&self, read: impl FnOnce(&BTreeMap<WorkerId, Tracked>) -> T) -> T {
        read(&self.inner.lock().tracked)
    }

    pub fn index_blocks(&self) -> usize {
        self.index.read().blocks()
    }
}

impl Inner {
    /// Digests that the cards of all workers name.
    fn artifacts(&self) -> HashSet<&str> {
        let cards = self.tracked.values().filter_map(|one| one.card.as_deref());
        cards
            .flat_map(|card| {
                let filter = &card.route_filter;
                [filter.tokenizer.known(), filter.chat_template.known()]
            })
            .flatten()
            .map(String::as_str)
            .collect()
    }

    fn judge_pairs(&mut self) {
        self.renamed = true;
        let cards = carded(&self.tracked);
        let pairs = Pairs::of(cards.map(|(tracked, card)| (tracked.class.as_str(), &**card)));
        if pairs != *self.pairs {
            self.pairs = Arc::new(pairs);
        }
    }
}
