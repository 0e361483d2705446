//! One operator process: everything built from its flags, and ended in order.
//!
//! Watches fill the caches from the start, so that a process that does not lead is ready to. Only the one that leads looks at objects
//! and writes. On SIGTERM it takes nothing new, ends the looks under way, gives the lease back, and ends with status 0.
//!
//! - [`flags`]: the command line. `tasks`: what must not end before the process does.

pub mod flags;
mod tasks;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::{Context as _, Result};
use baton_crds::{PoolRole, labels as names};
use baton_system::ending::Signals;
use baton_system::process::WrongInput;
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::core::{NamespaceResourceScope, PartialObjectMeta};
use kube::runtime::watcher;
use kube::{Api, Client, Resource};
use parking_lot::Mutex;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::info;

use crate::admin::{self, Admin};
use crate::controller::caches::{Caches, Fillers};
use crate::controller::context::Context;
use crate::controller::events::Events;
use crate::controller::reports::Reports;
use crate::controller::routers::Routers;
use crate::controller::triggers::Triggers;
use crate::controller::watches::{Process, follow};
use crate::controller::work::{Look, Work};
use crate::controller::writes::Writes;
use crate::controller::{policies, pools};
use crate::lease::{Claim, Place, Timing, hold};
use crate::metrics::Metrics;
use crate::objects::{Guarded, Pool, PoolKind, RoutePolicy};
use crate::random;
use crate::worker::Workers;
use flags::Flags;
use tasks::Tasks;

/// Looks under way when the process is told to end. A pod has 30 s to end unless it says otherwise; the lease is given back after.
const GRACE: Duration = Duration::from_secs(20);

/// How long one watch is asked for. A connection that is dead and says nothing is noticed 5 s later: until then its cache stands still.
const WATCH_SECONDS: u32 = 60;

/// Runs an operator until it is told to end by a signal.
///
/// # Errors
/// Flags are wrong, the API server's address is not known, a port is taken, or the lease is lost.
pub async fn run(flags: Flags) -> Result<()> {
    let settings = flags.settings().map_err(WrongInput)?;
    let client = Client::try_default().await.context(WrongInput(
        "no API server is known: run in a pod with a service account, or give KUBECONFIG".into(),
    ))?;
    let listener = admin::bind(flags.listen).await?;
    let place = Place {
        namespace: flags.lease_namespace(client.default_namespace()),
        name: flags.lease_name.clone(),
        // A process that restarts in its pod is another candidate: what its predecessor held, it does not.
        identity: format!("{}_{}", flags.identity(), random::hex::<4>()?),
    };

    let stop = CancellationToken::new();
    let metrics = Arc::new(Metrics::default());
    let admin = Arc::new(Admin {
        metrics: metrics.clone(),
        stopping: stop.clone(),
        ..Admin::default()
    });
    let claim = Arc::new(Claim::default());
    let (caches, fillers) = Caches::new();
    let triggers = Triggers {
        caches: caches.clone(),
        pools: Arc::new(Work::new("pool")),
        policies: Arc::new(Work::new("routepolicy")),
    };
    let context = Arc::new(Context {
        caches,
        writes: Writes::new(client.clone(), claim.clone(), metrics.clone()),
        events: Events::new(place.identity.clone()),
        metrics,
        settings,
        workers: Workers::default(),
        reports: Reports::default(),
        routers: Routers::default(),
        memory: Mutex::new(BTreeMap::new()),
        unreadable_policies: Mutex::new(BTreeMap::new()),
        start: Instant::now(),
    });
    info!(
        listen = %listener.local_addr()?, namespace = flags.namespace.as_deref().unwrap_or("(all)"), identity = place.identity,
        lease = %format!("{}/{}", place.namespace, place.name), worker_image = context.settings.worker_image, "operator started"
    );

    // Probes see the end: the port ends last.
    let served = CancellationToken::new();
    let mut tasks = Tasks::default();
    tasks.spawn(
        "the HTTP port",
        admin::serve(listener, admin.clone(), served.clone()),
    );
    let watching = CancellationToken::new();
    watch(
        &mut tasks, &client, &flags, fillers, &triggers, &context, &watching,
    );
    let mut leading = Tasks::default();
    leading.spawn(
        "the controllers",
        lead(
            context.clone(),
            triggers,
            admin,
            claim.clone(),
            stop.clone(),
        ),
    );
    // The lease is held until the looks under way have ended.
    let yielding = CancellationToken::new();
    let mut held = tokio::spawn(hold(
        client,
        place,
        Timing::default(),
        claim,
        yielding.clone(),
    ));

    let mut signals = Signals::listen().context("signals cannot be waited for")?;
    let ended = tokio::select! {
        signal = signals.next() => {
            info!(reason = signal.word(), "stopping: no new looks, those under way may end");
            None
        }
        // It ends by itself only when the lease is lost. Then nothing may be written any more, and nothing under way is waited for.
        lost = &mut held => {
            let lost = lost.context("the task of the lease has failed");
            Some(lost.and_then(|lost| Ok(lost?)))
        }
        // Nothing of this ends by itself, but by a fault of its own. Without it the process would lead and do nothing, or by a cache that
        // stands still; another one can take over.
        fault = tasks.failed() => Some(Err(fault)),
        fault = leading.failed() => Some(Err(fault)),
    };
    stop.cancel();
    if let Some(ended) = ended {
        return ended;
    }
    leading.all().await;
    yielding.cancel();
    held.await.context("the task of the lease has failed")??;
    watching.cancel();
    served.cancel();
    tasks.all().await;
    info!("stopped");
    Ok(())
}

