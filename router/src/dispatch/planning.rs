//! Asking placement where a run goes, with what is known now.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;

use baton_placement::fleet::WorkerState;
use baton_placement::place::{Decision, Reason, Request, place};
use baton_placement::policy::Mode;
use baton_placement::rng::Rng;
use baton_protocol::card::Dispatch;
use baton_protocol::failure::FailureClass;
use baton_protocol::ids::{Incarnation, WorkerId};
use tracing::info_span;

use super::failure::Failure;
use super::http::engine::Engine;
use super::{Dispatcher, Shared};
use crate::clock::Moment;
use crate::fleet::{Member, View};
use crate::policy::PolicyHandle;
use crate::run::RunRequest;

/// A decision with the picture that it was made on.
#[derive(Clone, Debug)]
pub(super) struct Placed {
    pub(super) decision: Decision,
    pub(super) view: Arc<View>,
    /// Hash of the prompt's first full block, hex; empty where there is none.
    pub(super) fingerprint: String,
}

/// What a run knows that its request does not.
#[derive(Clone, Copy, Debug)]
pub(super) struct Circumstances<'a> {
    pub(super) sent: &'a [u32],
    pub(super) excluded: &'a [WorkerId],
    /// Excluded as long as their cards are of these processes.
    pub(super) changed: &'a [(WorkerId, Incarnation)],
    /// Only plans on one worker count.
    pub(super) whole: bool,
    /// Since when it looks for a worker.
    pub(super) searching_since: Moment,
}

/// Places a run.
pub(super) fn place_run(
    shared: &Shared,
    request: &RunRequest,
    circumstances: Circumstances<'_>,
) -> Placed {
    let _span = info_span!("place").entered();
    let began = std::time::Instant::now();
    let handle = &request.policy;
    let view = shared.workers.view();
    let sent = u32::try_from(circumstances.sent.len()).unwrap_or(u32::MAX);
    let prompt_tokens = request.prompt_tokens();
    let tokens: Cow<'_, [u32]> = if circumstances.sent.is_empty() {
        Cow::Borrowed(&request.tokens)
    } else {
        Cow::Owned([request.tokens.as_slice(), circumstances.sent].concat())
    };
    let (hits, first) = shared.workers.hits(&view, &tokens, &request.cache_salt);
    let mut exclude = circumstances.excluded.to_vec();
    let same = |(id, incarnation): &&(WorkerId, Incarnation)| {
        let mut members = view.members.iter();
        members.any(|member| member.id == *id && member.card.incarnation == *incarnation)
    };
    let changed = circumstances.changed.iter().filter(same);
    exclude.extend(changed.map(|(id, _)| id.clone()));
    match &request.forward {
        Some(_) => exclude.extend(not_engines(&view, handle)),
        None => exclude.extend(other_text(shared, &view, handle)),
    }
    let now = shared.clock.now();
    let placing = Request {
        tokens: prompt_tokens.saturating_add(sent),
        max_output_tokens: request.stopping.max_tokens.saturating_sub(sent).max(1),
        expected_output_tokens: shared.learning.expected_output(&handle.policy),
        hits,
        adapter: None,
        mode: request.mode.and_then(|mode| Mode::from_header(mode.word())),
        whole: circumstances.whole || !request.splittable,
        exclude,
        local_without_prefill: shared
            .without_prefill
            .lock()
            .get(&handle.name)
            .copied()
            .unwrap_or(0),
        waited_milliseconds: now.milliseconds_since(circumstances.searching_since),
    };
    let mut rng = Rng::new(shared.rng.lock().next_u64());
    let decision = place(
        &view.fleet,
        &placing,
        &handle.policy,
        now.milliseconds(),
        &mut rng,
    );
    shared
        .metrics
        .decision_duration
        .observe(began.elapsed().as_secs_f64());
    Placed {
        decision,
        view,
        fingerprint: first.map(|hash| hash.to_string()).unwrap_or_default(),
    }
}

