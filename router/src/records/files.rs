//! Record files: one JSON object a line, rotated by size, the oldest deleted; and what records name by digest, stored once.

use std::collections::HashSet;
use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

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

    /// Opens the next file where a line of this length would make the present one too long. True: it did.
    pub fn rotate(&mut self, line: usize, now: Moment) -> io::Result<bool> {
        let full = self.written > 0 && self.written + line as u64 > self.rotation.bytes;
        if full {
            self.file.flush()?;
            self.file = create(&self.folder, now)?;
            self.written = 0;
            self.prune()?;
        }
        Ok(full)
    }

    /// Appends one line.
    pub fn append(&mut self, line: &[u8]) -> io::Result<()> {
        self.file.write_all(line)?;
        self.file.write_all(b"\n")?;
        self.written += line.len() as u64 + 1;
        Ok(())
    }

    /// When the oldest file that is kept was begun, by its name: before anything that its records name was stored.
    pub fn oldest(&self) -> io::Result<Option<SystemTime>> {
        let files = record_files(&self.folder)?;
        let stem = files.first().and_then(|file| file.file_stem()?.to_str());
        Ok(stem.and_then(begun))
    }

    /// Readers see all that was appended.
    pub fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }

    fn prune(&mut self) -> io::Result<()> {
        let files = record_files(&self.folder)?;
        let beyond = files.len().saturating_sub(self.rotation.files);
        files.iter().take(beyond).try_for_each(std::fs::remove_file)
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

/// The time that a file's name says; none where somebody else named it.
fn begun(stem: &str) -> Option<SystemTime> {
    let time = jiff::civil::DateTime::strptime("%Y%m%dT%H%M%S%.fZ", stem).ok()?;
    let zoned = time.to_zoned(jiff::tz::TimeZone::UTC).ok()?;
    Some(SystemTime::from(zoned.timestamp()))
}

/// Oldest first.
fn record_files(folder: &Path) -> io::Result<Vec<PathBuf>> {
    files_of(folder, "jsonl")
}

fn files_of(folder: &Path, extension: &str) -> io::Result<Vec<PathBuf>> {
    let mut names: Vec<PathBuf> = std::fs::read_dir(folder)?
        .filter_map(|entry| entry.ok().map(|entry| entry.path()))
        .filter(|path| path.extension().is_some_and(|found| found == extension))
        .collect();
    names.sort();
    Ok(names)
}

/// What a digest looks like: nothing else becomes a file name.
pub fn is_digest(text: &str) -> bool {
    (1..=64).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// A folder of `<digest>.json`, each written once and touched once per record file that names it: what no kept file can name is
/// deleted.
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

    /// A new record file begins: what it names is touched anew, and what was last touched before `oldest` is deleted.
    pub fn next_file(&mut self, oldest: Option<SystemTime>) -> io::Result<()> {
        self.known.clear();
        let Some(oldest) = oldest else { return Ok(()) };
        for file in files_of(&self.folder, "json")? {
            if std::fs::metadata(&file)?.modified()? < oldest {
                std::fs::remove_file(&file)?;
            }
        }
        Ok(())
    }

    /// Writes it unless it is there. Whole or not at all.
    pub fn store(&mut self, digest: &str, value: &impl serde::Serialize) -> io::Result<()> {
        if self.known.contains(digest) {
            return Ok(());
        }
        let path = self.folder.join(format!("{digest}.json"));
        if path.exists() {
            File::options()
                .append(true)
                .open(&path)?
                .set_modified(SystemTime::now())?;
        } else {
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
            files.rotate(10, at(second)).unwrap();
            files.append(b"0123456789").unwrap();
        }
        files.flush().unwrap();
        assert_eq!(
            files.oldest().unwrap(),
            Some(SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(1_764_438_304))
        );
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

    #[test]
    fn what_no_kept_record_can_name_is_deleted() {
        let folder = tempfile::tempdir().unwrap();
        let mut digests = DigestFolder::new(folder.path().to_owned());
        let age = |name: &str, by: u64| {
            let file = File::options()
                .append(true)
                .open(folder.path().join(name))
                .unwrap();
            let then = SystemTime::now() - std::time::Duration::from_secs(by);
            file.set_modified(then).unwrap();
        };
        let minute_ago = Some(SystemTime::now() - std::time::Duration::from_secs(60));
        for digest in ["aa", "bb", "cc"] {
            digests.store(digest, &1).unwrap();
            age(&format!("{digest}.json"), 100);
        }
        // Named again by a newer file.
        digests.next_file(None).unwrap();
        digests.store("bb", &1).unwrap();
        digests.next_file(minute_ago).unwrap();
        assert_eq!(names(folder.path()), ["bb.json"]);
    }

    #[test]
    fn only_a_digest_becomes_a_file_name() {
        assert!(is_digest("00ff"));
        for text in ["", "..", "../etc", "ab.json", &"0".repeat(65)] {
            assert!(!is_digest(text), "{text}");
        }
    }
}
