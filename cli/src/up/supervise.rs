//! Children kept running: started, started again when they crash, and ended all together.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use anyhow::{anyhow, bail};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::backoff::Backoff;
use super::child::{Child, Maker, Program, ending};
use super::processes::{Process, Processes};
use crate::terminal::note;

/// A drained child gets this long to end, longer than it drains by itself.
const PATIENCE: Duration = Duration::from_secs(super::plan::DRAIN_SECONDS as u64 + 3);

/// A server that is told to end unloads a model and gives back what its processes share; killed meanwhile, it leaves that behind.
const PATIENCE_WITH_OTHERS: Duration = Duration::from_secs(20);

/// What is known of one child from outside.
#[derive(Debug, Default)]
pub(crate) struct Health {
    /// It was seen to serve since the first start.
    ready: AtomicBool,
    starts: AtomicU32,
}

impl Health {
    pub(crate) fn is_ready(&self) -> bool {
        self.ready.load(Ordering::Relaxed)
    }

    pub(crate) fn has_served(&self) {
        self.ready.store(true, Ordering::Relaxed);
    }

    #[cfg(test)]
    fn starts(&self) -> u32 {
        self.starts.load(Ordering::Relaxed)
    }
}

/// All children. Dropped, it ends them without waiting; [`Supervisor::end`] waits.
#[derive(Debug)]
pub(crate) struct Supervisor {
    children: JoinSet<anyhow::Result<()>>,
    /// What the others speak to, and so ended after them.
    beneath: JoinSet<anyhow::Result<()>>,
    processes: Arc<Processes>,
    stop: CancellationToken,
    stop_beneath: CancellationToken,
    hurry: CancellationToken,
}

impl Supervisor {
    pub(crate) fn new(processes: Arc<Processes>) -> Self {
        Self {
            children: JoinSet::new(),
            beneath: JoinSet::new(),
            processes,
            stop: CancellationToken::new(),
            stop_beneath: CancellationToken::new(),
            hurry: CancellationToken::new(),
        }
    }

    /// Cancelled to make children that still drain end at once.
    pub(crate) fn hurry(&self) -> CancellationToken {
        self.hurry.clone()
    }

    /// Starts a child and keeps it running. `process` without its id is what `processes.json` says of it.
    pub(crate) fn keep(&mut self, program: Program, process: Process) -> Arc<Health> {
        let (kept, health) = self.kept(program, process, self.stop.clone());
        self.children.spawn(kept.run());
        health
    }

    /// As [`Supervisor::keep`], for one that is ended when those have ended that speak to it.
    pub(crate) fn keep_beneath(&mut self, program: Program, process: Process) -> Arc<Health> {
        let (kept, health) = self.kept(program, process, self.stop_beneath.clone());
        self.beneath.spawn(kept.run());
        health
    }

    fn kept(
        &self,
        program: Program,
        process: Process,
        stop: CancellationToken,
    ) -> (Kept, Arc<Health>) {
        let health = Arc::new(Health::default());
        let kept = Kept {
            program,
            process,
            processes: Arc::clone(&self.processes),
            health: Arc::clone(&health),
            stop,
            hurry: self.hurry.clone(),
        };
        (kept, health)
    }

    /// The first child that is given up, as an error. Pends while all are kept.
    pub(crate) async fn failed(&mut self) -> anyhow::Error {
        let ended = tokio::select! {
            Some(ended) = self.children.join_next() => ended,
            Some(ended) = self.beneath.join_next() => ended,
            else => return std::future::pending().await,
        };
        match ended {
            Ok(Err(error)) => error,
            Ok(Ok(())) => anyhow!("a child was let go while all was to run"),
            Err(error) => anyhow!("the task that keeps a child ended: {error}"),
        }
    }

    /// Ends all children and waits for it.
    pub(crate) async fn end(mut self) {
        self.stop.cancel();
        while self.children.join_next().await.is_some() {}
        self.stop_beneath.cancel();
        while self.beneath.join_next().await.is_some() {}
    }
}

struct Kept {
    program: Program,
    process: Process,
    processes: Arc<Processes>,
    health: Arc<Health>,
    stop: CancellationToken,
    hurry: CancellationToken,
}

