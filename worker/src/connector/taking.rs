//! Prompts that were computed elsewhere: each is read into the pool and proven there, then lies until the engine has copied it.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use baton_protocol::failure::HandoffFailure;
use baton_protocol::ids::{Generation, Incarnation, LeaseId, OperationId, TransferId};
use futures::future::{AbortHandle, Abortable, BoxFuture, join_all};
use futures::stream::FuturesUnordered;
use futures::{FutureExt as _, StreamExt as _};
use serde_json::Value;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};

use super::message::ToEngine;
use super::{Service, descriptor};
use crate::kv::intake::client::LeaseClient;
use crate::kv::intake::descriptor::{Own, Refused, accept};
use crate::kv::intake::verify::ChecksumMode;
use crate::kv::intake::{self, IntakeOptions, Received};
use crate::kv::lease::Reader;
use crate::kv::{CacheScope, PoolFull, Reservation, Reserve};

/// Prompts under way at a time, as for those that are handed over.
const MOST: usize = 4096;
/// From the claim to the last block, the computation of the rest of the prompt included: longer than any is worth. That the other end
/// lives is known much sooner, by its transport within seconds; that it still computes, by its lease, which it ends when no block comes
/// (`QUIET` in `handing`). A router that has waited long enough takes its request back.
const TIMEOUT: Duration = Duration::from_secs(3600);
/// Between two words to the engine of what is still on its way. The plug-in waits many times as long (`LOAD_WAIT` in
/// `baton_vllm/worker.py`), and gives up what no word comes of: this process hangs then.
pub(super) const COMING: Duration = Duration::from_secs(5);
/// Broken connections and calls that are tried again.
const RETRIES: u32 = 3;

/// The engine's halves speak over two connections: how long one waits for what the other is about to say.
const ABOUT_TO: Duration = Duration::from_secs(5);

/// One prompt under way.
struct Taking {
    state: State,
    /// The engine waits for the outcome.
    collected: bool,
}

enum State {
    /// It was asked for, and has not been begun.
    Unknown,
    Reading(Reading),
    Proven(Reservation),
    /// The engine copies it: held, not looked at.
    Told {
        _held: Reservation,
    },
    Failed(String),
}

/// A reading under way.
struct Reading {
    abort: AbortHandle,
    leased: Leased,
}

/// A lease, its reader and whom to tell when it is not read.
struct Leased {
    owner: Arc<dyn LeaseClient>,
    lease: LeaseId,
    generation: Generation,
    reader: Reader,
}

impl Leased {
    async fn give_back(self) {
        intake::give_back(&*self.owner, self.lease, self.generation, &self.reader).await;
    }
}

type Outcome = (String, Result<(Reservation, Received), Refused>);

/// Why nothing is read.
enum NotRead {
    Refused(Refused),
    /// No room: nothing is wrong with the hand-off.
    Full(PoolFull, Box<Leased>),
}

impl From<Refused> for NotRead {
    fn from(refused: Refused) -> Self {
        Self::Refused(refused)
    }
}

/// All of them, by the engine's id of the request.
#[derive(Default)]
pub(super) struct Takings {
    all: HashMap<String, Taking>,
    reading: FuturesUnordered<Abortable<BoxFuture<'static, Outcome>>>,
    /// Those that were unknown when they were asked for, oldest first, and until when they may be.
    unknown: VecDeque<(Instant, String)>,
    /// Owners that are told that nobody reads.
    farewells: JoinSet<()>,
}

impl Takings {
    /// Begins to read. What the engine hears of it, where it waits and there is nothing to wait for.
    pub(super) fn begin(
        &mut self,
        service: &Service,
        request: &str,
        tokens: Vec<u32>,
        salt: &str,
        descriptor: Value,
    ) -> Option<ToEngine> {
        let collected = match self.all.get(request) {
            None if self.all.len() < MOST => false,
            Some(taking) if matches!(taking.state, State::Unknown) => true,
            _ => {
                tracing::warn!(%request, takings = self.all.len(), "not taken: known already, or too many at once");
                return None;
            }
        };
        let state = match self.read(service, request, tokens, salt, descriptor) {
            Ok(reading) => State::Reading(reading),
            Err(NotRead::Refused(refused)) => State::Failed(failed(service, request, &refused)),
            Err(NotRead::Full(full, leased)) => {
                tracing::warn!(%request, %full, "not taken: the engine computes the prompt");
                self.farewell(*leased);
                State::Failed(full.to_string())
            }
        };
        self.all
            .insert(request.to_owned(), Taking { state, collected });
        // What failed at once and is waited for.
        collected.then(|| self.outcome(request)).flatten()
    }

