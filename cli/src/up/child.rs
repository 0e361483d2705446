//! One child process: started so that it cannot outlive us, its words in a log, ended in bounded time.
//!
//! A child holds the read end of a pipe as its standard input. Whatever ends this process, a `SIGKILL` too, closes the
//! write end, and a child that was given `--exit-on-stdin-eof` ends then. A program that is not ours has a watch instead
//! ([`super::group`]), and is ended with all processes that it made.

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use anyhow::Context;
use rustix::process::{Signal, kill_process, kill_process_group};
use tokio::process::{ChildStdin, Command};

use super::group::{self, Watch};

/// What is started.
#[derive(Debug, Clone)]
pub(crate) struct Program {
    pub(crate) name: String,
    pub(crate) path: PathBuf,
    pub(crate) arguments: Vec<String>,
    /// Beside what this process has.
    pub(crate) environment: Vec<(String, String)>,
    pub(crate) maker: Maker,
    pub(crate) log: PathBuf,
}

/// Who made a program, and so how it ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Maker {
    /// It ends with its standard input, and makes no processes.
    Ours,
    /// It is to be ended, together with the processes that it made.
    Others,
}

/// A child that runs.
#[derive(Debug)]
pub(crate) struct Child {
    process: tokio::process::Child,
    pid: u32,
    /// Held open: its end tells the child that we are gone.
    _alive: Option<ChildStdin>,
    /// Only of a program that is not ours.
    watch: Option<Watch>,
    log: PathBuf,
    /// Where in the log its own words begin.
    log_start: u64,
}

impl Child {
    pub(crate) fn start(program: &Program) -> anyhow::Result<Self> {
        let log = OpenOptions::new()
            .create(true)
            .append(true)
            .open(&program.log)
            .with_context(|| format!("cannot write {}", program.log.display()))?;
        let log_start = log.metadata().map_or(0, |metadata| metadata.len());
        let second = log.try_clone().context("cannot share a log file")?;
        let ours = program.maker == Maker::Ours;
        let mut process = Command::new(&program.path)
            .args(&program.arguments)
            .args(ours.then_some("--exit-on-stdin-eof"))
            .envs(
                program
                    .environment
                    .iter()
                    .map(|(name, value)| (name, value)),
            )
            .stdin(if ours { Stdio::piped() } else { Stdio::null() })
            .stdout(Stdio::from(log))
            .stderr(Stdio::from(second))
            // Ctrl-C at the terminal is ours to pass on.
            .process_group(0)
            .kill_on_drop(true)
            .spawn()
            .with_context(|| {
                let path = program.path.display();
                if ours {
                    format!(
                        "cannot start {path}: run make build, it belongs beside the baton program"
                    )
                } else {
                    format!("cannot start {path}, the program of {}", program.name)
                }
            })?;
        let pid = process.id().context("a child that was started has an id")?;
        let alive = process.stdin.take();
        let watch = if ours { None } else { Some(Watch::start(pid)?) };
        Ok(Self {
            process,
            pid,
            _alive: alive,
            watch,
            log: program.log.clone(),
            log_start,
        })
    }

    pub(crate) fn pid(&self) -> u32 {
        self.pid
    }

    /// Waits for its end. May be called again when given up before.
    pub(crate) async fn ended(&mut self) -> anyhow::Result<ExitStatus> {
        self.process
            .wait()
            .await
            .with_context(|| format!("cannot wait for process {}", self.pid))
    }

    /// Asks it to end, and makes it end when it has not after `patience`.
    pub(crate) async fn end(&mut self, patience: Duration, hurry: impl Future<Output = ()>) {
        let Some(pid) = group::of(self.pid) else {
            return;
        };
        // The process is not reaped yet, so the id is still its own; it may have ended, which is no error.
        let _ = kill_process(pid, Signal::TERM);
        let in_time = tokio::select! {
            ended = self.process.wait() => ended.is_ok(),
            () = tokio::time::sleep(patience) => false,
            () = hurry => false,
        };
        if !in_time {
            let _ = kill_process_group(pid, Signal::KILL);
            let _ = self.process.wait().await;
        }
        self.sweep().await;
    }

