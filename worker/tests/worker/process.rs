//! The process: how it starts, what it says when it cannot, and how it ends.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use serde_json::{Value, json};
use tempfile::TempDir;

fn configuration() -> Value {
    json!({
        "name": "w", "pool": "pool", "role": "Decode",
        "model": {"name": "tiny", "source": {"builtin": {"name": "tiny", "seed": 7}}},
        "engine": {"type": "Builtin"},
        "kvPool": {"blocks": 64, "transports": ["Tcp"]},
    })
}

fn write(folder: &TempDir, configuration: &Value) -> PathBuf {
    let file = folder.path().join("worker.json");
    std::fs::write(&file, configuration.to_string()).unwrap();
    file
}

fn command(config: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_baton-worker"));
    command.arg("serve").arg("--config").arg(config);
    for flag in ["--control", "--transfer", "--admin"] {
        command.arg(flag).arg("127.0.0.1:0");
    }
    command.stdin(Stdio::null());
    command
}

fn fails(command: &mut Command) -> (i32, String) {
    let Output { status, stderr, .. } = command.env("RUST_LOG", "off").output().unwrap();
    let text = String::from_utf8(stderr).unwrap();
    assert_eq!(text.trim_end().lines().count(), 1, "one line: {text}");
    let parts: Vec<&str> = text.trim_end().split(": ").collect();
    for (at, part) in parts.iter().enumerate() {
        assert!(!parts[..at].contains(part), "{part} is said twice: {text}");
    }
    (status.code().unwrap(), text)
}

#[test]
fn each_mistake_is_one_line_that_names_it_and_a_status() {
    let folder = TempDir::new().unwrap();
    let corrupt = folder.path().join("corrupt.gguf");
    std::fs::write(&corrupt, b"GGUF\x03\0\0\0 and then nothing of the kind").unwrap();
    let missing = folder.path().join("missing.gguf");
    let cases = [
        (
            "/engine",
            json!({"type": "Builtin", "blocksize": 16}),
            2,
            "unknown field `blocksize`",
        ),
        (
            "/engine",
            json!({"type": "Builtin", "blockSize": 24}),
            2,
            "engine.blockSize: 24",
        ),
        ("/model/source", json!({"path": missing}), 1, "missing.gguf"),
        ("/model/source", json!({"path": corrupt}), 1, "corrupt.gguf"),
        (
            "/kvPool",
            json!({"blocks": 3}),
            1,
            "kvPool.blocks: 3 blocks",
        ),
        (
            "/kvPool",
            json!({"bytes": 100}),
            1,
            "kvPool.bytes: 0 blocks",
        ),
        (
            "/kvPool",
            json!({"blocks": 4_000_000_000_u64}),
            1,
            "memory are available",
        ),
        (
            "/kvPool",
            json!({"blocks": 64, "transports": ["Local"]}),
            1,
            "kvPool.transports",
        ),
    ];
    for (pointer, value, status, says) in cases {
        let mut changed = configuration();
        *changed.pointer_mut(pointer).unwrap() = value;
        let (code, text) = fails(&mut command(&write(&folder, &changed)));
        assert!(text.contains(says), "{pointer}: {text}");
        assert_eq!(code, status, "{text}");
    }
    let (code, text) = fails(&mut command(&folder.path().join("nowhere.json")));
    assert!(text.contains("nowhere.json") && code == 2, "{text}");
    let key = folder.path().join("key");
    std::fs::write(&key, "not a key").unwrap();
    let (code, text) = fails(
        command(&write(&folder, &configuration()))
            .arg("--hash-key-file")
            .arg(&key),
    );
    assert!(
        text.contains("64 hexadecimal digits") && code == 2,
        "{text}"
    );
}

#[test]
fn a_port_in_use_is_named_with_its_flag() {
    let folder = TempDir::new().unwrap();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let config = write(&folder, &configuration());
    for flag in ["--control", "--transfer", "--admin"] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_baton-worker"));
        command.arg("serve").arg("--config").arg(&config);
        for other in ["--control", "--transfer", "--admin"] {
            let free = "127.0.0.1:0".to_owned();
            command
                .arg(other)
                .arg(if other == flag { &address } else { &free });
        }
        let (code, text) = fails(&mut command);
        assert!(text.contains(&format!("{flag} {address}")), "{text}");
        assert_eq!(code, 1);
    }
}

/// A worker that serves, and its admin address.
fn serving(command: &mut Command) -> (Child, String) {
    let mut child = command
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.as_mut().unwrap())
        .read_line(&mut line)
        .unwrap();
    let words: Vec<&str> = line.split_whitespace().collect();
    assert_eq!(
        (words[0], words[1], words[3], words[5]),
        ("listening", "control", "transfer", "admin")
    );
    (child, words[6].to_owned())
}

