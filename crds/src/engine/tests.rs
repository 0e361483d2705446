//! The command lines, whole, as an engine's user would write them.

use serde_json::{Value, json};

use super::*;

const PORTS: EnginePorts = EnginePorts {
    http: 8200,
    events: 5557,
    replay: 5558,
    connector: 5600,
};

fn pool(engine: &Value, parallelism: &Value) -> PoolSpec {
    serde_json::from_value(json!({
        "model": {"name": "tiny", "source": {"hostPath": "/models/tiny"}},
        "engine": engine,
        "parallelism": parallelism,
        "kvPool": {"leaseSeconds": 7},
    }))
    .unwrap()
}

/// On a machine, as `baton up` starts it.
fn here(spec: &PoolSpec, role: PoolRole, weights: &Weights) -> EngineCommand {
    EngineStart {
        spec,
        role,
        weights,
        listen: "127.0.0.1",
        reached: "127.0.0.1",
        ports: PORTS,
        events: EventSockets::DaemonListens,
        connector: ConnectorFiles {
            socket: "/run/c.sock",
            package: "/opt/vllm",
        },
    }
    .command()
    .unwrap()
}

fn folder() -> Weights {
    Weights::Path("/models/tiny".into())
}

/// Arguments one a line, those in JSON by their fields in order.
fn lines(command: &EngineCommand) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for argument in &command.arguments {
        let argument = match serde_json::from_str::<Value>(argument) {
            Ok(Value::Object(fields)) => {
                let mut fields: Vec<_> = fields.into_iter().collect();
                fields.sort_by(|a, b| a.0.cmp(&b.0));
                let fields = fields
                    .iter()
                    .map(|(name, value)| format!("{name}: {value}"));
                fields.collect::<Vec<_>>().join(", ")
            }
            _ => argument.clone(),
        };
        match lines.last_mut() {
            Some(last)
                if last.starts_with("--") && !last.contains(' ') && !argument.starts_with("--") =>
            {
                last.push(' ');
                last.push_str(&argument);
            }
            _ => lines.push(argument),
        }
    }
    lines
}

#[test]
fn vllm_with_nixl_on_a_machine() {
    let engine = json!({"type": "VLLM", "blockSize": 32, "maxModelLength": 4096, "dtype": "BF16",
                        "kvCacheDtype": "F8E4M3", "quantization": "Awq",
                        "args": ["--enforce-eager", "--block-size", "64"]});
    let spec = pool(&engine, &json!({"tensor": 4, "pipeline": 2, "expert": 4}));
    let command = here(&spec, PoolRole::Prefill, &folder());
    assert_eq!(
        lines(&command),
        [
            "serve",
            "/models/tiny",
            "--host 127.0.0.1",
            "--port 8200",
            "--served-model-name tiny",
            "--block-size 32",
            "--max-model-len 4096",
            "--dtype bfloat16",
            "--kv-cache-dtype fp8_e4m3",
            "--quantization awq",
            "--tensor-parallel-size 4",
            "--pipeline-parallel-size 2",
            "--enable-expert-parallel",
            "--kv-transfer-config kv_connector: \"NixlConnector\", kv_connector_extra_config: {\"kv_lease_duration\":7}, kv_load_failure_policy: \"recompute\", kv_role: \"kv_producer\"",
            "--kv-events-config enable_kv_cache_events: true, endpoint: \"tcp://127.0.0.1:5557\", publisher: \"zmq\", \
             replay_endpoint: \"tcp://127.0.0.1:5558\", topic: \"kv@127.0.0.1:8200@tiny\"",
            "--enable-prompt-tokens-details",
            "--enforce-eager",
            "--block-size 64",
        ]
    );
    assert_eq!(
        command.environment,
        [
            ("VLLM_HOST_IP", "127.0.0.1".to_owned()),
            ("VLLM_NIXL_SIDE_CHANNEL_HOST", "127.0.0.1".to_owned()),
            ("VLLM_NIXL_SIDE_CHANNEL_PORT", "5600".to_owned()),
        ]
    );
}

