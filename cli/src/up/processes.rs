//! `processes.json`: who runs, under which process id, at which address. Kept current over restarts.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use anyhow::Context;
use rustix::process::{Pid, test_kill_process};
use serde::{Deserialize, Serialize};

/// One running process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Process {
    pub(crate) name: String,
    /// `router`, `prefill` or `decode`; `engine` for a server beside its worker.
    pub(crate) role: String,
    pub(crate) pid: u32,
    /// Where it is reached: a router's or an engine's OpenAI API, a worker's control service.
    pub(crate) address: String,
}

impl Process {
    /// Whether there is a process of this id.
    pub(crate) fn is_alive(&self) -> bool {
        let pid = i32::try_from(self.pid).ok().and_then(Pid::from_raw);
        pid.is_some_and(|pid| test_kill_process(pid).is_ok())
    }
}

/// The file, and what stands in it.
#[derive(Debug)]
pub(crate) struct Processes {
    file: PathBuf,
    running: Mutex<Vec<Process>>,
}

pub(crate) const FILE: &str = "processes.json";

impl Processes {
    /// Nobody runs yet.
    pub(crate) fn new(state_dir: &Path) -> anyhow::Result<Self> {
        let processes = Self {
            file: state_dir.join(FILE),
            running: Mutex::new(Vec::new()),
        };
        processes.change(|_| {})?;
        Ok(processes)
    }

    /// Who runs according to a state directory.
    pub(crate) fn read(state_dir: &Path) -> anyhow::Result<Vec<Process>> {
        let file = state_dir.join(FILE);
        let text = std::fs::read_to_string(&file)
            .with_context(|| format!("cannot read {}", file.display()))?;
        serde_json::from_str(&text).with_context(|| format!("cannot understand {}", file.display()))
    }

    /// A process has started, for the first time or again.
    pub(crate) fn started(&self, process: Process) -> anyhow::Result<()> {
        self.change(
            |running| match running.iter_mut().find(|other| other.name == process.name) {
                Some(other) => *other = process,
                None => running.push(process),
            },
        )
    }

    pub(crate) fn ended(&self, name: &str) -> anyhow::Result<()> {
        self.change(|running| running.retain(|process| process.name != name))
    }

    fn change(&self, change: impl FnOnce(&mut Vec<Process>)) -> anyhow::Result<()> {
        // Held while writing, so that the file never goes back to an older state.
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut running);
        running.sort_by_key(|process| (process.role != "router", process.name.clone()));
        let text = serde_json::to_string(&*running).context("cannot write processes as JSON")?;
        write_whole(&self.file, &format!("{text}\n"))
    }
}

/// Writes a file so that a reader sees the old text or the new one and nothing between.
pub(crate) fn write_whole(file: &Path, text: &str) -> anyhow::Result<()> {
    let mut partial = file.to_path_buf().into_os_string();
    partial.push(".partial");
    std::fs::write(&partial, text)
        .and_then(|()| std::fs::rename(&partial, file))
        .with_context(|| format!("cannot write {}", file.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(name: &str, role: &str, pid: u32) -> Process {
        Process {
            name: name.into(),
            role: role.into(),
            pid,
            address: "127.0.0.1:1".into(),
        }
    }

    #[test]
    fn the_file_says_who_runs() {
        let folder = tempfile::tempdir().unwrap();
        let processes = Processes::new(folder.path()).unwrap();
        assert_eq!(Processes::read(folder.path()).unwrap(), []);
        processes
            .started(process("decode-0", "decode", 10))
            .unwrap();
        processes.started(process("router", "router", 11)).unwrap();
        processes
            .started(process("decode-0", "decode", 12))
            .unwrap();
        let pids: Vec<u32> = Processes::read(folder.path())
            .unwrap()
            .iter()
            .map(|process| process.pid)
            .collect();
        assert_eq!(pids, [11, 12], "the router first, a restarted one once");
        processes.ended("decode-0").unwrap();
        assert_eq!(Processes::read(folder.path()).unwrap().len(), 1);
        let names: Vec<_> = std::fs::read_dir(folder.path())
            .unwrap()
            .map(|e| e.unwrap().file_name())
            .collect();
        assert_eq!(names, [FILE], "no partial file stays");
    }
}