pub(crate) fn get(address: &str, path: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    write!(
        stream,
        "GET {path} HTTP/1.1\r\nhost: w\r\nconnection: close\r\n\r\n"
    )
    .unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

#[test]
fn it_serves_card_load_metrics_and_health_and_ends_well_when_told() {
    let folder = TempDir::new().unwrap();
    let (mut child, admin) = serving(&mut command(&write(&folder, &configuration())));
    let card = get(&admin, "/v1/card");
    let json = card.split("\r\n\r\n").nth(1).unwrap();
    assert_eq!(
        baton_protocol::card::Card::from_json(json)
            .unwrap()
            .capacity
            .blocks,
        64
    );
    assert!(get(&admin, "/v1/load").contains("\"total\":64"));
    let metrics = get(&admin, "/metrics");
    for name in [
        "baton_kv_blocks{pool=\"pool\",state=\"free\"} 64",
        "baton_leases{pool=\"pool\",state=\"open\"} 0",
        "baton_leases_expired_total{pool=\"pool\"} 0",
        "baton_orphan_blocks_reaped_total{pool=\"pool\"} 0",
        "baton_kv_leaked_blocks{pool=\"pool\"} 0",
        "baton_queued_tokens{pool=\"pool\"} 0",
        "baton_running_sequences{pool=\"pool\"} 0",
    ] {
        assert!(metrics.contains(name), "{name} in {metrics}");
    }
    assert!(get(&admin, "/healthz").starts_with("HTTP/1.1 200"));
    assert!(get(&admin, "/readyz").starts_with("HTTP/1.1 200"));
    let told = Command::new("kill")
        .arg(child.id().to_string())
        .status()
        .unwrap();
    assert!(told.success());
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

#[test]
fn it_ends_with_its_parent() {
    let folder = TempDir::new().unwrap();
    let mut command = command(&write(&folder, &configuration()));
    command.arg("--exit-on-stdin-eof").stdin(Stdio::piped());
    let (mut child, admin) = serving(&mut command);
    assert!(get(&admin, "/healthz").starts_with("HTTP/1.1 200"));
    drop(child.stdin.take());
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

#[test]
fn a_pod_starts_it_from_a_symlinked_file_under_the_pods_address_and_a_drain_before_sigterm_lets_it_end()
 {
    let folder = TempDir::new().unwrap();
    // As a kubelet writes volumes: the file is a link into a folder that is itself a link.
    let data = folder.path().join("..2026_11_30");
    std::fs::create_dir(&data).unwrap();
    std::fs::write(data.join("worker.json"), configuration().to_string()).unwrap();
    std::os::unix::fs::symlink("..2026_11_30", folder.path().join("..data")).unwrap();
    let config = folder.path().join("worker.json");
    std::os::unix::fs::symlink("..data/worker.json", &config).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_baton-worker"));
    command.arg("serve").stdin(Stdio::null());
    command.env("BATON_CONFIG", &config);
    for name in ["BATON_CONTROL", "BATON_TRANSFER", "BATON_ADMIN"] {
        command.env(name, "0.0.0.0:0");
    }
    command.env("BATON_ADVERTISE", "127.0.0.2");
    let (mut child, admin) = serving(&mut command);
    let admin = admin.replace("0.0.0.0", "127.0.0.2");

    let card = get(&admin, "/v1/card");
    let card =
        baton_protocol::card::Card::from_json(card.split("\r\n\r\n").nth(1).unwrap()).unwrap();
    assert!(
        card.control_address.starts_with("127.0.0.2:"),
        "{}",
        card.control_address
    );
    let transfer = &card.transports[0].address;
    assert!(transfer.starts_with("127.0.0.2:"), "{transfer}");
    for address in [&card.control_address, transfer] {
        TcpStream::connect(address).unwrap();
    }

    for wrong in ["soon", "-1", "86401", "1&undo=true"] {
        let answer = get(&admin, &format!("/drain?waitSeconds={wrong}"));
        assert!(
            answer.starts_with("HTTP/1.1 400") && answer.contains("from 0 to 86400"),
            "{answer}"
        );
    }
    assert!(
        get(&admin, "/readyz").starts_with("HTTP/1.1 200"),
        "a wrong drain drains nothing"
    );
    let answer = get(&admin, "/drain?waitSeconds=3600");
    assert!(answer.contains("\"drained\":true"), "{answer}");
    assert!(get(&admin, "/readyz").starts_with("HTTP/1.1 503"));
    let told = Command::new("kill")
        .arg(child.id().to_string())
        .status()
        .unwrap();
    assert!(told.success());
    assert_eq!(child.wait().unwrap().code(), Some(0));
}
