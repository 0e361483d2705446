//! What a user gets who gives something wrong: one clear line on standard error and the status that says whose fault it was.

use std::net::TcpListener;
use std::path::Path;
use std::process::Command;

const TINY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../examples/tiny.yaml");

/// Status and standard error.
#[allow(clippy::unwrap_used, reason = "a test's own setting-up")]
fn baton(folder: &Path, arguments: &[&str]) -> (Option<i32>, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_baton"))
        .args(arguments)
        .current_dir(folder)
        .env_clear()
        .env("HOME", folder)
        .env("PATH", std::env::var_os("PATH").unwrap_or_default())
        .output()
        .unwrap();
    assert_eq!(
        String::from_utf8_lossy(&output.stdout),
        "",
        "nothing of this is a result"
    );
    (
        output.status.code(),
        String::from_utf8_lossy(&output.stderr).into_owned(),
    )
}

#[test]
fn an_unknown_file_is_wrong_input() {
    let folder = tempfile::tempdir().unwrap();
    let (status, words) = baton(folder.path(), &["up", "-f", "absent.yaml"]);
    assert_eq!(status, Some(2), "{words}");
    assert_eq!(
        words,
        "error: cannot read absent.yaml: No such file or directory (os error 2); give a file of resources with -f\n"
    );
    assert!(!folder.path().join(".baton").exists(), "nothing was made");
}

#[test]
fn every_problem_of_a_manifest_is_a_line() {
    let folder = tempfile::tempdir().unwrap();
    let text = std::fs::read_to_string(TINY).unwrap();
    let text =
        text.replacen("replicas: 1", "replicaz: 1", 1)
            .replacen("blocks: 1024", "blocks: 1", 1);
    std::fs::write(folder.path().join("bad.yaml"), text).unwrap();
    let (status, words) = baton(folder.path(), &["up", "-f", "bad.yaml"]);
    assert_eq!(status, Some(2), "{words}");
    let lines: Vec<&str> = words.lines().collect();
    assert_eq!(lines.len(), 2, "{words}");
    assert!(lines[0].starts_with("error: bad.yaml:10: PrefillPool prefill: spec.replicaz: unknown field, did you mean replicas?"), "{words}");
    assert!(lines[1].starts_with("error: bad.yaml:19: PrefillPool prefill: spec.kvPool.blocks: found 1, must be an integer from 2"), "{words}");
}

#[test]
fn a_port_in_use_is_named_with_its_flag() {
    let folder = tempfile::tempdir().unwrap();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let (status, words) = baton(
        folder.path(),
        &[
            "up",
            "-f",
            TINY,
            "--listen",
            &address,
            "--admin",
            "127.0.0.1:0",
        ],
    );
    assert_eq!(status, Some(1), "{words}");
    assert_eq!(
        words,
        format!(
            "error: {address} is in use: end what listens there or give --listen another port (0 takes a free one)\n"
        )
    );
}

#[test]
fn a_state_directory_that_cannot_be_written_is_named() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("file"), "").unwrap();
    let (status, words) = baton(
        folder.path(),
        &["up", "-f", TINY, "--state-dir", "file/state"],
    );
    assert_eq!(status, Some(1), "{words}");
    assert_eq!(words.lines().count(), 1, "{words}");
    assert!(
        words.starts_with(
            "error: cannot write the state directory file/state: give another one with --state-dir"
        ),
        "{words}"
    );
}

#[test]
fn a_run_that_nobody_knows_is_wrong_input() {
    let folder = tempfile::tempdir().unwrap();
    let (status, words) = baton(folder.path(), &["explain", "r0-1"]);
    assert_eq!(status, Some(2), "{words}");
    assert!(
        words.starts_with("error: cannot read .baton/decisions: "),
        "{words}"
    );
    std::fs::create_dir_all(folder.path().join(".baton/decisions")).unwrap();
    let (status, words) = baton(folder.path(), &["explain", "r0-1"]);
    assert_eq!(status, Some(2), "{words}");
    assert!(
        words.starts_with(
            "error: no record of run r0-1 in .baton: take the run id from x-baton-run"
        ),
        "{words}"
    );
}

#[test]
fn a_router_that_is_not_there_is_a_failure() {
    let folder = tempfile::tempdir().unwrap();
    let free = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .to_string();
    let (status, words) = baton(folder.path(), &["ask", "hello", "--router", &free]);
    assert_eq!(status, Some(1), "{words}");
    assert!(
        words.starts_with(&format!(
            "error: no router answers at http://{free}: is baton up running there?"
        )),
        "{words}"
    );
}

#[test]
fn a_command_that_is_not_there_is_wrong_use() {
    let folder = tempfile::tempdir().unwrap();
    let (status, words) = baton(folder.path(), &["topp"]);
    assert_eq!(status, Some(2), "{words}");
    assert!(words.contains("unrecognized subcommand 'topp'"), "{words}");
}
