//! Looks for the server, registers each life of it, and follows it until it ends.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use baton_placement::calibration::unknown_worker;
use baton_protocol::card::{Card, Role};
use baton_protocol::hash::HashKey;
use baton_protocol::ids::Incarnation;
use baton_system::System;
use baton_system::entropy;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::card::{self, Found};
use super::exposition::Reading;
use super::folder::{self, ModelFolder};
use super::http::{Server, Unanswered};
use super::index::{Index, Settings};
use super::life::Life;
use super::listen;
use super::load::{Beside, Reporter};
use super::nixl::{self, Handshake};
use super::shared::Shared;
use super::staging::{Place, Staging};
use super::text;
use super::told::{EventSource, Told, Untold};
use super::unread::Unread;
use super::{sglang, vllm};
use crate::config::{Connector, EngineKind, ModelSource, WorkerConfig};
use crate::kv::PoolConfig;
use crate::model::facts::artifact_digest;
use crate::serve::offering::advertised;

/// Between two looks for a server that is not there.
const LOOK: Duration = Duration::from_secs(1);
/// Between two words about it.
const WORD: Duration = Duration::from_secs(30);
/// Between reports. A scrape costs the server's one thread some milliseconds.
const BUSY: Duration = Duration::from_millis(250);
const IDLE: Duration = Duration::from_secs(1);
/// SGLang's own default.
const BOOTSTRAP_PORT: u16 = 8998;
/// Questions in a row without an answer after which a server is given up: a long prompt keeps it from answering for seconds.
const SILENT: u32 = 4;
/// The same where nothing listens at its port any more.
const ABSENT: u32 = 2;

/// Why there will be no worker, in one sentence with the next step.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("worker {worker}: {why}")]
pub(crate) struct GivenUp {
    worker: String,
    why: String,
}

/// Owns the search and the following.
#[derive(Debug)]
pub(crate) struct Supervisor {
    pub(crate) shared: Arc<Shared>,
    pub(crate) system: System,
    pub(crate) hash_key: HashKey,
    pub(crate) server: Server,
    /// Where the daemon's gRPC service is bound, and the host that others are told.
    pub(crate) control: SocketAddr,
    pub(crate) advertise: Option<String>,
    /// Where Baton's connector moves KV, if the server has it.
    pub(crate) place: Option<Place>,
}

/// A life, and what follows it.
type Registered = (Arc<Life>, Reporter, Vec<EventSource>);

/// All that was found out of a life before its card is written.
struct Facts {
    told: Told,
    handshake: Option<Handshake>,
    folder: Option<ModelFolder>,
}

/// What is known of the server's process, from one life to the next.
#[derive(Debug)]
struct Process {
    /// As its metrics say it; not all servers do.
    start: Option<f64>,
    /// Nothing listened at its port since, or its events began anew.
    gone: bool,
}

impl Supervisor {
    /// Until the daemon stops.
    ///
    /// # Errors
    /// The server did not come within its time, or is not the one that was declared.
    pub(crate) async fn run(self) -> Result<(), GivenUp> {
        let stop = self.shared.stop.clone();
        tokio::select! {
            () = stop.cancelled() => {
                if let Some(life) = self.shared.current() {
                    life.end().await;
                }
                Ok(())
            }
            given_up = self.live() => Err(given_up),
        }
    }

    async fn live(&self) -> GivenUp {
        let worker = &self.shared.config.name;
        let mut before = None;
        loop {
            let (life, reporter, sources) = match self.register(before).await {
                Ok(registered) => registered,
                Err(why) => {
                    return GivenUp {
                        worker: worker.clone(),
                        why,
                    };
                }
            };
            self.shared.metrics.registered(true);
            self.shared.begins(&life);
            tracing::info!(%worker, incarnation = %life.card.incarnation, version = %life.card.engine.version, "the server is registered");
            for notice in &life.card.notices {
                tracing::warn!(%worker, "{notice}");
            }
            let start = reporter.process_start();
            let engine = (self.shared.config.engine.kind, self.server.host());
            let (why, gone) = tokio::select! {
                ended = self.poll(&life, reporter) => ended,
                why = follow(&life, &sources, engine) => (why.to_owned(), true),
            };
            before = Some(Process { start, gone });
            life.end().await;
            self.shared.metrics.take(&life);
            self.shared.metrics.registered(false);
            self.shared.ends(&why, gone);
            tracing::warn!(%worker, incarnation = %life.card.incarnation, why, "the server's life has ended: it is looked for again");
        }
    }

