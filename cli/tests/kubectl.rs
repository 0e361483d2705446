//! `kubectl baton explain` and `top` from end to end, with a script in the place of `kubectl` and a router's admin port on loopback.

// The lint knows test functions only, and what they share is test code as well.
#![allow(clippy::unwrap_used)]

#[path = "../src/explain/sample.rs"]
mod sample;

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};

use tempfile::TempDir;

const POD: &str = "baton-router-7d9f8c5b4-x2k9q";
const RUN: &str = "baton-router-7d9f8c5b4-x2k9q-0123456789abcdef0123456789abcdef";

/// What each call of `kubectl` came with.
const SCRIPT: &str = r#"#!/bin/sh
echo "$*" >> "$FAKE/calls"
case "$*" in
  *"get pods"*) printf '{"items":[%s]}' "$(cat "$FAKE/pod")" ;;
  *"get pod "*) cat "$FAKE/pod" 2>/dev/null || { echo 'Error from server (NotFound): pods "x" not found' >&2; exit 1; } ;;
  *"get secret"*) if test -f "$FAKE/token"; then cat "$FAKE/token"; else cat "$FAKE/no-token" >&2; exit 1; fi ;;
  *port-forward*)
    if test -f "$FAKE/no-forward"; then cat "$FAKE/no-forward" >&2; exit 1; fi
    echo $$ > "$FAKE/pid"
    echo "Forwarding from $(cat "$FAKE/address") -> 9001"
    exec sleep 1000 ;;
esac
"#;

/// A program that is being started holds, for a moment, what another test's thread has open for writing, and a script that is open for
/// writing cannot be run. One at a time writes the script or starts a program.
static PROGRAMS: Mutex<()> = Mutex::new(());

struct Scene {
    folder: TempDir,
    requests: Arc<Mutex<Vec<String>>>,
}

impl Scene {
    /// A router pod whose admin port has the record of [`RUN`], and wants a token.
    fn new() -> Self {
        let _alone = PROGRAMS.lock().unwrap_or_else(PoisonError::into_inner);
        let folder = tempfile::tempdir().unwrap();
        let scene = Self {
            folder,
            requests: Arc::default(),
        };
        let path = scene.file("bin");
        std::fs::create_dir(&path).unwrap();
        let script = path.join("kubectl");
        std::fs::write(&script, SCRIPT).unwrap();
        std::fs::set_permissions(&script, PermissionsExt::from_mode(0o755)).unwrap();
        symlink(env!("CARGO_BIN_EXE_baton"), path.join("kubectl-baton")).unwrap();
        let pod = format!(
            r#"{{"metadata":{{"name":"{POD}","labels":{{"app.kubernetes.io/name":"baton-router"}}}},
            "spec":{{"containers":[{{"ports":[{{"name":"http","containerPort":8000}},{{"name":"admin","containerPort":9001}}]}}]}}}}"#
        );
        scene.write("pod", &pod);
        scene.write("token", "secret");
        scene.write("address", &scene.serve());
        scene
    }

    fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn write(&self, name: &str, text: &str) {
        std::fs::write(self.file(name), text).unwrap();
    }

    fn remove(&self, name: &str) {
        std::fs::remove_file(self.file(name)).unwrap();
    }

    /// An admin port, for as long as the process lives.
    fn serve(&self) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let requests = self.requests.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                answer(stream.unwrap(), &requests);
            }
        });
        address
    }

    /// Status, result and complaint of `kubectl-baton explain …`.
    fn explain(&self, words: &[&str]) -> (Option<i32>, String, String) {
        self.explain_on(
            &format!("{}:/usr/bin:/bin", self.file("bin").display()),
            words,
        )
    }

    fn explain_on(&self, path: &str, words: &[&str]) -> (Option<i32>, String, String) {
        self.call(path, &[&["explain"], words].concat())
    }

    fn call(&self, path: &str, words: &[&str]) -> (Option<i32>, String, String) {
        let alone = PROGRAMS.lock().unwrap_or_else(PoisonError::into_inner);
        let child = Command::new(self.file("bin/kubectl-baton"))
            .args(words)
            .current_dir(self.folder.path())
            .env_clear()
            .env("PATH", path)
            .env("FAKE", self.folder.path())
            // Of a `baton` on this machine: no place of the cluster's.
            .env("BATON_ADMIN", "127.0.0.1:1")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        drop(alone);
        let output = child.wait_with_output().unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        (
            output.status.code(),
            text(output.stdout),
            text(output.stderr),
        )
    }

    fn calls(&self) -> String {
        std::fs::read_to_string(self.file("calls")).unwrap_or_default()
    }
}