    /// Once it has ended: ends what it left behind.
    pub(crate) async fn sweep(&mut self) {
        let Some(watch) = self.watch.take() else {
            return;
        };
        group::sweep(self.pid).await;
        watch.release().await;
    }

    /// The last line that it wrote; of an engine that ended with a Python error, that error.
    pub(crate) fn last_words(&self) -> String {
        last_words(&self.log, self.log_start).unwrap_or_default()
    }
}

/// The last line of a file that is not blank, from `start` on, or before it the last that is an error of Python's: what its modules
/// say while they end comes behind that. Reads at most the last 16 KiB.
fn last_words(file: &Path, start: u64) -> Option<String> {
    const WINDOW: u64 = 16 << 10;
    let mut file = File::open(file).ok()?;
    let length = file.metadata().ok()?.len();
    file.seek(SeekFrom::Start(start.max(length.saturating_sub(WINDOW))))
        .ok()?;
    let mut bytes = Vec::new();
    file.take(WINDOW).read_to_end(&mut bytes).ok()?;
    let text = String::from_utf8_lossy(&bytes);
    let lines = || text.lines().rev().map(str::trim);
    let word = lines().find(|line| is_python_error(line));
    word.or_else(|| lines().find(|line| !line.is_empty()))
        .map(ToOwned::to_owned)
}

/// Such as `ValueError: why`.
fn is_python_error(line: &str) -> bool {
    line.split_once(": ").is_some_and(|(kind, _)| {
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._".contains(&byte);
        kind.ends_with("Error") && kind.len() > "Error".len() && kind.bytes().all(plain)
    })
}

/// How a process ended, for people.
pub(crate) fn ending(status: ExitStatus) -> String {
    use std::os::unix::process::ExitStatusExt;
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("ended with status {code}"),
        (None, Some(signal)) => format!("was ended by signal {signal}"),
        (None, None) => "ended".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(folder: &Path, script: &str) -> Program {
        Program {
            name: "shell".into(),
            path: "/bin/sh".into(),
            // `--exit-on-stdin-eof` becomes the script's `$0`.
            arguments: vec!["-c".into(), script.into()],
            environment: Vec::new(),
            maker: Maker::Ours,
            log: folder.join("shell.log"),
        }
    }

    #[tokio::test]
    async fn last_words_are_those_of_this_start() {
        let folder = tempfile::tempdir().unwrap();
        let mut first = Child::start(&shell(folder.path(), "echo old words; exit 3")).unwrap();
        assert_eq!(ending(first.ended().await.unwrap()), "ended with status 3");
        assert_eq!(first.last_words(), "old words");
        let mut second = Child::start(&shell(folder.path(), "exit 0")).unwrap();
        second.ended().await.unwrap();
        assert_eq!(second.last_words(), "");
    }

    #[tokio::test]
    async fn an_error_of_pythons_counts_more_than_what_is_said_behind_it() {
        let folder = tempfile::tempdir().unwrap();
        let script = "echo '  File x'; echo 'RuntimeError: no memory'; echo 'warnings.warn(a: b)'";
        let mut child = Child::start(&shell(folder.path(), script)).unwrap();
        child.ended().await.unwrap();
        assert_eq!(child.last_words(), "RuntimeError: no memory");
    }

    #[tokio::test]
    async fn a_child_that_will_not_end_is_made_to() {
        let folder = tempfile::tempdir().unwrap();
        let stubborn = shell(
            folder.path(),
            "trap '' TERM; echo ready; while :; do sleep 0.05; done",
        );
        let mut child = Child::start(&stubborn).unwrap();
        // The trap is set once the word is out.
        while child.last_words() != "ready" {
            tokio::task::yield_now().await;
        }
        child
            .end(Duration::from_millis(50), std::future::pending())
            .await;
        assert_eq!(
            ending(child.ended().await.unwrap()),
            "was ended by signal 9"
        );
    }

    #[tokio::test]
    async fn a_child_sees_the_end_of_the_pipe_when_we_are_gone() {
        let folder = tempfile::tempdir().unwrap();
        let mut child = Child::start(&shell(folder.path(), "cat; echo nobody there")).unwrap();
        child._alive = None;
        child.ended().await.unwrap();
        assert_eq!(child.last_words(), "nobody there");
    }
}
