//! The life of one engine after another: two connections, one from each half of the plug-in, and what the engine hands over and takes.
//!
//! One loop acts on all that happens, and waits for nobody: reads and the renewals of their leases go on in it. What has to wait for
//! somebody at the other end of a connection, a stranger maybe, is a task of its own.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use baton_protocol::ids::RunId;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval, timeout};

use super::handing::Handings;
use super::message::{FromEngine, Half, Hello, ToEngine, VERSION};
use super::socket::{Caller, Listener, Peer};
use super::taking::{COMING, Takings};
use super::{Service, Worker};
use crate::kv::KvPool;
use crate::kv::lease::look_every;
use crate::transport::memory::Shape;
use crate::transport::memory::view::View;

/// Messages that were read and not acted on yet. Both halves together: beyond it they wait to be read.
const HEARD: usize = 256;
/// Connections that have not said hello: an engine opens two.
const GREETINGS: usize = 16;
/// For what is said when everything ends. Whoever stopped it waits some seconds.
const LEAVING: Duration = Duration::from_secs(1);
/// Why an engine is not served any longer.
const UNREAD: &str = "it does not read what it is told";

/// What happens.
enum Event {
    Hello(Caller, Hello, Option<OwnedFd>),
    /// It knows that it is served, or could not be told.
    Welcomed(u64, Half, io::Result<Caller>),
    /// Nothing: the connection has closed.
    Heard(u64, Half, Option<FromEngine>),
}

/// An engine that is served.
struct Life {
    /// Of this life; what is heard of an earlier one counts for nothing.
    number: u64,
    engine: String,
    /// All its leases are of this run, so that they end together.
    run: RunId,
    scheduler: Seat,
    worker: Seat,
    inbox: Option<View>,
    handings: Handings,
    takings: Takings,
}

/// One half of an engine.
enum Seat {
    Free,
    /// It is being welcomed.
    Taken,
    Here(Peer),
}

pub(super) async fn serve(listener: &Listener, service: Service) {
    let (events, mut happens) = mpsc::channel(HEARD);
    let mut greetings = JoinSet::new();
    let mut leaving = JoinSet::new();
    let mut life: Option<Life> = None;
    let mut lives = 0;
    let mut extending = interval(look_every(service.lease_milliseconds));
    extending.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut coming = interval(COMING);
    coming.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let told = async {
            match &mut life {
                Some(life) => life.takings.next(&service).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = service.stop.cancelled() => break,
            Some(_) = greetings.join_next() => {}
            Some(_) = leaving.join_next() => {}
            accepted = listener.accept(), if greetings.len() < GREETINGS => match accepted {
                Ok(caller) => {
                    let events = events.clone();
                    greetings.spawn(async move {
                        if let Some((caller, hello, file)) = caller.greeted().await {
                            // Nobody hears it only when everything ends.
                            let _ = events.send(Event::Hello(caller, hello, file)).await;
                        }
                    });
                }
                Err(error) => tracing::warn!(%error, "an engine could not connect"),
            },
            _ = extending.tick() => if let Some(life) = &mut life {
                life.handings.extend(&service);
                service.worker.changed();
            },
            _ = coming.tick() => if life.as_ref().is_some_and(|life| !life.advise()) {
                over(&mut life, UNREAD, &service, &mut leaving);
            },
            said = told => if let Some(said) = said
                && life.as_ref().is_some_and(|life| !life.say(Half::Worker, said))
            {
                // What it was told of would be held for it until its connection closes, and it may never do that.
                over(&mut life, UNREAD, &service, &mut leaving);
            },
            Some(event) = happens.recv() => match event {
                Event::Hello(caller, hello, file) => {
                    let inbox = match check(&service, &hello, file) {
                        Ok(inbox) => inbox,
                        Err(why) => {
                            tracing::warn!(%why, "an engine is not served");
                            // It learns it from the closed connection otherwise.
                            greetings.spawn(async move {
                                let _ = caller.refuse(why).await;
                            });
                            continue;
                        }
                    };
                    // Another life of the engine, or one half of it that lost its connection: what was begun cannot go on.
                    if let Some(over) = life.take_if(|life| !life.awaits(&hello)) {
                        over.end(&service, &mut leaving);
                    }
                    let life = life.get_or_insert_with(|| {
                        lives += 1;
                        Life::new(lives, &hello.engine)
                    });
                    *life.seat(hello.role) = Seat::Taken;
                    // At once: the other half may speak before what follows is heard of here.
                    life.inbox = inbox.or(life.inbox.take());
                    let (number, half) = (life.number, hello.role);
                    let (pool, events) = (service.pool.clone(), events.clone());
                    greetings.spawn(async move {
                        let welcomed = welcomed(&pool, caller, half).await;
                        let _ = events.send(Event::Welcomed(number, half, welcomed)).await;
                    });
                }
                Event::Welcomed(number, half, welcomed) => {
                    let Some(joined) = life.as_mut().filter(|life| life.number == number) else {
                        // Its connection closes: the life that it was to join is over.
                        continue;
                    };
                    match welcomed {
                        Ok(caller) => {
                            if joined.join(caller, half, &events) {
                                service.worker.engine_joined();
                            }
                        }
                        Err(why) => {
                            tracing::warn!(%why, "an engine is not served");
                            if let Some(ended) = life.take() {
                                ended.end(&service, &mut leaving);
                            }
                        }
                    }
                }
                Event::Heard(number, half, message) => {
                    if life.as_ref().is_none_or(|life| life.number != number) {
                        continue;
                    }
                    let going_on = match (message, &mut life) {
                        (Some(message), Some(life)) => life.heard(&service, half, message),
                        _ => Err("its connection has closed".to_owned()),
                    };
                    if let Err(why) = going_on {
                        over(&mut life, &why, &service, &mut leaving);
                    }
                }
            },
        }
    }
    if let Some(life) = life {
        life.end(&service, &mut leaving);
    }
    service
        .operations
        .nobody_comes("the daemon stops serving the engine");
    // Owners whose leases were read hear of it. An engine that keeps its connection open is not waited for any longer.
    let left = async { while leaving.join_next().await.is_some() {} };
    let _ = timeout(LEAVING, left).await;
}

