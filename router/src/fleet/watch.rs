//! Following workers: one task per listed worker holds its Watch stream open, with back-off, until the worker is no longer listed.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use baton_protocol::card::Card;
use baton_protocol::ids::WorkerId;
use baton_protocol::wire::{self, worker_client::WorkerClient};
use baton_system::network::{Network, grpc};
use futures::future::BoxFuture;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;
use tonic::transport::{Channel, Endpoint};
use tracing::{info, warn};

use super::Workers;
use super::artifacts::ArtifactError;
use super::discovery::Listed;
use super::state::{Change, SILENCE};
use crate::causes::with_causes;

const CONNECT_WITHIN: Duration = Duration::from_secs(2);
/// A peer that answers no ping is dead even if its kernel still holds the connection.
const PING_EVERY: Duration = Duration::from_secs(2);
const PING_WITHIN: Duration = Duration::from_secs(3);
const FIRST_BACK_OFF: Duration = Duration::from_millis(50);
/// A worker that comes back is seen within this.
const LONGEST_BACK_OFF: Duration = Duration::from_secs(1);
/// A stream on which nothing has come for so long is dead, whatever its connection says: the worker is lost after a third of it
/// already, and may be heard again on a new one.
const DEAF_AFTER: Duration = Duration::from_secs(3 * SILENCE.as_secs());
/// Between two tries to fetch a tokenizer or template. A worker that cannot serve it now hardly can in a second.
const FIRST_FETCH_BACK_OFF: Duration = Duration::from_millis(500);
const LONGEST_FETCH_BACK_OFF: Duration = Duration::from_secs(30);
/// A prompt of 128 K tokens is half a megabyte.
const WINDOW: u32 = 4 << 20;

/// Keeps one task per listed worker until it is stopped; then all of them have ended.
pub async fn supervise(
    workers: Arc<Workers>,
    mut lists: watch::Receiver<Vec<Listed>>,
    network: Arc<dyn Network>,
    stop: CancellationToken,
) {
    let mut followed: HashMap<WorkerId, Followed> = HashMap::new();
    loop {
        let list = lists.borrow_and_update().clone();
        let stays = |followed: &Followed| list.iter().any(|listed| followed.is_at(listed));
        for (id, gone) in followed.extract_if(|_, followed| !stays(followed)) {
            info!(worker = %id, "worker is no longer listed");
            // First its task: what an old stream still brings must not be taken for that of a worker of the same name.
            gone.end().await;
            workers.remove(&id);
        }
        for listed in list {
            if let Some(known) = followed.get_mut(&listed.name) {
                if known.listed != listed {
                    workers.relist(&listed);
                    known.listed = listed;
                }
                continue;
            }
            match channel(&listed.control, &network) {
                Ok(channel) => {
                    let token = stop.child_token();
                    let client = WorkerClient::new(channel);
                    workers.add(&listed, client.clone());
                    let task = follow(workers.clone(), listed.name.clone(), client, token.clone());
                    let task = AbortOnDropHandle::new(tokio::spawn(task));
                    let name = listed.name.clone();
                    followed.insert(
                        name,
                        Followed {
                            listed,
                            stop: token,
                            task,
                        },
                    );
                }
                Err(error) => {
                    warn!(worker = %listed.name, control = listed.control, %error, "address is unusable");
                }
            }
        }
        tokio::select! {
            () = stop.cancelled() => break,
            changed = lists.changed() => if changed.is_err() {
                // Nobody will list anything else: what is followed stays followed.
                stop.cancelled().await;
                break;
            },
        }
    }
    for (_, followed) in followed {
        followed.end().await;
    }
}

/// A worker's entry, and the task that follows it.
struct Followed {
    listed: Listed,
    stop: CancellationToken,
    task: AbortOnDropHandle<()>,
}

impl Followed {
    /// The same worker at the same address, whatever else is said of it.
    fn is_at(&self, listed: &Listed) -> bool {
        self.listed.name == listed.name && self.listed.control == listed.control
    }

    /// When it returns, the task does nothing any more.
    async fn end(self) {
        self.stop.cancel();
        if let Err(error) = self.task.await {
            warn!(worker = %self.listed.name, %error, "the task that followed the worker has failed");
        }
    }
}

fn channel(control: &str, network: &Arc<dyn Network>) -> Result<Channel, tonic::transport::Error> {
    let endpoint = Endpoint::from_shared(format!("http://{control}"))?
        .connect_timeout(CONNECT_WITHIN)
        .http2_keep_alive_interval(PING_EVERY)
        .keep_alive_timeout(PING_WITHIN)
        .keep_alive_while_idle(true)
        .initial_stream_window_size(WINDOW)
        .initial_connection_window_size(4 * WINDOW);
    Ok(grpc::channel(Arc::clone(network), &endpoint))
}

