//! `baton up` and a server that is not ours, by stand-ins of all programs: what is started, and that nothing of it outlives us.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Longer than a machine that works needs for any of this.
const PATIENCE: Duration = Duration::from_secs(60);

const FLEET: &str = "
apiVersion: serving.baton.dev/v1alpha1
kind: DecodePool
metadata: {name: decode}
spec:
  model: {name: tiny, source: {hostPath: MODEL}}
  engine: {type: VLLM, blockSize: 32, args: [--enforce-eager], env: [{name: OMP_NUM_THREADS, value: '1'}]}
---
apiVersion: serving.baton.dev/v1alpha1
kind: RoutePolicy
metadata: {name: tiny}
spec: {model: tiny, decodePools: [{name: decode}]}
";

/// Baton's programs do nothing until their standard input ends; the server makes a process of its own, as vLLM does.
const IDLE: &str = "#!/bin/sh\ncat > /dev/null\n";
const SERVER: &str = "#!/bin/sh\nprintf '%s\\n' \"$@\" > HERE/args\necho $OMP_NUM_THREADS $VLLM_NIXL_SIDE_CHANNEL_HOST > HERE/env\nsleep 1000 &\necho $$ $! > HERE/pids\nwait\n";

/// A program that is being started holds, for a moment, what another test's thread has open for writing; who starts that one meanwhile is
/// told that it is busy. One at a time writes programs or starts one.
static PROGRAMS: Mutex<()> = Mutex::new(());

struct Scene {
    folder: tempfile::TempDir,
}

#[allow(clippy::unwrap_used, reason = "a test's own setting-up")]
impl Scene {
    fn new() -> Self {
        let _alone = PROGRAMS.lock().unwrap_or_else(PoisonError::into_inner);
        let scene = Self {
            folder: tempfile::tempdir().unwrap(),
        };
        std::fs::create_dir_all(scene.at("bin")).unwrap();
        std::fs::create_dir_all(scene.at("model")).unwrap();
        std::fs::write(scene.at("model/config.json"), "{}").unwrap();
        std::fs::copy(env!("CARGO_BIN_EXE_baton"), scene.at("bin/baton")).unwrap();
        let here = scene.folder.path().display().to_string();
        for (name, text) in [
            ("baton-router", IDLE),
            ("baton-worker", IDLE),
            ("vllm", SERVER),
        ] {
            let file = scene.at(&format!("bin/{name}"));
            std::fs::write(&file, text.replace("HERE", &here)).unwrap();
            std::fs::set_permissions(file, PermissionsExt::from_mode(0o755)).unwrap();
        }
        let model = scene.at("model").display().to_string();
        std::fs::write(scene.at("fleet.yaml"), FLEET.replace("MODEL", &model)).unwrap();
        scene
    }

    fn at(&self, path: &str) -> PathBuf {
        self.folder.path().join(path)
    }

    fn up(&self) -> Child {
        let _alone = PROGRAMS.lock().unwrap_or_else(PoisonError::into_inner);
        Command::new(self.at("bin/baton"))
            .args(["up", "-f", "fleet.yaml", "--state-dir", "state"])
            .args(["--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"])
            .arg("--vllm")
            .arg(self.at("bin/vllm"))
            .current_dir(self.folder.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap()
    }

    /// The server's process id and that of the process that it made.
    fn pids(&self) -> [String; 2] {
        let text = until(|| lines(&self.at("pids")));
        let pids: Vec<String> = text[0].split(' ').map(ToOwned::to_owned).collect();
        pids.try_into().unwrap()
    }

    /// Name, role and process id of what runs by `processes.json`.
    fn listed(&self, name: &str) -> Option<(String, u64)> {
        let text = std::fs::read_to_string(self.at("state/processes.json")).ok()?;
        let all: serde_json::Value = serde_json::from_str(&text).unwrap();
        let one = all
            .as_array()
            .unwrap()
            .iter()
            .find(|one| one["name"] == name)?;
        Some((
            one["role"].as_str().unwrap().to_owned(),
            one["pid"].as_u64().unwrap(),
        ))
    }
}

/// Of a file that ends with a line's end.
fn lines(file: &Path) -> Option<Vec<String>> {
    let text = std::fs::read_to_string(file).ok()?;
    text.ends_with('\n')
        .then(|| text.lines().map(ToOwned::to_owned).collect())
}

/// Looks again and again until there is something.
fn until<T>(mut look: impl FnMut() -> Option<T>) -> T {
    let started = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(started.elapsed() < PATIENCE, "nothing came");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn runs(pid: &str) -> bool {
    let state = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let after = state.rsplit_once(") ").map_or("", |(_, after)| after);
    !after.is_empty() && !after.starts_with('Z')
}

#[test]
fn a_killed_baton_up_leaves_no_process_of_a_server() {
    let scene = Scene::new();
    let mut up = scene.up();
    let pids = scene.pids();
    let (role, pid) = until(|| scene.listed("decode-0-engine"));
    assert_eq!(
        (role.as_str(), pid.to_string()),
        ("engine", pids[0].clone())
    );
    assert!(pids.iter().all(|pid| runs(pid)));
    up.kill().unwrap();
    up.wait().unwrap();
    until(|| pids.iter().all(|pid| !runs(pid)).then_some(()));
}

#[test]
fn a_server_is_started_as_its_pool_says_and_ended_with_all_that_it_made() {
    let scene = Scene::new();
    let mut up = scene.up();
    let pids = scene.pids();
    let args = until(|| lines(&scene.at("args")));
    assert_eq!(
        args[..2],
        ["serve".to_owned(), scene.at("model").display().to_string()]
    );
    assert_eq!(args.last().map(String::as_str), Some("--enforce-eager"));
    let block_size = args.iter().position(|arg| arg == "--block-size").unwrap();
    assert_eq!(args[block_size + 1], "32");
    assert_eq!(until(|| lines(&scene.at("env"))), ["1 127.0.0.1"]);
    // What its daemon is told of it.
    let file = scene.at("state/configuration/decode-0.json");
    let told: serde_json::Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    let port = args.iter().position(|arg| arg == "--port").unwrap();
    assert_eq!(
        told["engine"]["url"],
        format!("http://127.0.0.1:{}", args[port + 1])
    );
    assert!(scene.at("state/logs/decode-0-engine.log").is_file());
    let ended = Command::new("kill").arg(up.id().to_string()).status();
    assert!(ended.unwrap().success());
    assert_eq!(up.wait().unwrap().code(), Some(0));
    assert!(
        !pids.iter().any(|pid| runs(pid)),
        "it waits for all of them"
    );
    assert_eq!(scene.listed("decode-0-engine"), None);
}
