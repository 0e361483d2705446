//! The pod of an engine that is a server of its own.

use baton_crds::PoolRole;
use serde_json::{Value, json};

use super::scene::{Scene, changed, observed};
use crate::pool::Observed;
use crate::pool::render::Rendered;

fn pool(change: &Value) -> Observed {
    let mut spec = changed(&json!({
        "model": {"source": {"uri": null, "persistentVolumeClaim": "models/tiny"}},
        "engine": {"type": "VLLM", "image": "vllm:1", "args": ["--enforce-eager"],
                   "env": [{"name": "UCX_TLS", "value": "tcp"}]},
    }));
    super::scene::lay_over(&mut spec, change);
    let mut observed = observed(&spec);
    observed.settings.worker_image = Some("worker:1".to_owned());
    observed
}

fn rendered(observed: &Observed) -> Value {
    let rendered = Rendered::of(observed).unwrap_or_else(|refusal| panic!("{refusal:?}"));
    serde_json::to_value(rendered.pod("chat-x-1")).unwrap()
}

fn pod(change: &Value) -> Value {
    rendered(&pool(change))
}

fn configuration(pod: &Value) -> Value {
    let text = &pod["metadata"]["annotations"]["serving.baton.dev/worker-config"];
    serde_json::from_str(text.as_str().unwrap()).unwrap()
}

fn named<'a>(list: &'a Value, name: &str) -> &'a Value {
    let found = list
        .as_array()
        .unwrap()
        .iter()
        .find(|one| one["name"] == name);
    found.unwrap_or(&Value::Null)
}

#[test]
fn the_server_is_the_container_and_the_daemon_a_sidecar_that_outlives_it() {
    let pod = pod(&json!({"rollout": {"drainTimeoutSeconds": 120}}));
    let spec = &pod["spec"];
    let names = |list: &Value| -> Vec<Value> {
        let list = list.as_array().unwrap().iter();
        list.map(|container| container["name"].clone()).collect()
    };
    assert_eq!(names(&spec["containers"]), ["engine"]);
    assert_eq!(names(&spec["initContainers"]), ["worker"]);
    let (engine, daemon) = (&spec["containers"][0], &spec["initContainers"][0]);
    assert_eq!(daemon["restartPolicy"], "Always");
    assert_eq!(
        (&daemon["image"], &engine["image"]),
        (&json!("worker:1"), &json!("vllm:1"))
    );
    assert_eq!(
        daemon["args"],
        json!(["serve"]),
        "the author's words are for the engine"
    );
    assert_eq!(named(&daemon["env"], "UCX_TLS"), &Value::Null);
    assert_eq!(
        named(&daemon["env"], "BATON_ADVERTISE")["value"],
        "$(POD_IP)"
    );
    // The sidecar has started once it is healthy, and only then is the server started: the two must not wait for each other.
    assert_eq!(daemon["startupProbe"]["httpGet"]["path"], "/healthz");
    assert_eq!(daemon["readinessProbe"]["httpGet"]["path"], "/readyz");
    assert_eq!(
        engine["lifecycle"]["preStop"]["httpGet"],
        json!({"path": "/drain?waitSeconds=120", "port": 7002}),
        "the daemon's port by its number: names are those of the same container"
    );
    assert_eq!(
        daemon["lifecycle"],
        Value::Null,
        "it ends after the server by itself"
    );
    assert_eq!(spec["terminationGracePeriodSeconds"], 150);
    assert_eq!(
        spec["readinessGates"],
        json!([{"conditionType": "serving.baton.dev/registered"}])
    );
}