/// What a run that got no plan fails with.
pub(super) fn no_plan(placed: &Placed, handle: &PolicyHandle) -> Failure {
    let (up, known) = workers_up(&placed.view, handle);
    let message = if up == 0 {
        match known {
            0 => format!("no worker of model {} has registered", handle.model),
            known => format!("all {known} workers of model {} are gone", handle.model),
        }
    } else {
        placed.decision.explanation.clone()
    };
    let class = match placed.decision.reason {
        // Larger than the KV of any worker, whatever its state: no other moment makes it smaller.
        Reason::KvCapacity => FailureClass::BadRequest,
        _ => FailureClass::NoWorker,
    };
    // What the policy tells clients to wait is nothing to this router, which looks again by itself.
    Failure::new(class, message)
}

/// The policy refuses for good what another moment would not change.
pub(super) fn is_final(reason: Reason) -> bool {
    matches!(reason, Reason::NoPrefillWorker | Reason::NoPrefillBudget)
}

/// Workers of the policy's pools that are up, and that are known.
pub(super) fn workers_up(view: &View, handle: &PolicyHandle) -> (usize, usize) {
    let loads = &view.fleet.loads;
    let mut counts = (0, 0);
    for (index, _) in Dispatcher::members(view, handle) {
        counts.1 += 1;
        if loads
            .get(index)
            .is_some_and(|load| load.state != WorkerState::Lost)
        {
            counts.0 += 1;
        }
    }
    counts
}

/// Digests of what turns text into tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct TextOf<'a> {
    pub(super) tokenizer: &'a str,
    pub(super) chat_template: &'a str,
}

impl<'a> TextOf<'a> {
    fn of(member: &'a Member) -> Option<Self> {
        let filter = &member.card.route_filter;
        Some(Self {
            tokenizer: filter.tokenizer.known()?,
            chat_template: filter.chat_template.known()?,
        })
    }
}

/// The tokenizer and template of a policy's model: during a rollout, those of most of its workers. Those that could be fetched
/// come first: others serve nobody.
pub(super) fn text_of<'a>(
    shared: &Shared,
    view: &'a View,
    handle: &'a PolicyHandle,
) -> Option<TextOf<'a>> {
    let artifacts = &shared.workers.artifacts;
    let mut counts: BTreeMap<TextOf<'_>, usize> = BTreeMap::new();
    for (_, member) in Dispatcher::members(view, handle) {
        if let Some(text) = TextOf::of(member) {
            *counts.entry(text).or_default() += 1;
        }
    }
    counts
        .into_iter()
        .max_by_key(|(text, count)| {
            let here = artifacts.has(text.tokenizer) && artifacts.has(text.chat_template);
            (here, *count)
        })
        .map(|(text, _)| text)
}

/// How a worker is called. A request is either passed on as it came or sent as tokens, never both.
pub(super) fn is_engine(member: &Member) -> bool {
    matches!(member.card.dispatch, Dispatch::OpenAiHttp { .. })
}

/// Whether requests of a policy are passed on as they come: as most of its workers are called. Those that are called in the other way
/// get none meanwhile.
pub(super) fn passes_on(view: &View, handle: &PolicyHandle) -> bool {
    let engines = Dispatcher::members(view, handle).map(|(_, member)| is_engine(member));
    let balance = engines.fold(0_i64, |sum, engine| sum + if engine { 1 } else { -1 });
    balance > 0 || (balance == 0 && Dispatcher::members(view, handle).next().is_some())
}

/// Workers that a request cannot be passed on to as it came.
fn not_engines<'a>(
    view: &'a View,
    handle: &'a PolicyHandle,
) -> impl Iterator<Item = WorkerId> + use<'a> {
    Dispatcher::members(view, handle)
        .filter(|(_, member)| !matches!(Engine::of(&member.card), Ok(Some(_))))
        .map(|(_, member)| member.id.clone())
}

/// Workers to which the tokens of this prompt would mean another text.
fn other_text<'a>(
    shared: &Shared,
    view: &'a View,
    handle: &'a PolicyHandle,
) -> impl Iterator<Item = WorkerId> + use<'a> {
    let text = text_of(shared, view, handle);
    Dispatcher::members(view, handle)
        .filter(move |(_, member)| is_engine(member) || TextOf::of(member) != text)
        .map(|(_, member)| member.id.clone())
}