    fn read(
        &self,
        service: &Service,
        request: &str,
        tokens: Vec<u32>,
        salt: &str,
        descriptor: Value,
    ) -> Result<Reading, NotRead> {
        let protocol = |message| (HandoffFailure::ProtocolError, message);
        let descriptor = descriptor::read(descriptor).map_err(protocol)?;
        let worker = Arc::clone(&service.worker);
        let name = request.to_owned();
        let on_left = move |left: &crate::transport::choice::Left<'_>| {
            tracing::warn!(request = %name, from = left.from, to = left.to, cause = left.obstacle.word(), error = %left.error, "this pair moves KV another way");
            worker.left(left);
        };
        let handoff = accept(
            &descriptor,
            Own {
                kv_identity: &service.registered.kv_identity,
                layout_digest: &service.registered.layout_digest,
            },
            &service.transports,
            &[],
            on_left,
        )?;
        let owner = service
            .worker
            .owner(&descriptor.control_address)
            .map_err(|error| (HandoffFailure::SourceLost, error.0))?;
        let own = &service.registered;
        let transfer = TransferId::new(
            Incarnation(descriptor.incarnation),
            own.incarnation,
            &OperationId::from(request),
        );
        let reader = Reader {
            transfer,
            worker: own.worker.clone(),
            incarnation: own.incarnation,
        };
        let leased = Leased {
            owner: Arc::clone(&owner),
            lease: handoff.lease,
            generation: handoff.generation,
            reader: reader.clone(),
        };
        let scope = CacheScope::salted(salt);
        let reserve = Reserve {
            tokens: &tokens,
            scope: &scope,
            room: 0,
            leave_last: false,
        };
        let reservation = match service.pool.reserve(&reserve) {
            Ok(reservation) => reservation,
            Err(full) => return Err(NotRead::Full(full, Box::new(leased))),
        };
        let options = IntakeOptions {
            reader,
            checksum: ChecksumMode::Always,
            timeout: TIMEOUT,
            retries: RETRIES,
        };
        let name = request.to_owned();
        let reading = async move {
            let owner: &dyn LeaseClient = &*owner;
            let (reservation, result) =
                intake::take(&handoff, &options, owner, &tokens, reservation, &mut || {}).await;
            let result = result
                .map(|received| (reservation, received))
                .map_err(|failed| (failed.cause, failed.message));
            (name, result)
        };
        let (abort, registration) = AbortHandle::new_pair();
        self.reading
            .push(Abortable::new(reading.boxed(), registration));
        Ok(Reading { abort, leased })
    }

    /// The next end of a reading, and what the engine hears of it. Never ends while there is none; may be dropped and called again.
    pub(super) async fn next(&mut self, service: &Service) -> Option<ToEngine> {
        let oldest = self.unknown.front().map(|(until, _)| *until);
        let expired = async {
            match oldest {
                Some(until) => sleep_until(until).await,
                None => std::future::pending().await,
            }
        };
        let ended = tokio::select! {
            Some(ended) = self.reading.next() => ended,
            () = expired => {
                let (_, request) = self.unknown.pop_front()?;
                let unknown = |taking: &Taking| matches!(taking.state, State::Unknown);
                if self.all.get(&request).is_none_or(|taking| !unknown(taking)) {
                    return None;
                }
                self.all.remove(&request);
                let why = "it is not being taken".to_owned();
                return Some(ToEngine::Failed { request, why });
            }
        };
        // Aborted ones have been forgotten already.
        let (request, result) = ended.ok()?;
        let taking = self.all.get_mut(&request)?;
        taking.state = match result {
            Ok((reservation, received)) => {
                service.worker.taken(&received);
                State::Proven(reservation)
            }
            Err(refused) => State::Failed(failed(service, &request, &refused)),
        };
        service.worker.changed();
        if taking.collected {
            return self.outcome(&request);
        }
        None
    }

    /// The engine has blocks for it and waits.
    pub(super) fn collect(&mut self, request: String) -> Option<ToEngine> {
        let Some(taking) = self.all.get_mut(&request) else {
            if self.all.len() >= MOST {
                let why = format!("{MOST} prompts are taken at once");
                return Some(ToEngine::Failed { request, why });
            }
            let unknown = Taking {
                state: State::Unknown,
                collected: true,
            };
            self.unknown
                .push_back((Instant::now() + ABOUT_TO, request.clone()));
            self.all.insert(request, unknown);
            return None;
        };
        taking.collected = true;
        self.outcome(&request)
    }

    /// What the engine waits for in good hope. `None`: nothing.
    pub(super) fn coming(&self) -> Option<ToEngine> {
        let coming =
            |taking: &Taking| taking.collected && matches!(taking.state, State::Reading(_));
        let requests: Vec<String> = self
            .all
            .iter()
            .filter(|(_, taking)| coming(taking))
            .map(|(request, _)| request.clone())
            .collect();
        (!requests.is_empty()).then_some(ToEngine::Coming { requests })
    }

    fn outcome(&mut self, request: &str) -> Option<ToEngine> {
        let taking = self.all.remove(request)?;
        let request = request.to_owned();
        let (state, said) = match taking.state {
            State::Failed(why) => return Some(ToEngine::Failed { request, why }),
            State::Proven(reservation) => {
                let pieces = reservation.blocks().iter().map(|block| block.0).collect();
                let said = ToEngine::Loaded {
                    request: request.clone(),
                    first_block: 0,
                    pieces,
                };
                (State::Told { _held: reservation }, Some(said))
            }
            state => (state, None),
        };
        let taking = Taking { state, ..taking };
        self.all.insert(request, taking);
        said
    }

    /// The engine has copied it: the blocks may be reused.
    pub(super) fn copied(&mut self, request: &str) {
        if let Some(Taking {
            state: State::Told { .. },
            ..
        }) = self.all.get(request)
        {
            self.all.remove(request);
        }
    }

    /// Nobody needs it. What the engine may be copying stays until it says that it is done.
    pub(super) fn cancel(&mut self, request: &str) -> Option<ToEngine> {
        if let State::Told { .. } = self.all.get(request)?.state {
            return None;
        }
        let taking = self.all.remove(request)?;
        self.stop(taking.state);
        taking.collected.then(|| ToEngine::Failed {
            request: request.to_owned(),
            why: "it was cancelled".to_owned(),
        })
    }

    /// What was read, or is, may not be used any more, but for what the engine may be copying. What the engine hears of those that it
    /// waits for.
    pub(super) fn reset(&mut self) -> Vec<ToEngine> {
        let mut said = Vec::new();
        for (request, mut taking) in std::mem::take(&mut self.all) {
            if let State::Reading(_) | State::Proven(_) = taking.state {
                let why = "the engine has cleared its cache".to_owned();
                let failed = State::Failed(why.clone());
                self.stop(std::mem::replace(&mut taking.state, failed));
                if taking.collected {
                    said.push(ToEngine::Failed { request, why });
                    continue;
                }
            }
            self.all.insert(request, taking);
        }
        said
    }

    fn stop(&mut self, state: State) {
        if let State::Reading(Reading { abort, leased }) = state {
            abort.abort();
            self.farewell(leased);
        }
    }

    /// Nobody waits for it: an owner is a stranger.
    fn farewell(&mut self, leased: Leased) {
        while self.farewells.try_join_next().is_some() {}
        self.farewells.spawn(leased.give_back());
    }

    /// The engine is gone: ends all readings, and waits until their owners have heard of it, or do not answer.
    pub(super) async fn abandon(&mut self) {
        self.reading.clear();
        let begun = self
            .all
            .extract_if(|_, taking| matches!(taking.state, State::Reading(_)));
        let farewells = begun.filter_map(|(_, taking)| match taking.state {
            State::Reading(reading) => Some(reading.leased.give_back()),
            _ => None,
        });
        join_all(farewells).await;
        while self.farewells.join_next().await.is_some() {}
    }
}

fn failed(service: &Service, request: &str, (cause, message): &Refused) -> String {
    tracing::warn!(request, %cause, %message, "hand-off failed: nothing of it is used, the engine computes the prompt");
    service.worker.failed(*cause);
    format!("{cause}: {message}")
}