    /// Waits for the server, and finds out what it is. `before`: its process in the last life.
    async fn register(&self, mut before: Option<Process>) -> Result<Registered, String> {
        loop {
            if let Some(registered) = self.found(&mut before).await? {
                return Ok(registered);
            }
            // Its process is gone while its plug-in was waited for.
            self.shared.stopped();
            if let Some(before) = &mut before {
                before.gone = true;
            }
        }
    }

    /// As [`Self::register`]; none where the server goes before its plug-in is served.
    async fn found(&self, before: &mut Option<Process>) -> Result<Option<Registered>, String> {
        let facts = self.facts(before).await?;
        let incarnation =
            entropy::bytes(&*self.system.entropy).map_err(|error| error.to_string())?;
        let text = text::check(
            &self.server,
            &self.shared.config,
            facts.folder.as_ref(),
            self.system.threads,
        )
        .await;
        let mut card = self.card(&facts, Incarnation(u64::from_le_bytes(incarnation)), text)?;
        let ended = CancellationToken::new();
        let staging = match &self.place {
            None => None,
            Some(place) => tokio::select! {
                staged = self.staged(place, &mut card, ended.clone()) => Some(staged?),
                () = self.server.gone(LOOK, ABSENT) => {
                    ended.cancel();
                    return Ok(None);
                }
            },
        };
        self.life(card, facts, staging, ended).map(Some)
    }

    /// Waits for the server and asks it, and reads its model's folder meanwhile.
    async fn facts(&self, before: &mut Option<Process>) -> Result<Facts, String> {
        let (found, folder) = tokio::join!(self.wait(before.as_mut()), self.folder());
        let (told, handshake) = found?;
        let start = told.metrics.process_start;
        let another = |before: &Process| before.gone || before.start != start;
        if before.as_ref().is_some_and(another) {
            self.shared.began_anew();
        }
        Ok(Facts {
            told,
            handshake,
            folder: folder?,
        })
    }

    /// What begins now, with its first report. `ended` ends what `staging` serves.
    fn life(
        &self,
        card: Card,
        facts: Facts,
        staging: Option<Staging>,
        ended: CancellationToken,
    ) -> Result<Registered, String> {
        let prior = unknown_worker();
        let capacity = &card.capacity;
        let mut reporter = Reporter::new(capacity.blocks, capacity.block_size, prior);
        let draining = &self.shared.draining;
        let load = reporter.report(
            facts.told.metrics,
            Beside {
                draining: *draining.borrow() || staging.as_ref().is_some_and(Staging::takes_none),
                ..Beside::default()
            },
        );
        let index = Index::new(self.index_settings(&card), PoolConfig::EVENT_CAPACITY);
        let folder = facts.folder.iter();
        let artifacts = folder
            .flat_map(|folder| folder.tokenizer.iter().chain([&folder.chat_template]))
            .map(|bytes| (artifact_digest(bytes), bytes.clone()))
            .collect();
        let life = Life::new(
            card,
            artifacts,
            index,
            load,
            prior,
            draining.subscribe(),
            (staging, ended),
        )
        .map_err(|error| format!("card: {error}: report this as a bug"))?;
        Ok((life, reporter, facts.told.events))
    }

    async fn staged(
        &self,
        place: &Place,
        card: &mut Card,
        ended: CancellationToken,
    ) -> Result<Staging, String> {
        let patience = Duration::from_secs(self.shared.config.engine.start_timeout_seconds);
        self.shared.absent("engine.connectorSocket: the server is there, and its BatonConnector has not called yet");
        let layout = place.layout(patience).await?;
        place.open(&self.shared, layout, card, ended).await
    }

    fn index_settings(&self, card: &Card) -> Settings {
        let adapters = card.route_filter.adapters.iter();
        let adapters: HashMap<_, _> = adapters
            .map(|adapter| (adapter.name.clone(), adapter.revision.clone()))
            .collect();
        Settings {
            key: self.hash_key.clone(),
            kv_identity: card.kv_identity.clone(),
            block_size: card.capacity.block_size,
            blocks: card.capacity.blocks as usize,
            adapters,
        }
    }