#[test]
fn vllm_is_where_its_users_look_for_it() {
    let pod = pod(&json!({}));
    let engine = &pod["spec"]["containers"][0];
    assert_eq!(engine["command"], json!(["vllm"]));
    let args = engine["args"].as_array().unwrap();
    assert_eq!(
        args[..8],
        [
            "serve",
            "/model/tiny",
            "--host",
            "0.0.0.0",
            "--port",
            "8000",
            "--served-model-name",
            "tiny"
        ]
    );
    assert_eq!(args.last().unwrap(), "--enforce-eager");
    let after = |flag: &str| -> Value {
        let at = args.iter().position(|arg| arg == flag).unwrap();
        serde_json::from_str(args[at + 1].as_str().unwrap()).unwrap()
    };
    assert_eq!(after("--kv-transfer-config")["kv_role"], "kv_consumer");
    let events = after("--kv-events-config");
    assert_eq!(events["endpoint"], "tcp://*:5557");
    assert_eq!(events["topic"], "kv@$(POD_IP):8000@tiny");
    assert_eq!(
        engine["ports"],
        json!([
            {"name": "http", "containerPort": 8000},
            {"name": "kv-events", "containerPort": 5557},
            {"name": "kv-replay", "containerPort": 5558},
            {"name": "connector", "containerPort": 5600},
        ])
    );
    let env = engine["env"].as_array().unwrap();
    let order: Vec<&Value> = env.iter().map(|variable| &variable["name"]).collect();
    assert_eq!(
        order,
        [
            "POD_IP",
            "VLLM_HOST_IP",
            "VLLM_NIXL_SIDE_CHANNEL_HOST",
            "VLLM_NIXL_SIDE_CHANNEL_PORT",
            "UCX_TLS"
        ],
        "a variable is expanded from earlier ones"
    );
    assert_eq!(env[2]["value"], "$(POD_IP)");
    assert_eq!(
        engine["readinessProbe"]["httpGet"],
        json!({"path": "/health", "port": "http"})
    );
    let startup = &engine["startupProbe"];
    let seconds =
        startup["periodSeconds"].as_i64().unwrap() * startup["failureThreshold"].as_i64().unwrap();
    assert_eq!(seconds, 3600);
    assert_eq!(
        configuration(&pod)["engine"]["startTimeoutSeconds"],
        seconds,
        "the daemon waits as long"
    );
}

#[test]
fn the_daemon_is_told_what_it_is_beside() {
    let told = configuration(&pod(
        &json!({"engine": {"blockSize": 32, "dtype": "BF16"}, "parallelism": {"tensor": 2}}),
    ));
    assert_eq!(
        told["engine"],
        json!({
            "type": "VLLM", "url": "http://127.0.0.1:8000", "blockSize": 32, "dtype": "BF16", "kvCacheDtype": "Auto",
            "connector": "Nixl", "sideChannel": ":5600", "startTimeoutSeconds": 3600,
        })
    );
    assert_eq!(told["model"]["source"], json!({"path": "/model/tiny"}));
    assert_eq!(told["parallelism"]["tensor"], 2);
}

#[test]
fn both_see_the_model_and_meet_in_one_place() {
    let pod = pod(&json!({}));
    let spec = &pod["spec"];
    for container in [&spec["containers"][0], &spec["initContainers"][0]] {
        let model = named(&container["volumeMounts"], "model");
        assert_eq!(
            (&model["mountPath"], &model["readOnly"]),
            (&json!("/model"), &json!(true))
        );
        let meeting = named(&container["volumeMounts"], "baton-run");
        assert_eq!(
            (&meeting["mountPath"], &meeting["readOnly"]),
            (&json!("/run/baton"), &Value::Null)
        );
    }
    let memory = named(&spec["containers"][0]["volumeMounts"], "baton-shm");
    assert_eq!(memory["mountPath"], "/dev/shm");
    assert_eq!(
        named(&spec["volumes"], "baton-shm")["emptyDir"],
        json!({"medium": "Memory"})
    );
    assert_eq!(
        named(&spec["volumes"], "baton-image"),
        &Value::Null,
        "no connector of Baton's"
    );
    // What is the deployment's secret is not the engine's.
    assert_eq!(
        named(&spec["containers"][0]["volumeMounts"], "baton-hash-key"),
        &Value::Null
    );
}

