//! The processes of a program that is not ours: a server makes children of its own, and none of them may outlive us.
//!
//! Our own programs end when their standard input does. An engine's server knows nothing of that, so each gets a watch: this program
//! once more, under a hidden name, which does nothing but end the server's process group when we are gone, however that came.

use std::io::Read;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::Context;
use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process_group, test_kill_process_group};
use tokio::io::AsyncWriteExt;
use tokio::process::{Child, ChildStdin, Command};

use crate::failure::Verdict;

/// Name of the hidden command.
pub(crate) const COMMAND: &str = "end-group";

/// How long the kernel may take to end what was killed: memory of a device is given back meanwhile.
const KILLED_WITHIN: Duration = Duration::from_secs(5);
/// How long a group may take to end in order when nobody is left to wait for it.
const PATIENCE: Duration = Duration::from_secs(20);
const POLL: Duration = Duration::from_millis(50);

/// The watch of one group. Dropped without [`Watch::release`], it ends the group.
#[derive(Debug)]
pub(crate) struct Watch {
    process: Child,
    alive: Option<ChildStdin>,
}

impl Watch {
    /// Watches the group that this process leads.
    pub(crate) fn start(leader: u32) -> anyhow::Result<Self> {
        let this = std::env::current_exe().context("cannot say where this program is")?;
        Self::start_as(&this, &[COMMAND, &leader.to_string()])
    }

    fn start_as(program: &Path, arguments: &[&str]) -> anyhow::Result<Self> {
        let mut process = Command::new(program)
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()
            .context("cannot start the watch of an engine's processes")?;
        let alive = process.stdin.take();
        Ok(Self { process, alive })
    }

    /// The group has ended: there is nothing to watch, and its number may soon be another's.
    pub(crate) async fn release(mut self) {
        if let Some(mut alive) = self.alive.take() {
            // It fails when the watch is gone, which is what is wanted.
            let _ = alive.write_all(b".").await;
        }
        let _ = self.process.wait().await;
    }
}

/// The group of a leader, as `kill` takes it.
pub(crate) fn of(leader: u32) -> Option<Pid> {
    i32::try_from(leader).ok().and_then(Pid::from_raw)
}

/// Ends what is left of a group whose leader has ended, and waits until the kernel has.
pub(crate) async fn sweep(leader: u32) {
    let Some(group) = of(leader) else {
        return;
    };
    // A group lives as long as one of its processes, and while it lives its number is no other's.
    let _ = kill_process_group(group, Signal::KILL);
    let started = Instant::now();
    // One that nobody waits for stays in the group for ever: the wait is bounded.
    while test_kill_process_group(group) != Err(Errno::SRCH) && started.elapsed() < KILLED_WITHIN {
        tokio::time::sleep(POLL).await;
    }
}

/// The hidden command: a word on standard input lets the group be, its end without one ends the group.
pub(crate) fn watch(leader: u32) -> anyhow::Result<Verdict> {
    let mut word = [0];
    let read = std::io::stdin().lock().read(&mut word);
    if matches!(read, Ok(1)) {
        return Ok(Verdict::Good);
    }
    let group = of(leader).context("give the process id of a group's leader")?;
    // One signal to all: the leader that would pass it on may be gone.
    let _ = kill_process_group(group, Signal::TERM);
    let started = Instant::now();
    while started.elapsed() < PATIENCE {
        if test_kill_process_group(group) == Err(Errno::SRCH) {
            return Ok(Verdict::Good);
        }
        std::thread::sleep(POLL);
    }
    let _ = kill_process_group(group, Signal::KILL);
    Ok(Verdict::Good)
}