/// Answers one request. Its head is kept before that: whoever has the answer may look for it.
fn answer(mut stream: TcpStream, requests: &Mutex<Vec<String>>) {
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") && reader.read_line(&mut head).unwrap() > 0 {}
    let head = head.to_lowercase();
    requests.lock().unwrap().push(head.clone());
    let (status, body) = if !head.contains("authorization: bearer secret") {
        (
            401,
            r#"{"error":{"message":"this endpoint wants the admin token"}}"#.to_owned(),
        )
    } else if head.starts_with(&format!("get /v1/decisions/{RUN} ")) {
        (200, sample::line(RUN))
    } else if head.starts_with("get /v1/fleet ") {
        (
            200,
            r#"{"workers":[{"id":"d-0","pool":"decode","state":"Ready"}],"pairs":[]}"#.to_owned(),
        )
    } else if head.starts_with("get /v1/decisions?last=1 ") {
        (200, format!("[{}]", sample::line(RUN)))
    } else {
        (404, r#"{"error":{"message":"no record"}}"#.to_owned())
    };
    let length = body.len();
    write!(
        stream,
        "HTTP/1.1 {status} X\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n{body}"
    )
    .unwrap();
}

fn alive(pid: &str) -> bool {
    // A zombie has ended: its parent is gone, and whoever takes orphans in has not looked yet.
    let status = std::fs::read_to_string(Path::new("/proc").join(pid).join("status"));
    status.is_ok_and(|status| !status.contains("State:\tZ"))
}

#[test]
fn the_router_pod_that_took_the_run_is_asked_with_the_token_and_the_forward_ends() {
    let scene = Scene::new();
    let (status, out, err) = scene.explain(&[RUN, "-n", "serving", "--context", "prod"]);
    assert_eq!((status, err.as_str()), (Some(0), ""));
    assert!(out.contains("remote is cheaper by 5210 ms"), "{out}");
    let calls = scene.calls();
    for call in [
        format!("get pod {POD} --output json"),
        "get secret baton-admin-token".to_owned(),
        format!("port-forward --address=127.0.0.1 pod/{POD} :9001"),
    ] {
        let call = format!("--context=prod --namespace=serving {call}");
        assert!(calls.contains(&call), "{call} in {calls}");
    }
    let pid = std::fs::read_to_string(scene.file("pid")).unwrap();
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(20);
    while alive(pid.trim()) {
        assert!(std::time::Instant::now() < deadline, "kubectl goes on");
        std::thread::yield_now();
    }
    let requests = scene.requests.lock().unwrap();
    assert_eq!(requests.len(), 1, "{requests:?}");
}

#[test]
fn last_is_the_newest_record_of_all_routers_and_json_is_for_programs() {
    let scene = Scene::new();
    let (status, out, err) = scene.explain(&["last", "--output", "json"]);
    assert_eq!((status, err.as_str()), (Some(0), ""));
    let record: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!(record["run"], RUN);
    assert!(
        scene
            .calls()
            .contains("app.kubernetes.io/name=baton-router")
    );
}

#[test]
fn top_shows_what_every_router_sees_and_ends_where_nobody_watches() {
    let scene = Scene::new();
    let path = format!("{}:/usr/bin:/bin", scene.file("bin").display());
    let (status, out, err) = scene.call(&path, &["top", "-n", "serving"]);
    assert_eq!((status, err.as_str()), (Some(0), ""));
    assert!(out.starts_with(&format!("router {POD}\n")), "{out}");
    assert!(out.contains("d-0"), "{out}");
    let (status, out, err) = scene.call(&path, &["top", "--output", "json"]);
    assert_eq!((status, err.as_str()), (Some(0), ""));
    let seen: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!(seen[0]["router"], POD);
    assert_eq!(seen[0]["fleet"]["workers"][0]["id"], "d-0");
    // Elsewhere than in the cluster nobody answers, and kubectl is not called for it.
    let before = scene.calls();
    let (status, _, err) = scene.call(&path, &["top", "--admin", "127.0.0.1:1"]);
    assert_eq!((status, scene.calls()), (Some(1), before), "{err}");
}

#[test]
fn each_obstacle_is_named_with_what_to_do() {
    let forbidden = "Error from server (Forbidden): secrets \"baton-admin-token\" is forbidden";
    let check = |prepare: &dyn Fn(&Scene), run: &str, status: i32, words: &[&str]| {
        let scene = Scene::new();
        prepare(&scene);
        let (found, out, err) = scene.explain(&[run]);
        assert_eq!((found, out.as_str()), (Some(status), ""), "{err}");
        assert!(err.starts_with("error: "), "{err}");
        for word in words {
            assert!(err.contains(word), "{word} in {err}");
        }
    };
    check(
        &|scene| scene.remove("pod"),
        RUN,
        2,
        &[POD, "the record went with it", "-n"],
    );
    check(
        &|_| {},
        "r0-17",
        2,
        &["\"r0-17\" is no run id", "x-baton-run"],
    );
    let other = RUN.replace("0123", "ffff");
    check(
        &|_| {},
        &other,
        2,
        &["no record of run", POD, "older than the records"],
    );
    let foreign = |scene: &Scene| scene.write("pod", r#"{"metadata":{"name":"x","labels":{}}}"#);
    check(&foreign, RUN, 2, &["is no router of Baton"]);
    let no_right = |scene: &Scene| {
        scene.remove("token");
        scene.write("no-token", forbidden);
    };
    check(
        &no_right,
        RUN,
        1,
        &[
            "may not read Secret baton-admin-token",
            "--admin-token-file",
        ],
    );
    let refused = |scene: &Scene| {
        scene.write(
            "no-forward",
            "Error from server (Forbidden): pods/portforward is forbidden",
        );
    };
    check(
        &refused,
        RUN,
        1,
        &["pods/portforward is forbidden", "ask for the right"],
    );
    let without = |scene: &Scene| {
        scene.remove("token");
        scene.write(
            "no-token",
            "Error from server (NotFound): secrets \"x\" not found",
        );
    };
    check(&without, RUN, 1, &["401", "wants the admin token"]);
}

#[test]
fn a_token_of_a_file_is_used_instead_of_the_secret() {
    let scene = Scene::new();
    scene.remove("token");
    scene.write("my-token", "secret\n");
    let (status, out, err) = scene.explain(&[RUN, "--admin-token-file", "my-token"]);
    assert_eq!((status, err.as_str()), (Some(0), ""), "{out}");
    assert!(!scene.calls().contains("get secret"));
}

#[test]
fn without_kubectl_the_next_step_is_said() {
    let scene = Scene::new();
    let empty = scene.file("empty");
    std::fs::create_dir(&empty).unwrap();
    let (status, _, err) = scene.explain_on(empty.to_str().unwrap(), &[RUN]);
    assert_eq!(status, Some(2), "{err}");
    assert!(
        err.contains("kubectl is not on the PATH: install it"),
        "{err}"
    );
}
