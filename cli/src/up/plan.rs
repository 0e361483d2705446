//! What `baton up` starts: a worker per replica, each with its configuration, and the policies. Pure.

use std::collections::BTreeMap;
use std::path::Path;

use baton_crds::pool::EngineType;
use baton_crds::resources::Metadata;
use baton_crds::{
    ModelLocation, Pool, PoolRole, Problem, Resources, ServerOfWorker, Weights, WorkerConfiguration,
};
use serde_json::{Value, json};

/// How long a worker that is told to end waits for what it runs, in seconds.
pub(crate) const DRAIN_SECONDS: u32 = 5;

/// One worker to start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct WorkerPlan {
    /// `POOL-N`
    pub(crate) name: String,
    pub(crate) role: PoolRole,
    /// Index into the resources' pools.
    pub(crate) pool: usize,
    /// Its number in the pool.
    pub(crate) replica: usize,
    /// Where its model is from; none for a simulated worker.
    pub(crate) location: Option<ModelLocation>,
}

/// Workers of all pools, prefill first, in the order of the resources.
///
/// # Errors
/// What the resources say and this machine cannot do.
pub(crate) fn workers(resources: &Resources) -> Result<Vec<WorkerPlan>, Vec<Problem>> {
    let mut problems = Vec::new();
    let mut workers = Vec::new();
    let namespace = namespace(resources);
    let mut names = BTreeMap::new();
    for (index, pool) in resources.pools.iter().enumerate() {
        let mut wrong = |path: &str, message: String| {
            problems.push(pool.origin.problem(pool.title(), path, message));
        };
        if let Some(problem) = elsewhere(&pool.metadata, namespace) {
            wrong("metadata.namespace", problem);
            continue;
        }
        if let Some(other) = names.insert(pool.metadata.name.as_str(), pool.role)
            && other != pool.role
        {
            wrong(
                "metadata.name",
                format!(
                    "{} has this name too, their workers would be named alike: rename one",
                    other.kind()
                ),
            );
        }
        let location = match (
            pool.spec.engine.engine_type,
            pool.spec.model.source.location(),
        ) {
            (EngineType::Simulated, _) => None,
            (_, Ok(ModelLocation::Cluster)) => {
                wrong(
                    "spec.model.source",
                    "an image or a claim can only be mounted by a cluster: give hostPath or uri"
                        .to_owned(),
                );
                None
            }
            (_, Ok(location)) => Some(location),
            (_, Err(error)) => {
                wrong("spec.model.source", error.to_string());
                None
            }
        };
        for (variable, given) in pool.spec.engine.env.iter().enumerate() {
            if given.value_from.is_some() {
                wrong(
                    &format!("spec.engine.env[{variable}].valueFrom"),
                    "only a cluster has such values: give value".to_owned(),
                );
            }
        }
        for replica in 0..pool.spec.replicas {
            let name = format!("{}-{replica}", pool.metadata.name);
            workers.push(WorkerPlan {
                name,
                role: pool.role,
                pool: index,
                replica: usize::try_from(replica).unwrap_or_default(),
                location: location.clone(),
            });
        }
    }
    // Stable: within a role, the order of the resources.
    workers.sort_by_key(|worker| worker.role);
    for policy in &resources.policies {
        if let Some(problem) = elsewhere(&policy.metadata, namespace) {
            let path = "metadata.namespace";
            problems.push(policy.origin.problem(policy.title(), path, problem));
            continue;
        }
        let serves = |role| {
            policy
                .pools(role, resources)
                .iter()
                .any(|pool: &&Pool| pool.spec.replicas > 0)
        };
        if !serves(PoolRole::Decode) {
            let message = "all of these pools have replicas 0: nothing could decode".to_owned();
            problems.push(
                policy
                    .origin
                    .problem(policy.title(), "spec.decodePools", message),
            );
        }
    }
    if problems.is_empty() {
        Ok(workers)
    } else {
        Err(problems)
    }
}

/// The one namespace that is served: the first policy's, since nothing is served without a policy.
fn namespace(resources: &Resources) -> &str {
    let first = resources.policies.first().map(|policy| &policy.metadata);
    let first = first.or_else(|| resources.pools.first().map(|pool| &pool.metadata));
    first.map_or("default", |metadata| metadata.namespace.as_str())
}

fn elsewhere(metadata: &Metadata, namespace: &str) -> Option<String> {
    (metadata.namespace != namespace).then(|| {
        format!(
            "baton up serves one namespace, found {} beside {namespace}: use one",
            metadata.namespace
        )
    })
}

