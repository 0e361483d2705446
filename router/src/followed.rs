//! Files that are read again when they change: a version that cannot be used leaves the last good one in force. The one way in
//! which policies, workers, API keys and certificates are followed.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

/// How often the files are looked at.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// Larger ones are none of what is followed.
const LARGEST_FILE: u64 = 16 << 20;

/// Contents of all files, in order.
type Contents = Vec<Vec<u8>>;

/// Makes a value of the files' contents and of the value in force, if there is one; otherwise says what is wrong.
type Read<T> = dyn Fn(&[Vec<u8>], Option<&T>) -> Result<T, String> + Send + Sync;

/// Files that cannot be used at the start.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what}: {reason}")]
pub struct Unusable {
    what: &'static str,
    reason: String,
}

/// What some files say, kept current.
pub struct Followed<T> {
    /// For messages: `API keys`.
    what: &'static str,
    files: Vec<PathBuf>,
    read: Box<Read<T>>,
    in_force: ArcSwap<T>,
    seen: Mutex<Seen>,
}

/// What was found last.
#[derive(Debug)]
struct Seen {
    contents: Option<Contents>,
    refused: Option<String>,
}

impl<T> fmt::Debug for Followed<T> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Followed")
            .field("what", &self.what)
            .field("files", &self.files)
            .finish_non_exhaustive()
    }
}

impl<T: Send + Sync + 'static> Followed<T> {
    /// Reads the files for the first time.
    ///
    /// # Errors
    /// They cannot be read or used.
    pub fn open(
        what: &'static str,
        files: Vec<PathBuf>,
        read: impl Fn(&[Vec<u8>], Option<&T>) -> Result<T, String> + Send + Sync + 'static,
    ) -> Result<Self, Unusable> {
        let unusable = |reason| Unusable { what, reason };
        let contents = contents(&files).map_err(unusable)?;
        let first = read(&contents, None).map_err(unusable)?;
        Ok(Self {
            what,
            files,
            read: Box::new(read),
            in_force: ArcSwap::from_pointee(first),
            seen: Mutex::new(Seen {
                contents: Some(contents),
                refused: None,
            }),
        })
    }

    pub fn in_force(&self) -> Arc<T> {
        self.in_force.load_full()
    }

    /// Why what the files say now is not in force.
    pub fn refused(&self) -> Option<String> {
        self.seen.lock().refused.clone()
    }

    /// Follows the files until it is stopped.
    pub async fn follow(self: Arc<Self>, stop: CancellationToken) {
        self.follow_telling(stop, |_| {}).await;
    }

    /// Follows the files until it is stopped, and calls `told` after each change of what is in force or refused.
    pub async fn follow_telling(
        self: Arc<Self>,
        stop: CancellationToken,
        mut told: impl FnMut(&Self) + Send,
    ) {
        let mut ticks = tokio::time::interval(LOOK_EVERY);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                _ = ticks.tick() => if self.look() {
                    told(&self);
                },
            }
        }
    }

    /// Reads the files again. What did not change is not parsed; a fault is logged once. True when something else is in force or
    /// refused than before.
    pub fn look(&self) -> bool {
        let mut seen = self.seen.lock();
        let found = contents(&self.files);
        let read = match &found {
            Ok(found) if seen.contents.as_ref() == Some(found) => return false,
            Ok(found) => (self.read)(found, Some(&*self.in_force())),
            Err(reason) => Err(reason.clone()),
        };
        seen.contents = found.ok();
        match read {
            Ok(value) => {
                self.in_force.store(Arc::new(value));
                seen.refused = None;
                info!("{}: what the files say now is in force", self.what);
            }
            Err(reason) if seen.refused.as_ref() == Some(&reason) => return false,
            Err(reason) => {
                warn!(
                    "{}: {reason}; the last good version stays in force",
                    self.what
                );
                seen.refused = Some(reason);
            }
        }
        true
    }
}

fn contents(files: &[PathBuf]) -> Result<Contents, String> {
    files
        .iter()
        .map(|path| {
            let told = |error: std::io::Error| {
                format!("{}: {error}: give a readable file", path.display())
            };
            let size = std::fs::metadata(path).map_err(told)?.len();
            if size > LARGEST_FILE {
                return Err(format!(
                    "{} has {size} bytes: at most {LARGEST_FILE} are read",
                    path.display()
                ));
            }
            std::fs::read(path).map_err(told)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn number(contents: &[Vec<u8>], before: Option<&u32>) -> Result<u32, String> {
        let text = String::from_utf8_lossy(&contents[0]).into_owned();
        let number: u32 = text.trim().parse().map_err(|_| format!("{text:?}"))?;
        Ok(number + before.copied().unwrap_or(0))
    }

    #[test]
    fn the_last_good_version_stays_until_there_is_a_better_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("number");
        std::fs::write(&path, "1").unwrap();
        let followed = Followed::open("numbers", vec![path.clone()], number).unwrap();
        assert!(!followed.look(), "what is the same is not read again");
        assert_eq!(*followed.in_force(), 1);
        for (text, then) in [("x", 1), ("5", 6), ("", 6), ("5", 11)] {
            std::fs::write(&path, text).unwrap();
            assert!(followed.look(), "{text:?}");
            assert_eq!(*followed.in_force(), then, "{text:?}");
            assert_eq!(followed.refused().is_some(), text.parse::<u32>().is_err());
            assert!(!followed.look(), "{text:?} is told once");
        }
        std::fs::remove_file(&path).unwrap();
        assert!(followed.look());
        assert_eq!(*followed.in_force(), 11);
        assert!(followed.refused().is_some());
        // The same contents as before it was gone: what is said of it is true again.
        std::fs::write(&path, "5").unwrap();
        assert!(followed.look());
        assert_eq!(followed.refused(), None);
    }

    #[test]
    fn files_that_are_missing_or_wrong_at_the_start_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("number");
        let open = || Followed::open("numbers", vec![path.clone()], number);
        let error = open().unwrap_err().to_string();
        assert!(
            error.contains("numbers: ") && error.contains("/number: "),
            "{error}"
        );
        std::fs::write(&path, "x").unwrap();
        assert_eq!(open().unwrap_err().to_string(), "numbers: \"x\"");
    }
}