async fn follow(
    workers: Arc<Workers>,
    id: WorkerId,
    client: WorkerClient<Channel>,
    stop: CancellationToken,
) {
    let mut back_off = FIRST_BACK_OFF;
    let mut said = String::new();
    loop {
        let ended = tokio::select! {
            () = stop.cancelled() => return,
            ended = follow_once(&workers, &id, client.clone()) => ended,
        };
        workers.disconnected(&id);
        if ended.useful {
            back_off = FIRST_BACK_OFF;
        }
        // The same complaint once, however often it is retried.
        if ended.reason != said {
            warn!(worker = %id, reason = ended.reason, "worker is not followed; trying again");
            said = ended.reason;
        }
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(back_off) => {}
        }
        back_off = (back_off * 2).min(LONGEST_BACK_OFF);
    }
}

/// Why one stream ended.
struct Ended {
    reason: String,
    /// Something was learnt from it: the worker lives.
    useful: bool,
}

async fn follow_once(workers: &Workers, id: &WorkerId, mut client: WorkerClient<Channel>) -> Ended {
    let ended = |reason: String, useful: bool| Ended { reason, useful };
    let resume = workers.resume(id);
    let request = wire::WatchRequest {
        incarnation: resume.map(|resume| resume.incarnation.0),
        sequence: resume.map(|resume| resume.sequence),
    };
    let mut events = match tokio::time::timeout(SILENCE, client.watch(request)).await {
        Ok(Ok(response)) => response.into_inner(),
        Ok(Err(status)) => return ended(with_causes(status.message(), &status), false),
        Err(_) => return ended("it does not answer".to_owned(), false),
    };
    workers.connected(id);
    let doubted = workers.doubted(id);
    let mut useful = false;
    let mut fetch: Option<BoxFuture<'_, Result<(), ArtifactError>>> = None;
    let mut fetched_again_in = FIRST_FETCH_BACK_OFF;
    let mut deaf_at = Instant::now() + DEAF_AFTER;
    let mut registered: Option<Arc<Card>> = None;
    loop {
        let event = tokio::select! {
            event = events.message() => event,
            fetched = async { match fetch.as_mut() {
                Some(fetch) => fetch.await,
                None => std::future::pending().await,
            } } => {
                let failed = fetched.err().map(|error| error.to_string());
                fetch = None;
                // The worker serves all the same where its artifacts are known from another one; it is not given up for them.
                if let (Some(error), Some(card)) = (&failed, &registered) {
                    warn!(worker = %id, error, again_in_seconds = fetched_again_in.as_secs_f64(), "an artifact cannot be fetched");
                    let again = fetch_artifacts(workers, client.clone(), card.clone());
                    fetch = Some(Box::pin(async move {
                        tokio::time::sleep(fetched_again_in).await;
                        again.await
                    }));
                    fetched_again_in = (2 * fetched_again_in).min(LONGEST_FETCH_BACK_OFF);
                }
                workers.complain_of(id, failed);
                continue;
            }
            () = doubted.notified() => {
                // Not useful: a card that is doubted again and again is read ever more rarely.
                return ended("it refuses what its card says: its card is read again".to_owned(), false);
            }
            () = tokio::time::sleep_until(deaf_at) => {
                return ended(format!("it said nothing for {} s", DEAF_AFTER.as_secs()), useful);
            }
        };
        deaf_at = Instant::now() + DEAF_AFTER;
        match event {
            Ok(Some(event)) => match workers.apply(id, event) {
                Ok(change) => {
                    useful = true;
                    if let Change::Card(card) = change {
                        info!(worker = %id, incarnation = %card.incarnation, pool = card.pool, model = card.model.name, "worker registered");
                        for notice in &card.notices {
                            info!(worker = %id, notice);
                        }
                        registered = Some(card.clone());
                        fetched_again_in = FIRST_FETCH_BACK_OFF;
                        fetch = Some(Box::pin(fetch_artifacts(workers, client.clone(), card)));
                    }
                }
                Err(error) => return ended(error.to_string(), useful),
            },
            Ok(None) => return ended("it closed the stream".to_owned(), useful),
            Err(status) => return ended(with_causes(status.message(), &status), useful),
        }
    }
}

async fn fetch_artifacts(
    workers: &Workers,
    client: WorkerClient<Channel>,
    card: Arc<Card>,
) -> Result<(), ArtifactError> {
    let filter = &card.route_filter;
    for digest in [filter.tokenizer.known(), filter.chat_template.known()]
        .into_iter()
        .flatten()
    {
        workers.artifacts.fetch(client.clone(), digest).await?;
    }
    Ok(())
}