/// The worker's configuration file, as `baton-worker serve --config` reads it.
pub(crate) fn worker_configuration(
    worker: &WorkerPlan,
    resources: &Resources,
    weights: Option<&Weights>,
    server: Option<&ServerOfWorker>,
) -> Value {
    let pool = &resources.pools[worker.pool];
    let mut topology: Vec<_> = pool.spec.topology.path().collect();
    if topology.is_empty() {
        // All that is started here runs here.
        topology.push(("host", "localhost"));
    }
    let configuration = WorkerConfiguration {
        spec: &pool.spec,
        role: worker.role,
        name: &worker.name,
        pool: &pool.metadata.name,
        revision: None,
        weights,
        server,
        topology,
        tpot_objective_milliseconds: tpot_objective(pool, resources),
        drain_seconds: i64::from(DRAIN_SECONDS),
    };
    configuration.to_json()
}

/// The tightest objective of the policies that use the pool: the worker bounds its mixed steps by it.
fn tpot_objective(pool: &Pool, resources: &Resources) -> Option<i64> {
    resources
        .policies
        .iter()
        .filter(|policy| {
            policy
                .pools(pool.role, resources)
                .iter()
                .any(|other| std::ptr::eq(*other, pool))
        })
        .filter_map(|policy| policy.spec.objective.tpot_milliseconds)
        .min()
}

/// The router's list of workers: `[{"name", "control"}]`.
pub(crate) fn workers_file<'a>(
    workers: impl IntoIterator<Item = (&'a str, std::net::SocketAddr)>,
) -> Value {
    workers
        .into_iter()
        .map(|(name, control)| json!({ "name": name, "control": control }))
        .collect()
}

/// The models that have to be on this machine, each once, with the first pool that needs it.
pub(crate) fn locations(workers: &[WorkerPlan]) -> Vec<(ModelLocation, usize)> {
    let mut locations: Vec<(ModelLocation, usize)> = Vec::new();
    for worker in workers {
        if let Some(location) = &worker.location
            && !locations.iter().any(|(known, _)| known == location)
        {
            locations.push((location.clone(), worker.pool));
        }
    }
    locations
}

/// Where a process's files are in the state directory.
pub(crate) fn configuration_file(state_dir: &Path, name: &str) -> std::path::PathBuf {
    state_dir.join("configuration").join(format!("{name}.json"))
}

#[cfg(test)]
mod tests {
    use baton_crds::read_fleet;

    use super::*;

    fn resources(prefill: &str, decode: &str) -> Resources {
        let text = format!(
            "apiVersion: serving.baton.dev/v1alpha1\nkind: DecodePool\nmetadata: {{name: decode}}\nspec:\n  replicas: 2\n  model: {{name: m, source: {{{decode}}}}}\n  engine: {{type: Builtin}}\n---\n\
             apiVersion: serving.baton.dev/v1alpha1\nkind: PrefillPool\nmetadata: {{name: prefill}}\nspec:\n  model: {{name: m, source: {{uri: \"builtin://tiny?seed=7\"}}}}\n{prefill}\n---\n\
             apiVersion: serving.baton.dev/v1alpha1\nkind: RoutePolicy\nmetadata: {{name: m}}\nspec: {{model: m, prefillPools: [{{name: prefill}}], decodePools: [{{name: decode}}], objective: {{tpotMilliseconds: 60}}}}\n"
        );
        match read_fleet([("f.yaml", text.as_str())]) {
            Ok(resources) => resources,
            Err(problems) => panic!("{problems:#?}"),
        }
    }

    #[test]
    fn a_worker_per_replica_prefill_first() {
        let resources = resources(
            "  engine: {type: Builtin}",
            "uri: \"builtin://tiny?seed=7\"",
        );
        let workers = workers(&resources).unwrap();
        let names: Vec<&str> = workers.iter().map(|worker| worker.name.as_str()).collect();
        assert_eq!(names, ["prefill-0", "decode-0", "decode-1"]);
        assert_eq!(locations(&workers), [(ModelLocation::Tiny { seed: 7 }, 1)]);
    }

