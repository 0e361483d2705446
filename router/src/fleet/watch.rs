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
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tonic::transport::{Channel, Endpoint};
use tracing::{info, warn};

use super::Workers;
use super::artifacts::ArtifactError;
use super::discovery::Listed;
use super::state::{Change, SILENCE};

const CONNECT_WITHIN: Duration = Duration::from_secs(2);
/// A peer that answers no ping is dead even if its kernel still holds the connection.
const PING_EVERY: Duration = Duration::from_secs(2);
const PING_WITHIN: Duration = Duration::from_secs(3);
const FIRST_BACK_OFF: Duration = Duration::from_millis(50);
/// A worker that comes back is seen within this.
const LONGEST_BACK_OFF: Duration = Duration::from_secs(1);
/// A prompt of 128 K tokens is half a megabyte.
const WINDOW: u32 = 4 << 20;

/// Keeps one task per listed worker until it is stopped; then all of them have ended.
pub async fn supervise(
    workers: Arc<Workers>,
    mut lists: watch::Receiver<Vec<Listed>>,
    network: Arc<dyn Network>,
    stop: CancellationToken,
) {
    let mut tasks = JoinSet::new();
    let mut followed: HashMap<WorkerId, (Listed, CancellationToken)> = HashMap::new();
    loop {
        let list = lists.borrow_and_update().clone();
        followed.retain(|id, (listed, token)| {
            let kept = list.contains(listed);
            if !kept {
                info!(worker = %id, "worker is no longer listed");
                token.cancel();
                workers.remove(id);
            }
            kept
        });
        for listed in list {
            if followed.contains_key(&listed.name) {
                continue;
            }
            match channel(&listed.control, &network) {
                Ok(channel) => {
                    let token = stop.child_token();
                    let client = WorkerClient::new(channel);
                    workers.add(&listed.name, client.clone());
                    followed.insert(listed.name.clone(), (listed.clone(), token.clone()));
                    tasks.spawn(follow(workers.clone(), listed.name, client, token));
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
            // Tasks end only when they are told to; this keeps the set small.
            Some(_) = tasks.join_next() => {}
        }
    }
    while tasks.join_next().await.is_some() {}
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
        Ok(Err(status)) => return ended(status_text(&status), false),
        Err(_) => return ended("it does not answer".to_owned(), false),
    };
    workers.connected(id);
    let mut useful = false;
    let mut fetch: Option<BoxFuture<'_, Result<(), ArtifactError>>> = None;
    loop {
        let event = tokio::select! {
            event = events.message() => event,
            fetched = async { match fetch.as_mut() {
                Some(fetch) => fetch.await,
                None => std::future::pending().await,
            } } => {
                fetch = None;
                match fetched {
                    Ok(()) => workers.learnt_more(),
                    Err(error) => {
                        workers.start_anew(id);
                        return ended(error.to_string(), false);
                    }
                }
                continue;
            }
        };
        match event {
            Ok(Some(event)) => match workers.apply(id, event) {
                Ok(change) => {
                    useful = true;
                    if let Change::Card(card) = change {
                        info!(worker = %id, incarnation = %card.incarnation, pool = card.pool, model = card.model.name, "worker registered");
                        for notice in &card.notices {
                            info!(worker = %id, notice);
                        }
                        fetch = Some(Box::pin(fetch_artifacts(workers, client.clone(), card)));
                    }
                }
                Err(error) => return ended(error.to_string(), useful),
            },
            Ok(None) => return ended("it closed the stream".to_owned(), useful),
            Err(status) => return ended(status_text(&status), useful),
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

/// A status with its cause: tonic's own text for a refused connection is only "transport error".
fn status_text(status: &tonic::Status) -> String {
    let mut text = status.message().to_owned();
    let mut cause = std::error::Error::source(status);
    while let Some(error) = cause {
        let next = error.to_string();
        if !text.contains(&next) {
            text = format!("{text}: {next}");
        }
        cause = error.source();
    }
    text
}
