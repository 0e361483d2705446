//! A pod whose engine is a server of its own: the server as the container `engine`, Baton's daemon beside it as a native sidecar.
//!
//! A sidecar is started before the server and ended after it. The server's `preStop` asks the daemon to drain and waits for it, so the
//! server goes on until its requests have ended, whoever ends the pod. The server's ports, and the name `http` of the one that serves
//! requests and metrics, are those that users of the engine know.

use std::collections::BTreeMap;

use baton_crds::PoolSpec;
use baton_crds::engine::{ConnectorFiles, EnginePorts, EventSockets};
use baton_crds::pool::{Connector, EngineType};
use baton_crds::worker_configuration::{ServerOfWorker, Weights};
use baton_crds::{EngineCommand, EngineStart};
use k8s_openapi::api::core::v1::{
    Capabilities, Container, HTTPGetAction, Lifecycle, LifecycleHandler, ResourceRequirements,
    SecurityContext,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

use super::container::{self, ADMIN_PORT};
use super::model::{self, Mounted};
use super::{USER, volumes};
use crate::pool::member::ENGINE;
use crate::pool::observed::Observed;
use crate::pool::refusal::Refusal;

/// The pod's own address, as Kubernetes puts it into arguments and variables.
const POD_ADDRESS: &str = "$(POD_IP)";
/// Seconds between two probes of a server that starts.
const STARTUP_PERIOD: i32 = 5;
/// How long a server may take: weights of hundreds of gigabytes come over a network, and kernels are compiled.
const STARTUP_SECONDS: i32 = 3600;
/// Memory of a daemon beside its staging arena.
const DAEMON_BYTES: i64 = 256 << 20;
/// What it is ended above: its index of a large cache, and a file of a tokenizer, come on top of what it needs at rest.
const MOST_DAEMON_BYTES: i64 = 1 << 30;

/// The ports that the engine's own documentation uses.
fn ports(kind: EngineType) -> EnginePorts {
    let sglang = kind == EngineType::SgLang;
    EnginePorts {
        http: if sglang { 30000 } else { 8000 },
        events: 5557,
        replay: 5558,
        connector: if sglang { 8998 } else { 5600 },
    }
}

fn socket() -> String {
    format!("{}/connector.sock", volumes::MEETING_DIRECTORY)
}

/// What the daemon is told of the server; `None` where there is none.
pub(super) fn described(spec: &PoolSpec) -> Option<ServerOfWorker> {
    let kind = spec.engine.engine_type;
    let ports = ports(kind);
    kind.is_server().then(|| ServerOfWorker {
        url: format!("http://127.0.0.1:{}", ports.http),
        connector_port: ports.connector,
        // It listens on the pod's address alone.
        connector_host: None,
        connector_socket: socket(),
        start_timeout_seconds: i64::from(STARTUP_SECONDS),
    })
}

/// The weights as the worker sees them: of a file in a server's image it sees nothing.
pub(super) fn weights_of_daemon(spec: &PoolSpec, model: Mounted) -> Option<Weights> {
    let sees = !spec.engine.engine_type.is_server() || model.shared;
    model.weights.filter(|_| sees)
}

/// The daemon beside the server.
pub(super) fn daemon(observed: &Observed, model: &Mounted) -> Result<Container, Refusal> {
    let Some(image) = observed.settings.worker_image.clone() else {
        return Err(Refusal::new(
            "NoImage",
            "the operator has no --worker-image, of which the daemon beside the engine would be: set it",
        ));
    };
    let mounts = volumes::mounts_of_daemon(model);
    let container = container::daemon(image, container::own_environment(), mounts);
    let security = container.security_context.clone().unwrap_or_default();
    let pool = &observed.pool.spec;
    let staging = pool.kv_pool.bytes;
    let memory = |daemon: i64| {
        let bytes = daemon.saturating_add(staging.unwrap_or_default());
        ("memory".to_owned(), Quantity(bytes.to_string()))
    };
    // A quota on limits asks each container for one. Of staging that is given in blocks, or not at all, nobody knows here what it takes.
    let is_bounded = staging.is_some() || pool.engine.connector() != Connector::Baton;
    Ok(Container {
        restart_policy: Some("Always".to_owned()),
        resources: Some(ResourceRequirements {
            requests: Some(BTreeMap::from([
                ("cpu".to_owned(), Quantity("100m".to_owned())),
                memory(DAEMON_BYTES),
            ])),
            limits: is_bounded.then(|| BTreeMap::from([memory(MOST_DAEMON_BYTES)])),
            ..ResourceRequirements::default()
        }),
        security_context: Some(SecurityContext {
            run_as_non_root: Some(true),
            run_as_user: Some(USER),
            run_as_group: Some(USER),
            ..security
        }),
        ..container
    })
}

/// The server.
pub(super) fn server(
    observed: &Observed,
    model: &Mounted,
    drain_seconds: i64,
) -> Result<Container, Refusal> {
    let pool = &observed.pool;
    let spec = &pool.spec;
    let kind = spec.engine.engine_type;
    let (program, example) = match kind {
        EngineType::SgLang => ("python3", "lmsysorg/sglang"),
        _ => ("vllm", "vllm/vllm-openai"),
    };
    let Some(image) = spec.engine.image.clone() else {
        let message = format!(
            "spec.engine.image is not set: give engine {} an image of a version, such as one of {example}",
            kind.word()
        );
        return Err(Refusal::new("NoImage", message));
    };
    let command = command(observed, model);
    let mut env = vec![container::pod_address()];
    let own = command.environment.iter();
    env.extend(own.map(|(name, value)| container::set(name, value)));
    container::add_authors(&mut env, spec)?;
    let ports = ports(kind);
    let health = |period: i32, failures: i32| {
        let what = HTTPGetAction {
            path: Some("/health".to_owned()),
            port: IntOrString::String("http".to_owned()),
            ..HTTPGetAction::default()
        };
        Some(container::probe(what, period, failures))
    };
    Ok(Container {
        name: ENGINE.to_owned(),
        image: Some(image),
        command: Some(vec![program.to_owned()]),
        args: Some(command.arguments),
        env: Some(env),
        ports: Some(vec![
            container::port("http", i32::from(ports.http)),
            container::port("kv-events", i32::from(ports.events)),
            container::port("kv-replay", i32::from(ports.replay)),
            container::port("connector", i32::from(ports.connector)),
        ]),
        resources: container::resources(spec)?,
        volume_mounts: Some(volumes::mounts_of_server(spec, model)?),
        startup_probe: health(STARTUP_PERIOD, STARTUP_SECONDS / STARTUP_PERIOD),
        readiness_probe: health(5, 3),
        // As patient as with a worker: a restart costs minutes and all that was cached.
        liveness_probe: health(10, 6),
        lifecycle: Some(Lifecycle {
            pre_stop: Some(LifecycleHandler {
                http_get: Some(HTTPGetAction {
                    path: Some(format!("/drain?waitSeconds={drain_seconds}")),
                    // The daemon's: a name would be looked for among the server's own ports.
                    port: IntOrString::Int(ADMIN_PORT),
                    ..HTTPGetAction::default()
                }),
                ..LifecycleHandler::default()
            }),
            ..Lifecycle::default()
        }),
        termination_message_policy: Some("FallbackToLogsOnError".to_owned()),
        security_context: Some(SecurityContext {
            allow_privilege_escalation: Some(false),
            // RDMA registers memory, which the kernel then must not move.
            capabilities: Some(Capabilities {
                add: spec
                    .accelerator
                    .rdma
                    .as_ref()
                    .map(|_| vec!["IPC_LOCK".to_owned()]),
                drop: Some(vec!["ALL".to_owned()]),
            }),
            ..SecurityContext::default()
        }),
        ..Container::default()
    })
}

fn command(observed: &Observed, model: &Mounted) -> EngineCommand {
    let pool = &observed.pool;
    // A pool without a source was refused before.
    let unknown = Weights::Path(model::DIRECTORY.into());
    let (socket, package) = (socket(), volumes::connector_package());
    let start = EngineStart {
        spec: &pool.spec,
        role: pool.role,
        weights: model.weights.as_ref().unwrap_or(&unknown),
        listen: "0.0.0.0",
        reached: POD_ADDRESS,
        ports: ports(pool.spec.engine.engine_type),
        events: EventSockets::EngineListens,
        connector: match pool.spec.engine.connector() {
            Connector::Baton => ConnectorFiles {
                socket: &socket,
                package: &package,
            },
            _ => ConnectorFiles::default(),
        },
    };
    start.command().unwrap_or_default()
}
