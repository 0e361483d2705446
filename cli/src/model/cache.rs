//! The cache of fetched files: where it is, and the digest beside each file.

use std::ffi::OsString;
use std::fs::File;
use std::io::{BufReader, Read};
use std::path::{Path, PathBuf};

use anyhow::Context;

use crate::terminal::note;

/// A file of the cache, whether it is there or not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Cached {
    pub(crate) file: PathBuf,
}

/// The folder that the flag names, else `$XDG_CACHE_HOME/baton`, else `~/.cache/baton`.
///
/// # Errors
/// None of them is given.
pub(crate) fn cache_folder(
    flag: Option<&Path>,
    variable: impl Fn(&str) -> Option<OsString>,
) -> anyhow::Result<PathBuf> {
    let set = |name: &str| {
        variable(name)
            .filter(|value| !value.is_empty())
            .map(PathBuf::from)
    };
    flag.map(Path::to_path_buf)
        .or_else(|| set("XDG_CACHE_HOME").map(|folder| folder.join("baton")))
        .or_else(|| set("HOME").map(|folder| folder.join(".cache/baton")))
        .context("no place for fetched models: set BATON_CACHE or HOME")
}

impl Cached {
    pub(crate) fn of_wheel(cache: &Path, package: &str, version: &str, path: &str) -> Self {
        Self {
            file: cache
                .join("models/pypi")
                .join(package)
                .join(version)
                .join(path),
        }
    }

    fn digest_file(&self) -> PathBuf {
        let mut name = self.file.clone().into_os_string();
        name.push(".blake3");
        PathBuf::from(name)
    }

    /// Whether the file is there and has the digest that it had when it was fetched. One that differs is said and not used.
    pub(crate) fn is_good(&self) -> anyhow::Result<bool> {
        let recorded = match std::fs::read_to_string(self.digest_file()) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(false),
            Err(error) => {
                return Err(error)
                    .with_context(|| format!("cannot read {}", self.digest_file().display()));
            }
        };
        if !self.file.exists() {
            return Ok(false);
        }
        let good = digest(&self.file)? == recorded.trim();
        if !good {
            note(&format!(
                "model: {} is not what was fetched (its digest differs), it is fetched anew",
                self.file.display()
            ));
        }
        Ok(good)
    }

    /// Puts a fetched file into its place. The digest goes first, so that a file without one is never taken for whole.
    pub(crate) fn keep(&self, fetched: &Path) -> anyhow::Result<()> {
        let folder = self.file.parent().context("a cached file has a folder")?;
        std::fs::create_dir_all(folder)
            .with_context(|| format!("cannot make {}", folder.display()))?;
        let digest = digest(fetched)?;
        let partial = self.digest_file().with_extension("blake3.partial");
        std::fs::write(&partial, format!("{digest}\n"))
            .with_context(|| format!("cannot write {}", partial.display()))?;
        std::fs::rename(&partial, self.digest_file())
            .and_then(|()| std::fs::rename(fetched, &self.file))
            .with_context(|| format!("cannot write {}", self.file.display()))
    }
}

fn digest(path: &Path) -> anyhow::Result<String> {
    let file = File::open(path).with_context(|| format!("cannot read {}", path.display()))?;
    let mut reader = BufReader::with_capacity(1 << 20, file);
    let mut hasher = blake3::Hasher::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        let read = reader
            .read(&mut buffer)
            .with_context(|| format!("cannot read {}", path.display()))?;
        if read == 0 {
            return Ok(hasher.finalize().to_hex().to_string());
        }
        hasher.update(&buffer[..read]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_setting_wins() {
        let home = |name: &str| (name == "HOME").then(|| OsString::from("/home/u"));
        assert_eq!(
            cache_folder(None, home).unwrap(),
            Path::new("/home/u/.cache/baton")
        );
        let both = |name: &str| (name != "BATON_CACHE").then(|| OsString::from("/x"));
        assert_eq!(cache_folder(None, both).unwrap(), Path::new("/x/baton"));
        assert_eq!(
            cache_folder(Some(Path::new("/flag")), both).unwrap(),
            Path::new("/flag")
        );
        assert!(cache_folder(None, |_| None).is_err());
    }

    #[test]
    fn a_file_that_changed_is_not_used() {
        let folder = tempfile::tempdir().unwrap();
        let cached = Cached::of_wheel(folder.path(), "p", "1", "p/model.gguf");
        assert!(!cached.is_good().unwrap());
        let fetched = folder.path().join("fetched");
        std::fs::write(&fetched, b"weights").unwrap();
        cached.keep(&fetched).unwrap();
        assert!(cached.is_good().unwrap());
        assert!(!fetched.exists());
        std::fs::write(&cached.file, b"weightz").unwrap();
        assert!(!cached.is_good().unwrap());
        std::fs::remove_file(&cached.file).unwrap();
        assert!(!cached.is_good().unwrap());
    }
}