#[test]
fn a_models_folder_is_on_the_node_in_an_image_in_the_engines_own_or_on_a_hub() {
    let of = |source: &Value| {
        let mut observed = pool(&json!({}));
        observed.pool.spec.model.source = serde_json::from_value(source.clone()).unwrap();
        let pod = rendered(&observed);
        let model = pod["spec"]["containers"][0]["args"][1].clone();
        let volume = named(&pod["spec"]["volumes"], "model").clone();
        (
            model,
            volume,
            configuration(&pod)["model"]["source"].clone(),
        )
    };
    assert_eq!(
        of(&json!({"hostPath": "/data/tiny"})),
        (
            json!("/model/tiny"),
            json!({"name": "model", "hostPath": {"path": "/data/tiny", "type": "Directory"}}),
            json!({"path": "/model/tiny"})
        )
    );
    assert_eq!(
        of(&json!({"image": "models/tiny:1"})),
        (
            json!("/model"),
            json!({"name": "model", "image": {"reference": "models/tiny:1"}}),
            json!({"path": "/model"})
        )
    );
    assert_eq!(
        of(&json!({"uri": "file:///weights"})),
        (json!("/weights"), Value::Null, Value::Null),
        "the daemon has another image"
    );
    assert_eq!(
        of(&json!({"uri": "hf://org/tiny"})),
        (json!("org/tiny"), Value::Null, Value::Null)
    );
}

#[test]
fn devices_are_the_servers() {
    let pod = pod(&json!({
        "parallelism": {"tensor": 4, "pipeline": 2},
        "accelerator": {"rdma": {"resourceName": "rdma/hca"}, "resourceClaimTemplates": ["nic"]},
        "template": {"resources": {"limits": {"memory": "64Gi"}}},
        "kvPool": {"leaseSeconds": 9},
    }));
    let (engine, daemon) = (
        &pod["spec"]["containers"][0],
        &pod["spec"]["initContainers"][0],
    );
    assert_eq!(
        engine["resources"],
        json!({
            "requests": {"nvidia.com/gpu": "8", "rdma/hca": "1"},
            "limits": {"memory": "64Gi", "nvidia.com/gpu": "8", "rdma/hca": "1"},
            "claims": [{"name": "claim-0"}],
        })
    );
    assert_eq!(
        engine["securityContext"]["capabilities"],
        json!({"add": ["IPC_LOCK"], "drop": ["ALL"]})
    );
    assert_eq!(
        daemon["resources"],
        json!({"requests": {"cpu": "100m", "memory": "268435456"}, "limits": {"memory": "1073741824"}})
    );
    assert_eq!(daemon["securityContext"]["runAsNonRoot"], true);
    assert_eq!(daemon["securityContext"]["readOnlyRootFilesystem"], true);
    assert_eq!(
        pod["spec"]["securityContext"],
        json!({"seccompProfile": {"type": "RuntimeDefault"}}),
        "an engine's image is run as it is"
    );
}

#[test]
fn with_batons_connector_the_engine_takes_it_out_of_the_workers_image() {
    let pod = pod(&json!({"engine": {"connector": "Baton"}, "kvPool": {"bytes": 1_073_741_824}}));
    let spec = &pod["spec"];
    let engine = &spec["containers"][0];
    assert_eq!(
        named(&spec["volumes"], "baton-image"),
        &json!({"name": "baton-image", "image": {"reference": "worker:1"}})
    );
    assert_eq!(
        named(&engine["volumeMounts"], "baton-image")["mountPath"],
        "/opt/baton"
    );
    assert_eq!(
        named(&engine["env"], "PYTHONPATH")["value"],
        "/opt/baton/usr/local/share/baton/vllm"
    );
    let socket = "/run/baton/connector.sock";
    assert_eq!(configuration(&pod)["engine"]["connectorSocket"], socket);
    assert!(engine["args"].to_string().contains(socket));
    assert_eq!(
        spec["initContainers"][0]["resources"]["requests"]["memory"],
        ((256 + 1024) << 20).to_string(),
        "what it stages is its own memory"
    );
}

