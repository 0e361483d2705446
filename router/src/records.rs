//! Decision records: built and written by a thread of their own, from a bounded queue.
//!
//! - [`build`]: a record from what a run leaves behind.
//! - [`files`]: rotated files, and coefficient sets and policies by digest beside them.
//! - [`recent`]: the last ones, for the admin interface.

pub mod build;
pub mod files;
pub mod recent;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

use baton_placement::fleet::Fleet;
use baton_placement::record::DecisionRecord;
use baton_system::threads::Threads;
use parking_lot::Mutex;
use tracing::{error, warn};

use crate::clock::Clock;
use crate::learning::Learning;
use crate::metrics::{EstimateLabels, Metrics};
use build::Material;
use files::{DigestFolder, Lost, RecordFiles, Rotation};
use recent::{Recent, RecentRecord};

/// Runs whose record waits for the writer: two seconds of 2,000 requests a second, some tens of megabytes at most.
const QUEUE: usize = 4096;

/// After the records of a busy moment the writer leaves the queue alone for so long. A run that ends meanwhile does not have to wake
/// it, which costs the run's thread more than the way into the queue; a run that ends in quiet is written at once.
const PAUSE: Duration = Duration::from_millis(5);

/// A state folder that cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("state folder {path} cannot be written: {source}; give another one with --state-dir")]
pub struct StateFolderError {
    pub path: PathBuf,
    pub source: io::Error,
}

/// The entrance of the writer.
#[derive(Debug)]
pub struct Records {
    entrance: Mutex<Entrance>,
    metrics: Arc<Metrics>,
    state: PathBuf,
    pub recent: Arc<Recent>,
}

/// The way to the writer.
#[derive(Debug)]
enum Entrance {
    Thread {
        queue: SyncSender<Box<Material>>,
        writer: JoinHandle<()>,
    },
    /// Where there are no threads: written at once.
    Here(Box<Writer>),
    Closed,
}

/// What records name by digest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Named {
    Coefficients,
    Policy,
}

impl Named {
    /// The folder beside the records.
    fn folder(self) -> &'static str {
        match self {
            Self::Coefficients => "coefficients",
            Self::Policy => "policies",
        }
    }
}

impl Records {
    /// Makes the folders, opens a file and starts the writer's thread, where there are threads.
    pub fn start(
        state: &Path,
        clock: Clock,
        metrics: Arc<Metrics>,
        learning: Arc<Learning>,
        threads: Threads,
    ) -> Result<Self, StateFolderError> {
        let failed = |source: io::Error| StateFolderError {
            path: state.to_owned(),
            source,
        };
        let folder = |name: &str| -> Result<PathBuf, StateFolderError> {
            let path = state.join(name);
            std::fs::create_dir_all(&path).map_err(failed)?;
            Ok(path)
        };
        let files = RecordFiles::open(folder("decisions")?, Rotation::default(), clock.now())
            .map_err(failed)?;
        let recent = Arc::new(Recent::default());
        let writer = Writer {
            files,
            coefficients: DigestFolder::new(folder("coefficients")?),
            policies: DigestFolder::new(folder("policies")?),
            recent: recent.clone(),
            clock,
            learning,
            metrics: metrics.clone(),
            complained: false,
            well: true,
        };
        let entrance = match threads {
            Threads::Absent => Entrance::Here(Box::new(writer)),
            Threads::Machine => {
                let (queue, materials) = sync_channel(QUEUE);
                let thread = std::thread::Builder::new()
                    .name("records".to_owned())
                    .spawn(move || writer.run(&materials))
                    .map_err(failed)?;
                Entrance::Thread {
                    queue,
                    writer: thread,
                }
            }
        };
        Ok(Self {
            entrance: Mutex::new(entrance),
            metrics,
            state: state.to_owned(),
            recent,
        })
    }