/// Looks at objects while this process leads.
async fn lead(
    context: Arc<Context>,
    triggers: Triggers,
    admin: Arc<Admin>,
    claim: Arc<Claim>,
    stop: CancellationToken,
) {
    let begun = async {
        if context.caches.filled().await.is_err() {
            return false;
        }
        admin.ready.store(true, Ordering::Release);
        claim.begun().await;
        true
    };
    tokio::select! {
        () = stop.cancelled() => return,
        begun = begun => if !begun { return },
    }
    context.metrics.leading.set(1);
    triggers.all();
    let look_at_pool: Look<_> = {
        let context = context.clone();
        Arc::new(move |key| Box::pin(pools::look(context.clone(), key)))
    };
    let look_at_policy: Look<_> = {
        let context = context.clone();
        Arc::new(move |key| Box::pin(policies::look(context.clone(), key)))
    };
    let metrics = &context.metrics;
    tokio::join!(
        triggers
            .pools
            .run(look_at_pool, metrics, stop.clone(), GRACE),
        triggers
            .policies
            .run(look_at_policy, metrics, stop.clone(), GRACE),
    );
    context.metrics.leading.set(0);
}

/// Starts all watches.
fn watch(
    tasks: &mut Tasks,
    client: &Client,
    flags: &Flags,
    fillers: Fillers,
    triggers: &Triggers,
    context: &Context,
    stop: &CancellationToken,
) {
    let namespace = flags.namespace.as_deref();
    let any = watcher::Config::default().timeout(WATCH_SECONDS);
    let process = || Process {
        metrics: context.metrics.clone(),
        stop: stop.clone(),
    };

    for (role, kind, writer) in [
        (PoolRole::Prefill, "PrefillPool", fillers.prefill),
        (PoolRole::Decode, "DecodePool", fillers.decode),
    ] {
        let types = PoolKind(role);
        let api: Api<Guarded<Pool>> = match namespace {
            Some(namespace) => Api::namespaced_with(client.clone(), namespace, &types),
            None => Api::all_with(client.clone(), &types),
        };
        let told = triggers.clone();
        let watch = follow(
            kind,
            api,
            any.clone(),
            writer,
            types,
            process(),
            move |change| {
                told.pool(role, &change);
            },
        );
        tasks.spawn(kind, watch);
    }
    let api: Api<Guarded<RoutePolicy>> = scoped(client, namespace);
    let told = triggers.clone();
    let watch = follow(
        "RoutePolicy",
        api,
        any.clone(),
        fillers.policies,
        (),
        process(),
        move |change| {
            told.policy(&change);
        },
    );
    tasks.spawn("RoutePolicy", watch);

    let pods: Api<Pod> = scoped(client, namespace);
    let told = triggers.clone();
    let of_pools = any.clone().labels(names::POOL);
    let watch = follow(
        "Pod of a pool",
        pods.clone(),
        of_pools,
        fillers.workers,
        (),
        process(),
        move |change| {
            told.worker(&change);
        },
    );
    tasks.spawn("Pod of a pool", watch);
    let told = triggers.clone();
    let of_routers = any
        .clone()
        .labels(&format!("{}={}", names::APP_NAME, names::ROUTER_APP));
    let watch = follow(
        "Pod of a router",
        pods,
        of_routers,
        fillers.routers,
        (),
        process(),
        move |change| {
            told.router(&change);
        },
    );
    tasks.spawn("Pod of a router", watch);

    let nodes: Api<PartialObjectMeta<Node>> = Api::all(client.clone());
    let told = triggers.clone();
    let watch = follow(
        "Node",
        nodes,
        any.clone(),
        fillers.nodes,
        (),
        process(),
        move |change| {
            told.node(&change);
        },
    );
    tasks.spawn("Node", watch);

    let budgets: Api<PodDisruptionBudget> = scoped(client, namespace);
    let told = triggers.clone();
    let watch = follow(
        "PodDisruptionBudget",
        budgets,
        any,
        fillers.budgets,
        (),
        process(),
        move |change| {
            told.budget(&change);
        },
    );
    tasks.spawn("PodDisruptionBudget", watch);
}

fn scoped<K>(client: &Client, namespace: Option<&str>) -> Api<K>
where
    K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>,
{
    match namespace {
        Some(namespace) => Api::namespaced(client.clone(), namespace),
        None => Api::all(client.clone()),
    }
}
