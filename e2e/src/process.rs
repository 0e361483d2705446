//! A program that runs, writes to files, and is ended by its id whatever becomes of the test.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context, Result};
use rustix::process::{Pid, Signal, kill_process};

use crate::binaries;
use crate::wait;

/// A child that is let end by itself when asked to gets this long before it is killed.
const PATIENCE: Duration = Duration::from_secs(15);

/// One started program.
#[derive(Debug)]
pub struct Process {
    child: Child,
    name: String,
    output: PathBuf,
    errors: PathBuf,
}

impl Process {
    /// Starts a program of this repository; what it writes goes to `FOLDER/NAME.out` and `FOLDER/NAME.err`.
    ///
    /// # Errors
    /// The program is not built, or cannot be started.
    pub fn start(
        program: &str,
        folder: &Path,
        arguments: &[&str],
        variables: &[(&str, &str)],
    ) -> Result<Self> {
        let path = binaries::program(program)?;
        let mut command = Command::new(path);
        command.args(arguments).envs(variables.iter().copied());
        Self::start_command(program, folder, command)
    }

    /// Starts any command in the same way.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn start_command(name: &str, folder: &Path, mut command: Command) -> Result<Self> {
        let output = folder.join(format!("{name}.out"));
        let errors = folder.join(format!("{name}.err"));
        let child = command
            .stdin(Stdio::null())
            .stdout(File::create(&output)?)
            .stderr(File::create(&errors)?)
            .current_dir(folder)
            .spawn()
            .with_context(|| format!("{name} does not start"))?;
        Ok(Self {
            child,
            name: name.to_owned(),
            output,
            errors,
        })
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// What it has written to its standard output so far.
    pub fn output(&self) -> String {
        std::fs::read_to_string(&self.output).unwrap_or_default()
    }

    /// What it has written to its standard error so far.
    pub fn errors(&self) -> String {
        std::fs::read_to_string(&self.errors).unwrap_or_default()
    }

    /// The word after `field` in what the process has written, such as the address after ` listen=`; waited for.
    ///
    /// # Errors
    /// It does not come in time: what was written last.
    pub async fn said(&self, field: &str, within: Duration) -> Result<String> {
        wait::until(&format!("a process says {field:?}"), within, async || {
            let text = format!("{}{}", self.output(), self.errors());
            let found = text.split_once(field).and_then(|(_, rest)| {
                let (word, _) = rest.split_once(char::is_whitespace)?;
                Some(word.to_owned())
            });
            found.ok_or_else(|| tail(&text, 5))
        })
        .await
    }

    /// Its exit status, if it has ended.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().ok().flatten()
    }

    /// Sends it a signal. One that has ended gets none.
    pub fn signal(&mut self, signal: Signal) {
        if self.ended().is_none() {
            signal_process(self.id(), signal);
        }
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// It still runs after that time.
    pub fn wait(&mut self, within: Duration) -> Result<ExitStatus> {
        let what = format!("{} ends", self.name);
        wait::until_blocking(&what, within, || {
            self.ended().ok_or_else(|| "it runs".to_owned())
        })
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.signal(Signal::TERM);
        if self.wait(PATIENCE).is_err() {
            self.signal(Signal::KILL);
            // A killed child is reaped at once; one that is not is the kernel's affair.
            let _ = self.wait(PATIENCE);
        }
    }
}

/// Sends a signal to a process of this test, by its id.
pub fn signal_process(id: u32, signal: Signal) {
    if let Some(pid) = i32::try_from(id).ok().and_then(Pid::from_raw) {
        // It may have ended meanwhile.
        let _ = kill_process(pid, signal);
    }
}

/// Whether a process of this id runs and is one of this repository's programs. A zombie has ended.
pub fn runs(id: u32) -> bool {
    let Ok(status) = std::fs::read_to_string(format!("/proc/{id}/status")) else {
        return false;
    };
    let field = |name: &str| {
        status
            .lines()
            .find_map(|line| line.strip_prefix(name))
            .map_or("", str::trim)
    };
    field("Name:").starts_with("baton") && !field("State:").starts_with('Z')
}

/// Time that the threads of a process have computed, as its scheduler knows it.
///
/// # Errors
/// There is no such process.
pub fn processor_time(process: u32) -> Result<Duration> {
    let mut nanoseconds = 0;
    for thread in std::fs::read_dir(format!("/proc/{process}/task"))? {
        // A thread may end meanwhile.
        let text = std::fs::read_to_string(thread?.path().join("schedstat")).unwrap_or_default();
        let first = text.split_whitespace().next().unwrap_or("0");
        nanoseconds += first.parse::<u64>().context("schedstat")?;
    }
    Ok(Duration::from_nanos(nanoseconds))
}

/// Memory of a process that is in RAM, in bytes.
///
/// # Errors
/// There is no such process.
pub fn resident_bytes(process: u32) -> Result<u64> {
    let status = std::fs::read_to_string(format!("/proc/{process}/status"))?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))
        .context("VmRSS")?;
    let kibibytes = line.split_whitespace().next().unwrap_or_default();
    Ok(kibibytes.parse::<u64>().context("VmRSS")? * 1024)
}

/// The last lines of a text.
pub fn tail(text: &str, lines: usize) -> String {
    let all: Vec<&str> = text.lines().collect();
    all[all.len().saturating_sub(lines)..].join("\n")
}