impl Kept {
    /// Ends well when told to stop, and with an error when the child never served.
    async fn run(mut self) -> anyhow::Result<()> {
        let mut backoff = Backoff::default();
        while !self.stop.is_cancelled() {
            let started = Instant::now();
            let mut child = Child::start(&self.program)?;
            self.health.starts.fetch_add(1, Ordering::Relaxed);
            self.process.pid = child.pid();
            if let Err(error) = self.processes.started(self.process.clone()) {
                child.end(Duration::ZERO, std::future::ready(())).await;
                return Err(error);
            }
            let status = tokio::select! {
                status = child.ended() => status?,
                () = self.stop.cancelled() => {
                    let patience = match self.program.maker {
                        Maker::Ours => PATIENCE,
                        Maker::Others => PATIENCE_WITH_OTHERS,
                    };
                    child.end(patience, self.hurry.cancelled()).await;
                    return self.processes.ended(&self.program.name);
                }
            };
            child.sweep().await;
            self.processes.ended(&self.program.name)?;
            if self.stop.is_cancelled() {
                break;
            }
            let how = ending(status);
            let words = child.last_words();
            if !self.health.is_ready() {
                let name = &self.program.name;
                let log = self.program.log.display();
                if words.is_empty() {
                    bail!("{name} {how} before it was ready, without a word in {log}");
                }
                // An engine's last word is seldom its reason.
                if self.program.maker == Maker::Others {
                    bail!("{name} {how} before it was ready: {words}: read {log}");
                }
                bail!("{name} {how} before it was ready: {words}");
            }
            let wait = backoff.after(started.elapsed());
            let again = format!(
                "{} {how}, it is started again in {:.1} s",
                self.program.name,
                wait.as_secs_f64()
            );
            // One that was killed had nothing to say about it.
            note(&if words.is_empty() || status.code().is_none() {
                again
            } else {
                format!("{again}; last words: {words}")
            });
            tokio::select! {
                () = tokio::time::sleep(wait) => {}
                () = self.stop.cancelled() => break,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    /// None of these takes a second on a machine that works.
    const PATIENCE_OF_TESTS: Duration = Duration::from_secs(60);

    fn program(folder: &Path, name: &str, script: &str) -> Program {
        Program {
            name: name.into(),
            path: "/bin/sh".into(),
            arguments: vec!["-c".into(), script.into()],
            environment: Vec::new(),
            maker: Maker::Ours,
            log: folder.join(format!("{name}.log")),
        }
    }

    fn keep(supervisor: &mut Supervisor, folder: &Path, name: &str, script: &str) -> Arc<Health> {
        let process = Process {
            name: name.into(),
            role: "decode".into(),
            pid: 0,
            address: "a".into(),
        };
        supervisor.keep(program(folder, name, script), process)
    }

    /// Ends with its end, and fails when it has none.
    async fn bounded<T>(what: impl Future<Output = T>) -> T {
        tokio::time::timeout(PATIENCE_OF_TESTS, what).await.unwrap()
    }

    /// Looks again and again until there is something.
    async fn seen<T>(mut look: impl FnMut() -> Option<T>) -> T {
        bounded(async {
            loop {
                if let Some(found) = look() {
                    return found;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        })
        .await
    }

    /// Process ids of these children, once all run.
    async fn pids(folder: &Path, names: &[&str]) -> Vec<u32> {
        seen(|| {
            let running = Processes::read(folder).unwrap();
            let pid =
                |name: &&str| Some(running.iter().find(|process| process.name == **name)?.pid);
            names.iter().map(pid).collect()
        })
        .await
    }

    fn supervisor(folder: &Path) -> Supervisor {
        Supervisor::new(Arc::new(Processes::new(folder).unwrap()))
    }

    #[tokio::test]
    async fn a_child_that_never_served_is_given_up_with_its_last_words_and_the_others_are_ended() {
        let folder = tempfile::tempdir().unwrap();
        let mut supervisor = supervisor(folder.path());
        keep(&mut supervisor, folder.path(), "other", "exec sleep 1000");
        let [other] = pids(folder.path(), &["other"]).await[..] else {
            panic!("one child")
        };
        let script = "echo 'error: no such model' >&2; exit 1";
        keep(&mut supervisor, folder.path(), "worker", script);
        let error = bounded(supervisor.failed()).await.to_string();
        assert_eq!(
            error,
            "worker ended with status 1 before it was ready: error: no such model"
        );
        assert_eq!(pids(folder.path(), &["other"]).await, [other], "it runs on");
        bounded(supervisor.end()).await;
        assert_eq!(Processes::read(folder.path()).unwrap(), []);
        assert!(!Path::new(&format!("/proc/{other}")).exists());
    }

    #[tokio::test]
    async fn a_child_that_served_is_started_again_and_the_others_are_not() {
        let folder = tempfile::tempdir().unwrap();
        let mut supervisor = supervisor(folder.path());
        let other = keep(&mut supervisor, folder.path(), "other", "exec sleep 1000");
        other.has_served();
        // It waits for a word that comes once it was said to have served, then crashes.
        let script = format!(
            "while [ ! -e {0}/go ]; do sleep 0.01; done; exit 9",
            folder.path().display()
        );
        let health = keep(&mut supervisor, folder.path(), "worker", &script);
        health.has_served();
        let before = pids(folder.path(), &["other", "worker"]).await;
        std::fs::write(folder.path().join("go"), "").unwrap();
        seen(|| (health.starts() >= 2).then_some(())).await;
        assert_eq!(other.starts(), 1);
        assert_eq!(pids(folder.path(), &["other"]).await, before[..1]);
        bounded(supervisor.end()).await;
        assert_eq!(Processes::read(folder.path()).unwrap(), []);
    }

    #[tokio::test]
    async fn all_children_are_ended_together_also_one_that_will_not() {
        let folder = tempfile::tempdir().unwrap();
        let mut supervisor = supervisor(folder.path());
        keep(&mut supervisor, folder.path(), "meek", "exec sleep 1000");
        let stubborn = format!(
            "trap '' TERM; touch {}/deaf; while :; do sleep 0.05; done",
            folder.path().display()
        );
        keep(&mut supervisor, folder.path(), "stubborn", &stubborn);
        let pids = pids(folder.path(), &["meek", "stubborn"]).await;
        seen(|| folder.path().join("deaf").exists().then_some(())).await;
        let hurry = supervisor.hurry();
        tokio::join!(bounded(supervisor.end()), async { hurry.cancel() });
        for pid in pids {
            assert!(!Path::new(&format!("/proc/{pid}")).exists());
        }
        assert_eq!(Processes::read(folder.path()).unwrap(), []);
    }

    /// Whether a process runs; one that was ended and not yet waited for does not.
    fn runs(pid: &str) -> bool {
        let state = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let after = state.rsplit_once(") ").map_or("", |(_, after)| after);
        !after.is_empty() && !after.starts_with('Z')
    }

    #[tokio::test]
    async fn what_a_crashed_program_of_others_made_is_ended_before_it_is_started_again() {
        let folder = tempfile::tempdir().unwrap();
        let mut supervisor = supervisor(folder.path());
        // Each start leaves a process behind and crashes once it may.
        let script = format!(
            "sleep 1000 & echo $! >> {0}/left; while [ ! -e {0}/go ]; do sleep 0.01; done; rm {0}/go; exit 9",
            folder.path().display()
        );
        let mut program = program(folder.path(), "engine", &script);
        program.maker = Maker::Others;
        let process = Process {
            name: "engine".into(),
            role: "engine".into(),
            pid: 0,
            address: "a".into(),
        };
        let health = supervisor.keep_beneath(program, process);
        health.has_served();
        let left = || -> Vec<String> {
            let text = std::fs::read_to_string(folder.path().join("left")).unwrap_or_default();
            text.lines().map(ToOwned::to_owned).collect()
        };
        let first = seen(|| left().first().cloned()).await;
        assert!(runs(&first));
        std::fs::write(folder.path().join("go"), "").unwrap();
        let second = seen(|| left().get(1).cloned()).await;
        assert!(!runs(&first), "the first start's process runs on");
        assert!(runs(&second));
        bounded(supervisor.end()).await;
        assert!(!runs(&second), "it runs on after the end");
    }

    #[tokio::test]
    async fn what_is_beneath_ends_when_those_above_have_ended() {
        let folder = tempfile::tempdir().unwrap();
        let mut supervisor = supervisor(folder.path());
        let at = folder.path().display();
        // On its end each says whether the other still runs.
        let script = |own: &str, other: &str| {
            format!(
                "echo $$ > {at}/{own}; trap 'kill -0 $(cat {at}/{other}) && echo both >> {at}/{own}.end || echo alone >> {at}/{own}.end; exit 0' TERM; while :; do sleep 0.01; done"
            )
        };
        let above = keep(
            &mut supervisor,
            folder.path(),
            "above",
            &script("above", "beneath"),
        );
        above.has_served();
        let process = Process {
            name: "beneath".into(),
            role: "engine".into(),
            pid: 0,
            address: "a".into(),
        };
        let program = program(folder.path(), "beneath", &script("beneath", "above"));
        supervisor.keep_beneath(program, process).has_served();
        let read = |name: &str| std::fs::read_to_string(folder.path().join(name)).ok();
        seen(|| read("above").zip(read("beneath"))).await;
        pids(folder.path(), &["above", "beneath"]).await;
        bounded(supervisor.end()).await;
        assert_eq!(read("above.end").as_deref(), Some("both\n"));
        assert_eq!(read("beneath.end").as_deref(), Some("alone\n"));
    }
}
