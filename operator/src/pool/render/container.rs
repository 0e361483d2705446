//! The container of a worker: what runs, with which devices, and how the kubelet looks after it.

use std::collections::BTreeMap;

use baton_crds::PoolSpec;
use baton_crds::pool::EnvironmentVariable;
use k8s_openapi::api::core::v1::{
    Capabilities, Container, ContainerPort, EnvVar, EnvVarSource, HTTPGetAction, Lifecycle,
    LifecycleHandler, ObjectFieldSelector, PodResourceClaim, Probe, ResourceClaim,
    ResourceRequirements, SecurityContext, VolumeMount,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use serde_json::{Map, Value};

use super::model::Mounted;
use super::{parsed, volumes};
use crate::pool::member::{CONTAINER, CONTROL_PORT};
use crate::pool::observed::Observed;
use crate::pool::refusal::Refusal;

const TRANSFER_PORT: i32 = 7001;
pub(super) const ADMIN_PORT: i32 = 7002;
const PROGRAM: &str = "/usr/local/bin/baton-worker";
/// Seconds between two probes of a worker that starts.
const STARTUP_PERIOD: i32 = 2;
/// Half an hour: large weights come over a network.
const STARTUP_PROBES: i32 = 900;

/// The worker with its engine in it.
pub(super) fn worker(
    observed: &Observed,
    model: &Mounted,
    drain_seconds: i64,
) -> Result<Container, Refusal> {
    let spec = &observed.pool.spec;
    let image = spec.engine.image.clone();
    let Some(image) = image.or_else(|| observed.settings.worker_image.clone()) else {
        return Err(Refusal::new(
            "NoImage",
            "spec.engine.image is not set and the operator has no --worker-image: set one of them",
        ));
    };
    let mut env = own_environment();
    add_authors(&mut env, spec)?;
    let mut container = daemon(image, env, volumes::mounts(spec, model)?);
    let args = container.args.get_or_insert_default();
    args.extend(spec.engine.args.iter().cloned());
    Ok(Container {
        resources: resources(spec)?,
        lifecycle: Some(drained_before_the_end(drain_seconds)),
        ..container
    })
}

/// What any worker's container is.
pub(super) fn daemon(image: String, env: Vec<EnvVar>, mounts: Vec<VolumeMount>) -> Container {
    Container {
        name: CONTAINER.to_owned(),
        image: Some(image),
        command: Some(vec![PROGRAM.to_owned()]),
        args: Some(vec!["serve".to_owned()]),
        env: Some(env),
        ports: Some(vec![
            port("control", i32::from(CONTROL_PORT)),
            port("transfer", TRANSFER_PORT),
            port("admin", ADMIN_PORT),
        ]),
        volume_mounts: Some(mounts),
        startup_probe: Some(probe(admin("/healthz"), STARTUP_PERIOD, STARTUP_PROBES)),
        readiness_probe: Some(probe(admin("/readyz"), 2, 3)),
        // A minute of silence: a processor that computes may be late, and a restart costs all that was cached.
        liveness_probe: Some(probe(admin("/healthz"), 10, 6)),
        // Last words of a worker that ends with an error are in its pod's status, and from there in the pool's.
        termination_message_policy: Some("FallbackToLogsOnError".to_owned()),
        security_context: Some(SecurityContext {
            allow_privilege_escalation: Some(false),
            read_only_root_filesystem: Some(true),
            capabilities: Some(Capabilities {
                drop: Some(vec!["ALL".to_owned()]),
                add: None,
            }),
            ..SecurityContext::default()
        }),
        ..Container::default()
    }
}

/// The kubelet tells the daemon to drain, and waits for it, before it ends the container that has this.
pub(super) fn drained_before_the_end(drain_seconds: i64) -> Lifecycle {
    Lifecycle {
        pre_stop: Some(LifecycleHandler {
            http_get: Some(admin(&format!("/drain?waitSeconds={drain_seconds}"))),
            ..LifecycleHandler::default()
        }),
        ..Lifecycle::default()
    }
}

pub(super) fn port(name: &str, port: i32) -> ContainerPort {
    ContainerPort {
        name: Some(name.to_owned()),
        container_port: port,
        ..ContainerPort::default()
    }
}

fn admin(path: &str) -> HTTPGetAction {
    HTTPGetAction {
        path: Some(path.to_owned()),
        port: IntOrString::String("admin".to_owned()),
        ..HTTPGetAction::default()
    }
}

pub(super) fn probe(what: HTTPGetAction, period: i32, failures: i32) -> Probe {
    Probe {
        http_get: Some(what),
        period_seconds: Some(period),
        failure_threshold: Some(failures),
        timeout_seconds: Some(5),
        ..Probe::default()
    }
}

pub(super) fn set(name: &str, value: &str) -> EnvVar {
    EnvVar {
        name: name.to_owned(),
        value: Some(value.to_owned()),
        value_from: None,
    }
}

/// The pod's address, which later variables and arguments may name as `$(POD_IP)`.
pub(super) fn pod_address() -> EnvVar {
    EnvVar {
        name: "POD_IP".to_owned(),
        value: None,
        value_from: Some(EnvVarSource {
            field_ref: Some(ObjectFieldSelector {
                field_path: "status.podIP".to_owned(),
                ..ObjectFieldSelector::default()
            }),
            ..EnvVarSource::default()
        }),
    }
}

/// What a worker is told.
pub(super) fn own_environment() -> Vec<EnvVar> {
    vec![
        pod_address(),
        set("BATON_CONFIG", volumes::CONFIGURATION_FILE),
        set("BATON_CONTROL", &format!("0.0.0.0:{CONTROL_PORT}")),
        set("BATON_TRANSFER", &format!("0.0.0.0:{TRANSFER_PORT}")),
        set("BATON_ADMIN", &format!("0.0.0.0:{ADMIN_PORT}")),
        set("BATON_ADVERTISE", "$(POD_IP)"),
        set("BATON_HASH_KEY_FILE", volumes::HASH_KEY_FILE),
    ]
}

/// Adds the author's variables, of which none may be one that is there.
pub(super) fn add_authors(all: &mut Vec<EnvVar>, spec: &PoolSpec) -> Result<(), Refusal> {
    let own = all.len();
    for (index, variable) in spec.engine.env.iter().enumerate() {
        if all[..own].iter().any(|set| set.name == variable.name) {
            let message = format!(
                "spec.engine.env[{index}].name is {}, which is Baton's own: leave it out",
                variable.name
            );
            return Err(Refusal::new("InvalidSpec", message));
        }
        all.push(authors(index, variable)?);
    }
    Ok(())
}

fn authors(index: usize, variable: &EnvironmentVariable) -> Result<EnvVar, Refusal> {
    let value_from = variable.value_from.as_ref().map(|source| {
        serde_json::from_value(source.clone()).map_err(|error| {
            let message =
                format!("spec.engine.env[{index}].valueFrom: {error}: write it as in a pod");
            Refusal::new("InvalidSpec", message)
        })
    });
    Ok(EnvVar {
        name: variable.name.clone(),
        value: variable.value.clone(),
        value_from: value_from.transpose()?,
    })
}

/// Requests and limits of devices are equal: Kubernetes has it no other way for extended resources.
pub(super) fn resources(spec: &PoolSpec) -> Result<Option<ResourceRequirements>, Refusal> {
    let mut requests = quantities("resources.requests", &spec.template.resources.requests)?;
    let mut limits = quantities("resources.limits", &spec.template.resources.limits)?;
    let accelerator = &spec.accelerator;
    let mut devices = vec![(accelerator.resource_name(), spec.accelerators())];
    if let Some(rdma) = &accelerator.rdma {
        devices.push((&rdma.resource_name, rdma.count));
    }
    for (name, count) in devices.into_iter().filter(|(_, count)| *count > 0) {
        for side in [&mut requests, &mut limits] {
            side.insert(name.to_owned(), Quantity(count.to_string()));
        }
    }
    let claims: Vec<ResourceClaim> = named_claims(spec)
        .map(|(name, _)| ResourceClaim {
            name,
            request: None,
        })
        .collect();
    if requests.is_empty() && limits.is_empty() && claims.is_empty() {
        return Ok(None);
    }
    let some = |map: BTreeMap<String, Quantity>| Some(map).filter(|map| !map.is_empty());
    Ok(Some(ResourceRequirements {
        requests: some(requests),
        limits: some(limits),
        claims: Some(claims).filter(|claims| !claims.is_empty()),
    }))
}

fn quantities(
    field: &str,
    map: &Map<String, Value>,
) -> Result<BTreeMap<String, Quantity>, Refusal> {
    map.iter()
        .map(|(name, value)| {
            let quantity = match value {
                Value::Number(number) => Quantity(number.to_string()),
                other => parsed(&format!("{field}.{name}"), other)?,
            };
            Ok((name.clone(), quantity))
        })
        .collect()
}

/// Name within the pod and template of each claim. A template's name may be longer than one within a pod.
fn named_claims(spec: &PoolSpec) -> impl Iterator<Item = (String, &String)> {
    let templates = spec.accelerator.resource_claim_templates.iter();
    templates
        .enumerate()
        .map(|(index, template)| (format!("claim-{index}"), template))
}

/// Claims of the pod, of which its container uses each.
pub(super) fn claims(spec: &PoolSpec) -> Option<Vec<PodResourceClaim>> {
    let claims: Vec<PodResourceClaim> = named_claims(spec)
        .map(|(name, template)| PodResourceClaim {
            name,
            resource_claim_template_name: Some(template.clone()),
            resource_claim_name: None,
        })
        .collect();
    Some(claims).filter(|claims| !claims.is_empty())
}