fn over(life: &mut Option<Life>, why: &str, service: &Service, leaving: &mut JoinSet<()>) {
    if let Some(ended) = life.take() {
        tracing::warn!(engine = %ended.engine, why, "an engine is gone: its leases and cached blocks are dropped");
        ended.end(service, leaving);
    }
}

impl Life {
    fn new(number: u64, engine: &str) -> Self {
        Self {
            number,
            engine: engine.to_owned(),
            run: RunId::from(format!("engine {engine}, life {number}")),
            scheduler: Seat::Free,
            worker: Seat::Free,
            inbox: None,
            handings: Handings::default(),
            takings: Takings::default(),
        }
    }

    fn seat(&mut self, half: Half) -> &mut Seat {
        match half {
            Half::Scheduler => &mut self.scheduler,
            Half::Worker => &mut self.worker,
        }
    }

    /// Is this the other half of this engine?
    fn awaits(&self, hello: &Hello) -> bool {
        let seat = match hello.role {
            Half::Scheduler => &self.scheduler,
            Half::Worker => &self.worker,
        };
        self.engine == hello.engine && matches!(seat, Seat::Free)
    }

    /// Serves a half; says whether both are served now.
    fn join(&mut self, caller: Caller, half: Half, events: &mpsc::Sender<Event>) -> bool {
        let number = self.number;
        let event = move |message| Event::Heard(number, half, message);
        *self.seat(half) = Seat::Here(caller.serve(events.clone(), event));
        let both = matches!(
            (&self.scheduler, &self.worker),
            (Seat::Here(_), Seat::Here(_))
        );
        if both {
            tracing::info!(engine = %self.engine, "an engine hands its KV over through this worker");
        }
        both
    }

    /// Acts on a message.
    ///
    /// # Errors
    /// The engine is not served any longer, and why.
    fn heard(&mut self, service: &Service, half: Half, message: FromEngine) -> Result<(), String> {
        let said = match message {
            FromEngine::Hello(_) => return Err("it said hello twice".to_owned()),
            FromEngine::Open {
                request,
                tokens,
                salt,
                operation,
            } => {
                let operation = operation.as_deref();
                Some((half, self.open(service, request, tokens, &salt, operation)))
            }
            FromEngine::Publish {
                request,
                index,
                piece,
            } => {
                let inbox = self.inbox.as_ref();
                let copy = |target: &mut [u8]| inbox?.copy(piece, target, true).flatten();
                if let Err(why) = self.handings.publish(service, &request, index, copy) {
                    tracing::warn!(request, why, "a prompt is not handed over");
                }
                Some((half, ToEngine::Taken { piece }))
            }
            FromEngine::Seal { request } => {
                if let Err(why) = self.handings.seal(service, &request) {
                    tracing::warn!(request, why, "a prompt is not handed over");
                }
                None
            }
            FromEngine::Take {
                request,
                tokens,
                salt,
                descriptor,
            } => {
                let said = self
                    .takings
                    .begin(service, &request, tokens, &salt, descriptor);
                said.map(|said| (Half::Worker, said))
            }
            FromEngine::Collect { request } => {
                let said = self.takings.collect(request);
                said.map(|said| (Half::Worker, said))
            }
            FromEngine::Copied { request } => {
                self.takings.copied(&request);
                None
            }
            FromEngine::Cancel { request } => {
                self.handings.cancel(&request);
                let said = self.takings.cancel(&request);
                said.map(|said| (Half::Worker, said))
            }
            FromEngine::Reset => {
                for failed in self.reset(service) {
                    if !self.say(Half::Worker, failed) {
                        return Err(UNREAD.to_owned());
                    }
                }
                None
            }
        };
        service.worker.changed();
        if said.is_none_or(|(half, said)| self.say(half, said)) {
            Ok(())
        } else {
            Err(UNREAD.to_owned())
        }
    }