#[test]
fn a_decode_server_consumes_and_what_is_left_out_is_the_engines_own() {
    let spec = pool(&json!({"type": "VLLM"}), &json!({}));
    let hub = Weights::Hub {
        name: "org/model".into(),
        revision: Some("main".into()),
    };
    let command = here(&spec, PoolRole::Decode, &hub);
    let lines = lines(&command);
    assert_eq!(
        lines[..6],
        [
            "serve",
            "org/model",
            "--revision main",
            "--host 127.0.0.1",
            "--port 8200",
            "--served-model-name tiny"
        ]
    );
    assert_eq!(lines[6], "--block-size 16");
    assert!(lines[7].starts_with("--kv-transfer-config "), "{lines:?}");
    assert!(lines[7].contains("kv_role: \"kv_consumer\""), "{lines:?}");
    assert_eq!(lines.len(), 10, "{lines:?}");
}

#[test]
fn vllm_with_batons_connector_imports_it_and_knows_the_daemons_socket() {
    let spec = pool(&json!({"type": "VLLM", "connector": "Baton"}), &json!({}));
    let command = here(&spec, PoolRole::Decode, &folder());
    assert!(
        lines(&command).contains(
            &"--kv-transfer-config kv_connector: \"BatonConnector\", kv_connector_extra_config: {\"socket\":\"/run/c.sock\"}, \
              kv_connector_module_path: \"baton_vllm.connector\", kv_load_failure_policy: \"recompute\", kv_role: \"kv_consumer\""
                .to_owned()
        ),
        "{command:?}"
    );
    assert_eq!(
        command.environment[1..],
        [("PYTHONPATH", "/opt/vllm".to_owned())]
    );
}

#[test]
fn a_server_that_hands_nothing_over_has_no_connector() {
    for kind in ["VLLM", "SGLang"] {
        let spec = pool(&json!({"type": kind, "connector": "None"}), &json!({}));
        let command = here(&spec, PoolRole::Decode, &folder());
        let text = command.arguments.join(" ");
        assert!(
            !text.contains("kv-transfer") && !text.contains("disaggregation"),
            "{text}"
        );
        assert!(text.contains("--kv-events-config"), "{text}");
        let side_channel = command
            .environment
            .iter()
            .any(|(name, _)| name.contains("NIXL"));
        assert!(!side_channel, "{command:?}");
    }
}

#[test]
fn sglang_in_a_pod() {
    let engine = json!({"type": "SGLang", "connector": "Nixl", "blockSize": 64, "maxModelLength": 8192, "dtype": "F16",
                        "kvCacheDtype": "F8E5M2", "quantization": "Fp8", "args": ["--mem-fraction-static", "0.8"]});
    let spec = pool(&engine, &json!({"tensor": 8, "expert": 2}));
    let weights = Weights::Path("/model".into());
    let start = |role| EngineStart {
        spec: &spec,
        role,
        weights: &weights,
        listen: "0.0.0.0",
        reached: "$(POD_IP)",
        ports: EnginePorts {
            http: 8000,
            connector: 8998,
            ..PORTS
        },
        events: EventSockets::EngineListens,
        connector: ConnectorFiles::default(),
    };
    let command = start(PoolRole::Prefill).command().unwrap();
    assert_eq!(
        lines(&command),
        [
            "-m",
            "sglang.launch_server",
            "--model-path /model",
            "--host 0.0.0.0",
            "--port 8000",
            "--served-model-name tiny",
            "--page-size 64",
            "--context-length 8192",
            "--dtype float16",
            "--kv-cache-dtype fp8_e5m2",
            "--quantization fp8",
            "--tp-size 8",
            "--ep-size 2",
            "--disaggregation-mode prefill",
            "--disaggregation-transfer-backend nixl",
            "--disaggregation-bootstrap-port 8998",
            "--kv-events-config endpoint: \"tcp://*:5557\", publisher: \"zmq\", replay_endpoint: \"tcp://*:5558\", topic: \"kv@$(POD_IP):8000@tiny\"",
            "--enable-metrics",
            "--enable-cache-report",
            "--mem-fraction-static 0.8",
        ]
    );
    let quiet = "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION";
    assert_eq!(command.environment, [(quiet, "0".to_owned())]);
    let decode = start(PoolRole::Decode).command().unwrap();
    assert!(lines(&decode).contains(&"--disaggregation-mode decode".to_owned()));
}

#[test]
fn engines_inside_the_worker_have_no_command_line() {
    for kind in ["Builtin", "Simulated"] {
        let spec = pool(&json!({"type": kind}), &json!({}));
        let start = EngineStart {
            spec: &spec,
            role: PoolRole::Decode,
            weights: &folder(),
            listen: "",
            reached: "",
            ports: PORTS,
            events: EventSockets::DaemonListens,
            connector: ConnectorFiles::default(),
        };
        assert_eq!(start.command(), None);
    }
}
