//! Reads and writes the `Lease`, for as long as the process lives.

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use kube::api::PostParams;
use kube::{Api, Client};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::claim::Claim;
use super::election::{Decision, Election, Record, Timing};
use crate::cause::innermost;

/// One request; several fit into the time in which a holder has to renew.
const REQUEST_WITHIN: Duration = Duration::from_secs(5);

/// Which `Lease`, and by whom it is held.
#[derive(Clone, Debug)]
pub struct Place {
    pub namespace: String,
    pub name: String,
    /// Of this start of this process.
    pub identity: String,
}

#[derive(Debug, thiserror::Error)]
pub enum LeaseError {
    #[error(
        "lease {namespace}/{name} could not be renewed for {seconds} s: this process ends, so that only one leads; another or its own restart takes over"
    )]
    Lost {
        namespace: String,
        name: String,
        seconds: u64,
    },
}

#[derive(Debug, thiserror::Error)]
enum Fault {
    #[error("{}", innermost(.0))]
    Api(#[from] kube::Error),
    #[error("the API server did not answer within {} s", REQUEST_WITHIN.as_secs())]
    Late,
}

impl Fault {
    /// Somebody else was faster, which is what the check on the version is for.
    fn is_race(&self) -> bool {
        matches!(self, Self::Api(kube::Error::Api(status)) if status.code == 409)
    }
}

/// Acquires the lease as soon as it can be had, renews it, and gives it back when `stop` is called.
///
/// # Errors
/// The lease was held and could not be renewed: whoever leads now is somebody else.
pub async fn hold(
    client: Client,
    place: Place,
    timing: Timing,
    claim: Arc<Claim>,
    stop: CancellationToken,
) -> Result<(), LeaseError> {
    let mut holder = Holder {
        leases: Api::namespaced(client, &place.namespace),
        election: Election::new(place.identity.clone(), timing),
        place,
        claim,
        known: None,
        faulty: false,
    };
    while !stop.is_cancelled() {
        let pause = holder.step().await;
        let now = holder.claim.now();
        if holder.election.lost(now) {
            holder.claim.end();
            return Err(LeaseError::Lost {
                namespace: holder.place.namespace,
                name: holder.place.name,
                seconds: timing.give_up.as_secs(),
            });
        }
        tokio::select! {
            () = stop.cancelled() => {}
            () = tokio::time::sleep(pause) => {}
        }
    }
    holder.release().await;
    Ok(())
}

struct Holder {
    leases: Api<Lease>,
    election: Election,
    place: Place,
    claim: Arc<Claim>,
    /// The object as last read or written: its version makes a write conditional.
    known: Option<Lease>,
    /// The last request failed; said once.
    faulty: bool,
}

impl Holder {
    /// One look and, where due, one write. Returns how long to pause.
    async fn step(&mut self) -> Duration {
        let timing = self.election.timing();
        let decision = if self.known.is_some() && self.election.holds(self.claim.now()) {
            // As it was written last; should somebody have written since, the write is refused.
            Decision::Renew
        } else {
            match self.read().await {
                Ok(decision) => decision,
                Err(fault) => return self.failed("read", &fault),
            }
        };
        if decision == Decision::Wait {
            self.recovered();
            return timing.retry;
        }
        let record = self
            .election
            .record(decision, Timestamp::now().as_microsecond());
        let sent = self.claim.now();
        match self.write(&record).await {
            Ok(()) => {
                self.recovered();
                let first = self.election.held_until().is_none();
                self.election.written(record, sent);
                if let Some(until) = self.election.held_until() {
                    self.claim.extend(until);
                }
                if first {
                    info!(lease = %self.title(), identity = self.place.identity, "leading");
                }
                timing.renew
            }
            Err(fault) if fault.is_race() => timing.retry,
            Err(fault) => self.failed("write", &fault),
        }
    }

    async fn read(&mut self) -> Result<Decision, Fault> {
        let asked = self.claim.now();
        let found = within(self.leases.get_opt(&self.place.name)).await?;
        let record = found.as_ref().map(record_of);
        self.known = found;
        let now = self.claim.now();
        Ok(self.election.read(record.as_ref(), asked, now))
    }

    async fn write(&mut self, record: &Record) -> Result<(), Fault> {
        let parameters = PostParams::default();
        let written = match self.known.take() {
            None => {
                let lease = Lease {
                    metadata: ObjectMeta {
                        name: Some(self.place.name.clone()),
                        namespace: Some(self.place.namespace.clone()),
                        ..ObjectMeta::default()
                    },
                    spec: Some(spec_of(record, LeaseSpec::default())),
                };
                within(self.leases.create(&parameters, &lease)).await?
            }
            Some(mut lease) => {
                lease.spec = Some(spec_of(record, lease.spec.take().unwrap_or_default()));
                let name = &self.place.name;
                within(self.leases.replace(name, &parameters, &lease)).await?
            }
        };
        self.known = Some(written);
        Ok(())
    }

    /// Others need not wait for the lease to expire.
    async fn release(&mut self) {
        let held = self.election.holds(self.claim.now());
        self.claim.end();
        if !held {
            return;
        }
        let record = self.election.released(Timestamp::now().as_microsecond());
        match self.write(&record).await {
            Ok(()) => info!(lease = %self.title(), "lease released"),
            Err(error) => {
                warn!(lease = %self.title(), %error, "lease not released: others wait until it expires");
            }
        }
    }

    fn failed(&mut self, what: &str, error: &Fault) -> Duration {
        if !std::mem::replace(&mut self.faulty, true) {
            warn!(lease = %self.title(), what, %error, "lease not reachable, trying on: check the API server and the rights on leases of coordination.k8s.io");
        }
        self.election.timing().retry
    }

    fn recovered(&mut self) {
        if std::mem::take(&mut self.faulty) {
            info!(lease = %self.title(), "lease reachable again");
        }
    }

    fn title(&self) -> String {
        format!("{}/{}", self.place.namespace, self.place.name)
    }
}

async fn within<T>(request: impl Future<Output = kube::Result<T>>) -> Result<T, Fault> {
    match tokio::time::timeout(REQUEST_WITHIN, request).await {
        Ok(answer) => Ok(answer?),
        Err(_) => Err(Fault::Late),
    }
}

fn record_of(lease: &Lease) -> Record {
    let spec = lease.spec.clone().unwrap_or_default();
    let micros = |time: Option<MicroTime>| time.map_or(0, |time| time.0.as_microsecond());
    let seconds = spec.lease_duration_seconds.unwrap_or_default().max(0);
    Record {
        holder: spec.holder_identity.unwrap_or_default(),
        lease: Duration::from_secs(u64::from(seconds.unsigned_abs())),
        renewed: micros(spec.renew_time),
        acquired: micros(spec.acquire_time),
        transitions: spec.lease_transitions.unwrap_or_default(),
    }
}

fn spec_of(record: &Record, before: LeaseSpec) -> LeaseSpec {
    let time = |micros: i64| Timestamp::from_microsecond(micros).ok().map(MicroTime);
    LeaseSpec {
        holder_identity: Some(record.holder.clone()),
        lease_duration_seconds: i32::try_from(record.lease.as_secs()).ok(),
        renew_time: time(record.renewed),
        acquire_time: time(record.acquired),
        lease_transitions: Some(record.transitions),
        ..before
    }
}