    fn card(
        &self,
        facts: &Facts,
        incarnation: Incarnation,
        text: baton_protocol::card::TextCheck,
    ) -> Result<Card, String> {
        let config = &self.shared.config;
        let host = self.advertise.as_deref();
        let port = self.server.port().parse().unwrap_or(80);
        let at = |port| advertised(host, SocketAddr::new(self.control.ip(), port));
        let card = card::write(
            config,
            Found {
                incarnation,
                told: &facts.told,
                handshake: facts.handshake.as_ref(),
                folder: facts.folder.as_ref(),
                text,
                control_address: at(self.control.port()),
                url: format!("http://{}", at(port)),
                side_channel: self.side_channel(),
                bootstrap: self.bootstrap(),
            },
        );
        if card.capacity.blocks == 0 || card.capacity.max_context == 0 {
            return Err(
                "the server says neither how many blocks it has nor how long a sequence may be: \
                 GET /metrics must have vllm:cache_config_info and GET /v1/models max_model_len"
                    .to_owned(),
            );
        }
        Ok(card)
    }

    /// `host:port` of NIXL's handshakes.
    fn side_channel(&self) -> Option<String> {
        let address = self.shared.config.engine.side_channel.as_deref()?;
        let Some(port) = address.strip_prefix(':') else {
            return Some(address.to_owned());
        };
        let port = port.parse().ok()?;
        let own = SocketAddr::new(self.control.ip(), port);
        Some(advertised(self.advertise.as_deref(), own))
    }

    /// Host and port of SGLang's bootstrap server, as others reach it.
    fn bootstrap(&self) -> Option<(String, u16)> {
        let engine = &self.shared.config.engine;
        if engine.connector != Connector::Sglang {
            return None;
        }
        let host = match &self.advertise {
            Some(host) => host.clone(),
            None => self.control.ip().to_string(),
        };
        Some((host, engine.bootstrap_port.unwrap_or(BOOTSTRAP_PORT)))
    }

    /// The same as the daemon reaches it: prefill workers have one.
    fn bootstrap_server(&self) -> Option<Server> {
        let (_, port) = self.bootstrap()?;
        let config = &self.shared.config;
        let url = format!("http://{}:{port}", self.server.host());
        (config.role == Role::Prefill).then(|| Server::new(Arc::clone(&self.system.network), &url))
    }