#[test]
fn sglang_is_where_its_users_look_for_it() {
    let mut observed = pool(&json!({"engine": {"type": "SGLang", "image": "sglang:1"}}));
    observed.pool.role = PoolRole::Prefill;
    let pod = rendered(&observed);
    let engine = &pod["spec"]["containers"][0];
    assert_eq!(engine["command"], json!(["python3"]));
    let args = engine["args"].as_array().unwrap();
    assert_eq!(args[..2], ["-m", "sglang.launch_server"]);
    assert_eq!(
        engine["ports"][0],
        json!({"name": "http", "containerPort": 30000})
    );
    assert_eq!(
        engine["ports"][3],
        json!({"name": "connector", "containerPort": 8998})
    );
    let told = configuration(&pod);
    assert_eq!(told["engine"]["bootstrapPort"], 8998);
    assert_eq!(told["roles"], json!(["Prefill"]));
}

#[test]
fn a_server_without_its_image_is_refused() {
    let refused = |change: fn(&mut Observed)| {
        let mut observed = pool(&json!({}));
        change(&mut observed);
        let refusal = Rendered::of(&observed).unwrap_err();
        assert_eq!(refusal.reason, "NoImage");
        refusal.message
    };
    assert_eq!(
        refused(|observed| observed.pool.spec.engine.image = None),
        "spec.engine.image is not set: give engine VLLM an image of a version, such as one of vllm/vllm-openai"
    );
    assert!(refused(|observed| observed.settings.worker_image = None).contains("--worker-image"));
    let mut observed =
        pool(&json!({"template": {"volumeMounts": [{"name": "x", "mountPath": "/dev/shm"}]}}));
    assert_eq!(
        Rendered::of(&observed).unwrap_err().reason,
        "InvalidTemplate"
    );
    observed.pool.spec.template.volume_mounts.clear();
    assert!(Rendered::of(&observed).is_ok());
}

#[test]
fn time_to_drain_makes_no_revision_and_a_new_daemon_does() {
    let revision = |observed: &Observed| Rendered::of(observed).unwrap().revision;
    let usual = revision(&pool(&json!({})));
    assert_eq!(
        revision(&pool(&json!({"rollout": {"drainTimeoutSeconds": 9}}))),
        usual
    );
    let mut observed = pool(&json!({}));
    observed.settings.worker_image = Some("worker:2".to_owned());
    assert_ne!(revision(&observed), usual);
    assert_ne!(Scene::new(&json!({})).revision(), usual);
}

/// With it a pod passes the Pod Security Standard restricted.
#[test]
fn an_author_says_as_whom_an_engines_pod_runs() {
    let security =
        json!({"runAsNonRoot": true, "runAsUser": 1000, "runAsGroup": 1000, "fsGroup": 2000});
    let pod = pod(&json!({"template": {"securityContext": security}}));
    let mut expected = security;
    expected["seccompProfile"] = json!({"type": "RuntimeDefault"});
    assert_eq!(pod["spec"]["securityContext"], expected);
    let engine = &pod["spec"]["containers"][0]["securityContext"];
    assert_eq!(
        engine,
        &json!({"allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]}})
    );
    let daemon = &pod["spec"]["initContainers"][0]["securityContext"];
    assert_eq!(daemon["runAsUser"], 65532, "its image has its own user");
}

#[test]
fn a_daemons_memory_has_a_limit_where_it_is_known_what_it_stages() {
    let limits = |change: Value| {
        let pod = pod(&change);
        pod["spec"]["initContainers"][0]["resources"]["limits"].clone()
    };
    let staged = json!({"engine": {"connector": "Baton"}, "kvPool": {"bytes": 1_073_741_824}});
    assert_eq!(limits(staged), json!({"memory": (2_i64 << 30).to_string()}));
    let blocks = json!({"engine": {"connector": "Baton"}, "kvPool": {"blocks": 100}});
    assert_eq!(limits(blocks), Value::Null);
}
