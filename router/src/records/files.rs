//! Record files: one JSON object a line, rotated by size, the oldest deleted; and what records name by digest, stored once.

use std::collections::HashSet;
use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use crate::clock::Moment;

/// How much is kept.
#[derive(Clone, Copy, Debug)]
pub struct Rotation {
    /// A file is closed once it is this large.
    pub bytes: u64,
    /// Files kept, the open one included.
    pub files: usize,
}

impl Default for Rotation {
    /// 256 MiB in all: about 60,000 decisions of a small fleet at 4 KiB each.
    fn default() -> Self {
        Self {
            bytes: 16 << 20,
            files: 16,
        }
    }
}

/// The open file of a folder of record files.
#[derive(Debug)]
pub struct RecordFiles {
    folder: PathBuf,
    rotation: Rotation,
    file: BufWriter<File>,
    written: u64,
}

impl RecordFiles {
    /// Opens a new file in `folder`, which exists.
    pub fn open(folder: PathBuf, rotation: Rotation, now: Moment) -> io::Result<Self> {
        let file = create(&folder, now)?;
        let mut files = Self {
            folder,
            rotation,
            file,
            written: 0,
        };
        files.prune()?;
        Ok(files)
    }

    /// Appends one line.
    pub fn append(&mut self, line: &[u8], now: Moment) -> io::Result<()> {
        if self.written > 0 && self.written + line.len() as u64 > self.rotation.bytes {
            self.file.flush()?;
            self.file = create(&self.folder, now)?;
            self.written = 0;
            self.prune()?;
        }
        self.file.write_all(line)?;
        self.file.write_all(b"\n")?;
        self.written += line.len() as u64 + 1;
        Ok(())
    }

    /// Readers see all that was appended.
    pub fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }

    fn prune(&mut self) -> io::Result<()> {
        prune(&self.folder, "jsonl", self.rotation.files)
    }
}

/// Names sort by time.
fn create(folder: &Path, now: Moment) -> io::Result<BufWriter<File>> {
    let name: String = now
        .rfc3339()
        .chars()
        .filter(|letter| *letter != '-' && *letter != ':')
        .collect();
    let file = OpenOptions::new()
        .create(true)
        .append(true)
        .open(folder.join(format!("{name}.jsonl")))?;
    Ok(BufWriter::new(file))
}

/// Deletes the oldest files of this extension beyond `keep`, by name.
fn prune(folder: &Path, extension: &str, keep: usize) -> io::Result<()> {
    let mut names: Vec<PathBuf> = std::fs::read_dir(folder)?
        .filter_map(|entry| entry.ok().map(|entry| entry.path()))
        .filter(|path| path.extension().is_some_and(|found| found == extension))
        .collect();
    names.sort();
    for path in names.iter().take(names.len().saturating_sub(keep)) {
        std::fs::remove_file(path)?;
    }
    Ok(())
}

/// A folder of `<digest>.json`, each written once.
#[derive(Debug)]
pub struct DigestFolder {
    folder: PathBuf,
    known: HashSet<String>,
}

impl DigestFolder {
    pub fn new(folder: PathBuf) -> Self {
        Self {
            folder,
            known: HashSet::new(),
        }
    }

    /// Writes it unless it is there. Whole or not at all.
    pub fn store(&mut self, digest: &str, value: &impl serde::Serialize) -> io::Result<()> {
        if self.known.contains(digest) {
            return Ok(());
        }
        let path = self.folder.join(format!("{digest}.json"));
        if !path.exists() {
            let partial = self
                .folder
                .join(format!("{digest}.{}.partial", std::process::id()));
            std::fs::write(&partial, serde_json::to_vec(value)?)?;
            std::fs::rename(&partial, &path)?;
        }
        self.known.insert(digest.to_owned());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let mut names: Vec<String> = std::fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn files_are_rotated_by_size_and_the_oldest_are_deleted() {
        let folder = tempfile::tempdir().unwrap();
        let rotation = Rotation {
            bytes: 20,
            files: 2,
        };
        let at = |second: u64| Moment(1_764_438_300_000_000 + second * 1_000_000);
        let mut files = RecordFiles::open(folder.path().to_owned(), rotation, at(0)).unwrap();
        for second in 1..6 {
            files.append(b"0123456789", at(second)).unwrap();
        }
        files.flush().unwrap();
        assert_eq!(
            names(folder.path()),
            [
                "20251129T174504.000000Z.jsonl",
                "20251129T174505.000000Z.jsonl"
            ]
        );
        let last = std::fs::read_to_string(folder.path().join("20251129T174505.000000Z.jsonl"));
        assert_eq!(last.unwrap(), "0123456789\n");
    }

    #[test]
    fn what_has_a_digest_is_written_once() {
        let folder = tempfile::tempdir().unwrap();
        let mut digests = DigestFolder::new(folder.path().to_owned());
        digests.store("ab", &1).unwrap();
        std::fs::write(folder.path().join("ab.json"), "kept").unwrap();
        digests.store("ab", &2).unwrap();
        DigestFolder::new(folder.path().to_owned())
            .store("ab", &3)
            .unwrap();
        assert_eq!(names(folder.path()), ["ab.json"]);
        assert_eq!(
            std::fs::read_to_string(folder.path().join("ab.json")).unwrap(),
            "kept"
        );
    }
}