    /// Nothing that was computed before is handed over, taken or found again: leases that wait for their reader end too. What the
    /// engine hears of what it waits for.
    fn reset(&mut self, service: &Service) -> Vec<ToEngine> {
        self.handings.end_all("the engine has cleared its cache");
        service.pool.cancel_run(&self.run);
        let failed = self.takings.reset();
        service.pool.clear_cache();
        tracing::info!(engine = %self.engine, "the engine has cleared its cache: what it handed over and took is forgotten");
        failed
    }

    fn open(
        &mut self,
        service: &Service,
        request: String,
        tokens: Vec<u32>,
        salt: &str,
        operation: Option<&str>,
    ) -> ToEngine {
        let opened = if self.inbox.is_none() {
            Err("the engine's worker is not connected".to_owned())
        } else {
            let (run, name) = (&self.run, request.clone());
            self.handings
                .open(service, run, name, tokens, salt, operation)
        };
        match opened {
            Ok((first_block, descriptor)) => ToEngine::Opened {
                request,
                first_block,
                descriptor,
            },
            Err(why) => {
                tracing::warn!(request, why, "a prompt is not handed over");
                if let Some(operation) = operation {
                    service.operations.refused(operation, &why);
                }
                ToEngine::Refused {
                    request: Some(request),
                    why,
                }
            }
        }
    }

    fn say(&self, half: Half, message: ToEngine) -> bool {
        let seat = match half {
            Half::Scheduler => &self.scheduler,
            Half::Worker => &self.worker,
        };
        matches!(seat, Seat::Here(peer) if peer.say(message))
    }

    /// Tells the worker's half what is coming to it, unless it has much to read yet. False: it does not read any more.
    fn advise(&self) -> bool {
        match (&self.worker, self.takings.coming()) {
            (Seat::Here(peer), Some(coming)) => peer.advise(coming),
            _ => true,
        }
    }

    /// Ends all that is the engine's. Blocks that it may be copying are held until its connection is closed from its side.
    fn end(self, service: &Service, leaving: &mut JoinSet<()>) {
        let Self {
            run,
            scheduler,
            worker,
            mut handings,
            mut takings,
            ..
        } = self;
        let around: Arc<dyn Worker> = Arc::clone(&service.worker);
        // First: whoever asks from now on is not to wait for a request that will not come.
        around.engine_gone();
        let why = "the engine is gone";
        handings.end_all(why);
        service.operations.nobody_comes(why);
        service.pool.cancel_run(&run);
        service.pool.clear_cache();
        leaving.spawn(async move {
            drop(scheduler);
            let closed = async {
                if let Seat::Here(worker) = worker {
                    worker.closed().await;
                }
            };
            tokio::join!(closed, takings.abandon());
            drop(takings);
            around.changed();
        });
    }
}

/// Tells a half that it is served; the worker's half gets the arena's file.
async fn welcomed(pool: &KvPool, caller: Caller, half: Half) -> io::Result<Caller> {
    let arena = pool.store().arena();
    let file = match half {
        Half::Scheduler => None,
        Half::Worker => Some(arena.file().map_err(io::Error::other)?),
    };
    caller.welcome(arena.shape().pieces(), file).await
}

/// What is wrong with a hello; for a worker's half, its inbox.
fn check(service: &Service, hello: &Hello, file: Option<OwnedFd>) -> Result<Option<View>, String> {
    if hello.version != VERSION {
        return Err(format!(
            "the plug-in speaks version {} of the connector's protocol, this daemon {VERSION}: install the plug-in of this release",
            hello.version
        ));
    }
    if hello.role == Half::Scheduler {
        return Ok(None);
    }
    let (Some(layout), Some(pieces), Some(file)) = (&hello.layout, hello.inbox_pieces, file) else {
        return Err("a worker's hello has a layout, the inbox's pieces and its file".to_owned());
    };
    let ours = &service.layout;
    if layout != ours {
        return Err(format!(
            "the engine's blocks are {layout:?}, this worker was registered with {ours:?}: restart the worker"
        ));
    }
    let shape = Shape::new(pieces, layout.block_bytes).ok_or("an inbox has at least one piece")?;
    View::map(file, shape)
        .map(Some)
        .map_err(|error| error.to_string())
}