    /// Asks until the server answers all questions, at most as long as it was given.
    async fn wait(
        &self,
        mut before: Option<&mut Process>,
    ) -> Result<(Told, Option<Handshake>), String> {
        let config = &self.shared.config;
        let begun = Instant::now();
        let patience = Duration::from_secs(config.engine.start_timeout_seconds);
        let mut said = begun;
        loop {
            let why = match self.ask(config).await {
                Ok(told) => return Ok(told),
                Err(Untold::Wrong(why)) => return Err(why),
                Err(Untold::NotYet(why)) => why,
                Err(Untold::Absent(why)) => {
                    self.shared.stopped();
                    if let Some(before) = &mut before {
                        before.gone = true;
                    }
                    why
                }
            };
            self.shared.absent(&why);
            if begun.elapsed() >= patience {
                return Err(format!(
                    "engine.startTimeoutSeconds: the server was not there after {} s: {why}: read its log, or give it longer",
                    patience.as_secs()
                ));
            }
            if said.elapsed() >= WORD {
                said = Instant::now();
                let waited = begun.elapsed().as_secs();
                tracing::info!(worker = %config.name, waited_seconds = waited, why, "waiting for the server");
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    async fn ask(&self, config: &WorkerConfig) -> Result<(Told, Option<Handshake>), Untold> {
        if config.engine.kind == EngineKind::Sglang {
            let bootstrap = self.bootstrap_server();
            let told = sglang::ask(&self.server, bootstrap.as_ref(), config).await?;
            return match told.metrics.blocks {
                Some(_) => Ok((told, None)),
                None => Err(Untold::NotYet(
                    "GET /server_info has no page_size or no max_total_num_tokens yet".to_owned(),
                )),
            };
        }
        let told = vllm::ask(&self.server, config).await?;
        if told.metrics.blocks.is_none() {
            return Err(Untold::NotYet(
                "GET /metrics has no vllm:cache_config_info yet".to_owned(),
            ));
        }
        if config.engine.connector != Connector::Nixl {
            return Ok((told, None));
        }
        let address = self.side_channel().unwrap_or_default();
        match nixl::handshake(&address).await {
            Ok(handshake) => Ok((told, Some(handshake))),
            Err(why) => Err(Untold::NotYet(format!(
                "engine.sideChannel: connector Nixl is declared, and its handshake failed: {why}: start the server with \
                 NixlConnector and with VLLM_NIXL_SIDE_CHANNEL_HOST and _PORT as declared"
            ))),
        }
    }

    async fn folder(&self) -> Result<Option<ModelFolder>, String> {
        let Some(ModelSource::Path(path)) = self.shared.config.model.source.clone() else {
            return Ok(None);
        };
        let read = self.system.threads.run(move || folder::read(&path)).await;
        match read {
            Ok(Ok(folder)) => Ok(Some(folder)),
            Ok(Err(error)) => Err(error.to_string()),
            Err(error) => Err(error.to_string()),
        }
    }

    /// Reports by the clock until the server is gone; why it is, and whether its process surely is.
    async fn poll(&self, life: &Life, mut reporter: Reporter) -> (String, bool) {
        let mut unread = Unread::of(&self.shared.config, Instant::now());
        let mut absent = 0;
        let mut silent = 0;
        let process = reporter.process_start();
        let mut checked = Instant::now();
        loop {
            let load = *life.load.borrow();
            let busy = load.running_sequences + load.queued_sequences > 0;
            tokio::time::sleep(if busy { BUSY } else { IDLE }).await;
            let reading = match self.reading(&mut checked).await {
                Ok(reading) => reading,
                Err(why) => {
                    if matches!(why, Unanswered::Absent(..)) {
                        absent += 1;
                    }
                    silent += 1;
                    if absent >= ABSENT || silent >= SILENT {
                        return (why.to_string(), absent > 0);
                    }
                    continue;
                }
            };
            (absent, silent) = (0, 0);
            if process != reading.process_start {
                return ("its process began anew".to_owned(), true);
            }
            let (cached, _, counts) = life.cache();
            let staging = life.staging.as_ref();
            let (leases, expired) = staging.map_or((0, 0), Staging::leases);
            let (failed, ended) = staging.map(Staging::given_up).unwrap_or_default();
            let unread = unread
                .as_mut()
                .map_or(0, |unread| unread.after(&reading, Instant::now()));
            let beside = Beside {
                leases: leases + unread,
                expired,
                failed,
                ended,
                staging: staging.map(Staging::counts).unwrap_or_default(),
                cached,
                counts,
                gaps: life.gaps.load(Ordering::Relaxed),
                draining: life.takes_none(),
            };
            let before = life.load.borrow().late_reads;
            let load = reporter.report(reading, beside);
            if load.late_reads > before {
                tracing::error!(
                    worker = %life.card.worker, late_reads = load.late_reads,
                    "KV was read after its lease had ended: some answer may be wrong"
                );
            }
            life.load.send_replace(load);
            let coefficients = reporter.coefficients();
            life.coefficients
                .send_if_modified(|before| std::mem::replace(before, coefficients) != coefficients);
            self.shared.metrics.take(life);
        }
    }

    /// The server's metrics, and now and then whether its engine is alive: a server may outlive it.
    async fn reading(&self, checked: &mut Instant) -> Result<Reading, Unanswered> {
        if checked.elapsed() >= IDLE {
            match self.shared.config.engine.kind {
                EngineKind::Sglang => sglang::health(&self.server).await?,
                _ => vllm::health(&self.server).await?,
            }
            *checked = Instant::now();
        }
        let answer = self.server.get("/metrics").await?;
        if !answer.is_ok() {
            let said = format!("status {}", answer.status);
            return Err(Unanswered::Broken("GET /metrics".to_owned(), said));
        }
        Ok(match self.shared.config.engine.kind {
            EngineKind::Sglang => Reading::sglang(&answer.text()),
            _ => Reading::vllm(&answer.text()),
        })
    }
}

async fn follow(life: &Life, sources: &[EventSource], engine: (EngineKind, &str)) -> &'static str {
    match sources {
        [source] => listen::follow(life, source, engine).await,
        _ => std::future::pending().await,
    }
}