    /// The JSON of what records name by `digest`; none where it is not kept. Blocks on the disk.
    pub fn named(&self, kind: Named, digest: &str) -> io::Result<Option<Vec<u8>>> {
        if !files::is_digest(digest) {
            return Ok(None);
        }
        let folder = self.state.join(kind.folder());
        match std::fs::read(folder.join(format!("{digest}.json"))) {
            Ok(json) => Ok(Some(json)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Never blocks: what does not fit is counted and lost.
    pub fn keep(&self, material: Material) {
        let kept = match &mut *self.entrance.lock() {
            Entrance::Thread { queue, .. } => queue.try_send(Box::new(material)).is_ok(),
            Entrance::Here(writer) => {
                writer.keep(material);
                writer.flush();
                true
            }
            Entrance::Closed => false,
        };
        if !kept {
            self.metrics.record_overflow.inc();
        }
    }

    /// Writes what waits and ends the thread. Blocks until that is done.
    pub fn finish(&self) {
        let entrance = std::mem::replace(&mut *self.entrance.lock(), Entrance::Closed);
        let Entrance::Thread { queue, writer } = entrance else {
            return;
        };
        drop(queue);
        if writer.join().is_err() {
            error!("the writer of decision records has panicked; the last records may be missing");
        }
    }
}

/// The thread that owns the files.
#[derive(Debug)]
struct Writer {
    files: RecordFiles,
    coefficients: DigestFolder,
    policies: DigestFolder,
    recent: Arc<Recent>,
    clock: Clock,
    learning: Arc<Learning>,
    metrics: Arc<Metrics>,
    complained: bool,
    /// Nothing has failed since the last flush.
    well: bool,
}

impl Writer {
    fn run(mut self, materials: &Receiver<Box<Material>>) {
        while let Ok(material) = materials.recv() {
            self.keep(*material);
            while let Ok(material) = materials.try_recv() {
                self.keep(*material);
            }
            // Nothing waits: readers of the file see everything before this thread sleeps.
            self.flush();
            std::thread::sleep(PAUSE);
        }
    }

    fn keep(&mut self, material: Material) {
        let fleets: Vec<Arc<Fleet>> = std::iter::once(&material.fleet)
            .chain(material.later.iter().map(|later| &later.fleet))
            .cloned()
            .collect();
        let policy = material.policy.clone();
        let record = build::record(material);
        self.compare(&record);
        let json: Arc<str> = match serde_json::to_string(&record) {
            Ok(json) => json.into(),
            Err(error) => {
                let source = error.into();
                return self.complain(&Lost { records: 1, source });
            }
        };
        self.recent.add(RecentRecord::new(&record, json.clone()));
        // Each by itself: what cannot be done for one reason must not cost the record that could be written.
        match self.files.rotate(json.len() + 1, self.clock.now()) {
            Ok(false) => {}
            Ok(true) => {
                let tidied = self.tidy();
                self.check(tidied);
            }
            Err(lost) => self.complain(&lost),
        }
        for fleet in fleets {
            let set = fleet.coefficients.as_ref();
            let stored = self.coefficients.store(&fleet.coefficients_digest, set);
            self.check(stored);
        }
        let stored = self.policies.store(&record.policy.digest, policy.as_ref());
        self.check(stored);
        let appended = self.files.append(json.as_bytes());
        self.check(appended);
    }

    fn flush(&mut self) {
        match self.files.flush() {
            Ok(()) if self.well => self.complained = false,
            Ok(()) => {}
            Err(lost) => self.complain(&lost),
        }
        self.well = true;
    }

    /// A new record file has begun.
    fn tidy(&mut self) -> io::Result<()> {
        let oldest = self.files.oldest()?;
        self.coefficients.next_file(oldest)?;
        self.policies.next_file(oldest)
    }

    /// How far off the estimate was.
    fn compare(&self, record: &DecisionRecord) {
        for error in self.learning.record(record) {
            let labels = EstimateLabels {
                path: error.path.word(),
                term: error.term,
            };
            self.metrics
                .estimate_error
                .get_or_create(&labels)
                .observe(error.ratio);
        }
    }

    fn check(&mut self, outcome: Result<(), impl Into<Lost>>) {
        if let Err(error) = outcome {
            self.complain(&error.into());
        }
    }

    /// A full disk does not stop serving. What it costs is counted, and said once until everything can be written again.
    fn complain(&mut self, lost: &Lost) {
        self.well = false;
        self.metrics.record_overflow.inc_by(lost.records);
        if !std::mem::replace(&mut self.complained, true) {
            warn!(error = %lost, "decision records cannot be written: free space in the state folder");
        }
    }
}

#[cfg(test)]
mod tests;
