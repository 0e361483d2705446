//! The watch of a program that is not ours: its processes end when we are gone without a word, and not when we said one.

use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Longer than a machine that works needs for a signal.
const PATIENCE: Duration = Duration::from_secs(60);

/// A leader that has made a child and ended, and its child's process id.
#[allow(clippy::unwrap_used, reason = "a test's own setting-up")]
fn group(folder: &Path) -> (Child, String) {
    let file = folder.join("child");
    let script = format!("sleep 1000 & echo $! > {}; wait", file.display());
    let mut command = Command::new("/bin/sh");
    let leader = command
        .args(["-c", &script])
        .process_group(0)
        .spawn()
        .unwrap();
    let made = until(|| {
        let text = std::fs::read_to_string(&file).unwrap_or_default();
        text.ends_with('\n').then(|| text.trim().to_owned())
    });
    (leader, made)
}

/// Looks again and again until there is something.
fn until<T>(mut look: impl FnMut() -> Option<T>) -> T {
    let started = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(started.elapsed() < PATIENCE, "nothing came");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[allow(clippy::unwrap_used, reason = "a test's own setting-up")]
fn watch(leader: u32) -> Child {
    Command::new(env!("CARGO_BIN_EXE_baton"))
        .args(["end-group", &leader.to_string()])
        .stdin(Stdio::piped())
        .spawn()
        .unwrap()
}

fn runs(pid: &str) -> bool {
    let state = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let after = state.rsplit_once(") ").map_or("", |(_, after)| after);
    !after.is_empty() && !after.starts_with('Z')
}

#[test]
fn a_group_ends_with_its_owner() {
    let folder = tempfile::tempdir().unwrap();
    let (mut leader, child) = group(folder.path());
    let mut watch = watch(leader.id());
    assert!(runs(&child));
    drop(watch.stdin.take());
    // The group is there until its leader is waited for.
    leader.wait().unwrap();
    assert!(watch.wait().unwrap().success());
    until(|| (!runs(&child)).then_some(()));
}

#[test]
fn a_group_that_was_let_go_is_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    let (mut leader, child) = group(folder.path());
    let mut watch = watch(leader.id());
    watch.stdin.take().unwrap().write_all(b".").unwrap();
    assert!(watch.wait().unwrap().success());
    assert!(runs(&child));
    Command::new("kill").arg(&child).status().unwrap();
    leader.wait().unwrap();
}

#[test]
fn it_is_no_command_for_people() {
    let help = Command::new(env!("CARGO_BIN_EXE_baton"))
        .arg("--help")
        .output()
        .unwrap();
    let help = String::from_utf8_lossy(&help.stdout);
    assert!(
        help.contains("replay") && !help.contains("end-group"),
        "{help}"
    );
}