    #[test]
    fn the_configuration_says_what_the_pool_says() {
        let resources = resources(
            "  engine: {type: Builtin, blockSize: 32, maxModelLength: 512}\n  kvPool: {blocks: 99, leaseSeconds: 3, transports: [Tcp]}\n  topology: {domain: {rack: r, host: h}}",
            "uri: \"builtin://tiny?seed=7\"",
        );
        let workers = workers(&resources).unwrap();
        let configuration = worker_configuration(
            &workers[0],
            &resources,
            Some(&Weights::Tiny { seed: 7 }),
            None,
        );
        assert_eq!(
            configuration,
            json!({
                "name": "prefill-0", "pool": "prefill", "role": "Prefill",
                "model": {"name": "m", "revision": "", "source": {"builtin": {"name": "tiny", "seed": 7}}},
                "engine": {"type": "Builtin", "blockSize": 32, "maxModelLength": 512},
                "kvPool": {"blocks": 99, "leaseSeconds": 3, "transports": ["Tcp"]},
                "topology": [{"level": "host", "domain": "h"}, {"level": "rack", "domain": "r"}],
                "drainTimeoutSeconds": DRAIN_SECONDS, "tpotObjectiveMilliseconds": 60,
            })
        );
    }

    #[test]
    fn workers_that_are_told_no_place_share_this_host() {
        let resources = resources(
            "  engine: {type: Builtin}",
            "uri: \"builtin://tiny?seed=7\"",
        );
        let workers = workers(&resources).unwrap();
        for worker in &workers {
            let configuration =
                worker_configuration(worker, &resources, Some(&Weights::Tiny { seed: 7 }), None);
            assert_eq!(
                configuration["topology"],
                json!([{"level": "host", "domain": "localhost"}])
            );
        }
    }

    #[test]
    fn simulated_workers_of_a_pool_differ_in_noise_and_need_no_weights() {
        let resources = resources(
            "  replicas: 2\n  engine: {type: Simulated, simulated: {prefillBaseMicroseconds: 7}}",
            "uri: \"builtin://tiny?seed=7\"",
        );
        let workers = workers(&resources).unwrap();
        assert_eq!(workers[0].location, None);
        let timing = |worker| {
            worker_configuration(worker, &resources, None, None)["engine"]["simulated"].clone()
        };
        assert_eq!(timing(&workers[0])["prefillBaseMicroseconds"], 7);
        assert_ne!(timing(&workers[0])["seed"], timing(&workers[1])["seed"]);
        assert_eq!(timing(&workers[0]), timing(&workers[0]));
    }

    #[test]
    fn each_object_of_another_namespace_is_named_once() {
        let object = |kind: &str, name: &str, namespace: &str, spec: &str| {
            format!(
                "apiVersion: serving.baton.dev/v1alpha1\nkind: {kind}\nmetadata: {{name: {name}, namespace: {namespace}}}\nspec: {spec}\n---\n"
            )
        };
        let pool = "{model: {name: m, source: {uri: \"builtin://tiny\"}}, engine: {type: Builtin}}";
        let policy = "{model: m, decodePools: [{name: d}]}";
        let text = [
            object("DecodePool", "d", "two", pool),
            object("DecodePool", "d", "one", pool),
            object("PrefillPool", "d", "two", pool),
            object("RoutePolicy", "p", "one", policy),
            object("RoutePolicy", "q", "two", policy),
        ]
        .concat();
        let resources = read_fleet([("f.yaml", text.as_str())]).unwrap();
        let problems: Vec<String> = workers(&resources)
            .unwrap_err()
            .iter()
            .map(ToString::to_string)
            .collect();
        let problem =
            "metadata.namespace: baton up serves one namespace, found two beside one: use one";
        assert_eq!(
            problems,
            [
                format!("f.yaml:3: DecodePool d: {problem}"),
                format!("f.yaml:13: PrefillPool d: {problem}"),
                format!("f.yaml:23: RoutePolicy q: {problem}"),
            ]
        );
    }

    #[test]
    fn a_value_of_a_cluster_is_a_problem_here() {
        let resources = resources(
            "  engine: {type: Builtin, env: [{name: A, value: b}, {name: TOKEN, valueFrom: {secretKeyRef: {name: s, key: k}}}]}",
            "uri: \"builtin://tiny?seed=7\"",
        );
        let problems = workers(&resources).unwrap_err();
        assert_eq!(
            problems[0].to_string(),
            "f.yaml:14: PrefillPool prefill: spec.engine.env[1].valueFrom: only a cluster has such values: give value"
        );
        assert_eq!(problems.len(), 1);
    }

    #[test]
    fn what_only_a_cluster_can_mount_is_a_problem_here() {
        let resources = resources(
            "  engine: {type: Builtin}",
            "persistentVolumeClaim: weights",
        );
        let problems = workers(&resources).unwrap_err();
        assert_eq!(
            problems[0].to_string(),
            "f.yaml:6: DecodePool decode: spec.model.source: an image or a claim can only be mounted by a cluster: give hostPath or uri"
        );
    }
}
