//! The state directory: made, held by one `baton up` at a time, and the deployment's hash key in it.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};

/// Held until dropped.
#[derive(Debug)]
pub(crate) struct StateDir {
    pub(crate) path: PathBuf,
    _lock: File,
}

impl StateDir {
    /// Makes the folder and what belongs in it.
    ///
    /// # Errors
    /// It cannot be written, or another `baton up` holds it.
    pub(crate) fn open(path: &Path) -> anyhow::Result<Self> {
        let unusable = || {
            format!(
                "cannot write the state directory {}: give another one with --state-dir",
                path.display()
            )
        };
        for folder in ["logs", "decisions", "configuration"] {
            std::fs::create_dir_all(path.join(folder)).with_context(unusable)?;
        }
        let path = path.canonicalize().with_context(unusable)?;
        let lock = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .open(path.join("lock"))
            .with_context(unusable)?;
        match lock.try_lock() {
            Ok(()) => Ok(Self { path, _lock: lock }),
            Err(TryLockError::WouldBlock) => bail!(
                "another baton up uses the state directory {}: end it or give another one with --state-dir",
                path.display()
            ),
            Err(TryLockError::Error(error)) => Err(error).with_context(unusable),
        }
    }

    pub(crate) fn log(&self, name: &str) -> PathBuf {
        self.path.join("logs").join(format!("{name}.log"))
    }

    /// The file with the key of the block hashes, made at the first start: 32 random bytes in hexadecimal, for the owner only.
    pub(crate) fn hash_key(
        &self,
        random: impl FnOnce(&mut [u8]) -> anyhow::Result<()>,
    ) -> anyhow::Result<PathBuf> {
        let file = self.path.join("hash.key");
        if file.exists() {
            return Ok(file);
        }
        let mut key = [0; 32];
        random(&mut key)?;
        let digits: String = key.iter().map(|byte| format!("{byte:02x}")).collect();
        let partial = self.path.join("hash.key.partial");
        // A partial file of a start that was killed may have any rights: it is not written into.
        let _ = std::fs::remove_file(&partial);
        OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&partial)
            .and_then(|mut open| writeln!(open, "{digits}"))
            .and_then(|()| std::fs::rename(&partial, &file))
            .with_context(|| format!("cannot write {}", file.display()))?;
        Ok(file)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn one_at_a_time() {
        let folder = tempfile::tempdir().unwrap();
        let first = StateDir::open(folder.path()).unwrap();
        let error = StateDir::open(folder.path()).unwrap_err().to_string();
        assert!(
            error.starts_with("another baton up uses the state directory"),
            "{error}"
        );
        drop(first);
        StateDir::open(folder.path()).unwrap();
    }

    #[test]
    fn a_place_that_cannot_be_written_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        std::fs::write(&file, "").unwrap();
        let error = StateDir::open(&file.join("state")).unwrap_err().to_string();
        assert!(
            error.starts_with("cannot write the state directory"),
            "{error}"
        );
    }

    #[test]
    fn the_key_is_made_once_and_for_the_owner_only() {
        let folder = tempfile::tempdir().unwrap();
        let state = StateDir::open(folder.path()).unwrap();
        let file = state
            .hash_key(|key| {
                key.fill(0xab);
                Ok(())
            })
            .unwrap();
        assert_eq!(
            std::fs::read_to_string(&file).unwrap(),
            format!("{}\n", "ab".repeat(32))
        );
        assert_eq!(
            std::fs::metadata(&file).unwrap().permissions().mode() & 0o777,
            0o600
        );
        let again = state
            .hash_key(|_| anyhow::bail!("asked for randomness again"))
            .unwrap();
        assert_eq!(again, file);
    }
}
