//! Record files: one JSON object a line, rotated by size, the oldest deleted; and what records name by digest, stored once.

use std::collections::HashSet;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
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

/// Lines are written when this many bytes wait; the last line of them may be longer.
const PENDING: usize = 64 << 10;

/// The disk took less than it was given.
#[derive(Debug, thiserror::Error)]
#[error("{source}")]
pub struct Lost {
    /// Records that are on no disk now.
    pub records: u64,
    pub source: io::Error,
}

impl From<io::Error> for Lost {
    /// Something else than a record was lost.
    fn from(source: io::Error) -> Self {
        Self { records: 0, source }
    }
}

/// The open file of a folder of record files.
///
/// A disk that is full loses the records that it had no room for, and no others: lines wait whole, and after half a one the next
/// begins on a line of its own.
#[derive(Debug)]
pub struct RecordFiles {
    folder: PathBuf,
    rotation: Rotation,
    file: File,
    /// Whole lines.
    pending: Vec<u8>,
    /// The file ends within a line.
    torn: bool,
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
            pending: Vec::new(),
            torn: false,
            written: 0,
        };
        files.prune()?;
        Ok(files)
    }

    /// Opens the next file where a line of this length would make the present one too long. True: it did. Where no file can be
    /// opened, the present one goes on.
    pub fn rotate(&mut self, line: usize, now: Moment) -> Result<bool, Lost> {
        let full = self.written > 0 && self.written + line as u64 > self.rotation.bytes;
        if full {
            let flushed = self.flush();
            self.file = create(&self.folder, now)?;
            self.torn = false;
            self.written = 0;
            flushed?;
            self.prune()?;
        }
        Ok(full)
    }

    /// Appends one line, which holds no line end.
    pub fn append(&mut self, line: &[u8]) -> Result<(), Lost> {
        self.pending.extend_from_slice(line);
        self.pending.push(b'\n');
        self.written += line.len() as u64 + 1;
        if self.pending.len() >= PENDING {
            return self.flush();
        }
        Ok(())
    }

    /// When the oldest file that is kept was begun, by its name: before anything that its records name was stored.
    pub fn oldest(&self) -> io::Result<Option<SystemTime>> {
        let files = record_files(&self.folder)?;
        let stem = files.first().and_then(|file| file.file_stem()?.to_str());
        Ok(stem.and_then(begun))
    }

    /// Readers see all that was appended, or it is lost.
    pub fn flush(&mut self) -> Result<(), Lost> {
        let (written, outcome) = self.write_pending();
        if let Some(last) = written.checked_sub(1) {
            self.torn = self.pending[last] != b'\n';
        }
        let lost = self.pending[written..].iter();
        let records = lost.filter(|&&byte| byte == b'\n').count() as u64;
        self.pending.clear();
        outcome.map_err(|source| Lost { records, source })
    }

    /// Bytes of `pending` that are in the file now.
    fn write_pending(&mut self) -> (usize, io::Result<()>) {
        if self.torn && !self.pending.is_empty() {
            if let Err(error) = self.file.write_all(b"\n") {
                return (0, Err(error));
            }
            self.torn = false;
        }
        let mut written = 0;
        while written < self.pending.len() {
            match self.file.write(&self.pending[written..]) {
                Ok(0) => return (written, Err(io::ErrorKind::WriteZero.into())),
                Ok(bytes) => written += bytes,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return (written, Err(error)),
            }
        }
        (written, Ok(()))
    }

    fn prune(&mut self) -> io::Result<()> {
        let files = record_files(&self.folder)?;
        let beyond = files.len().saturating_sub(self.rotation.files);
        files.iter().take(beyond).try_for_each(std::fs::remove_file)
    }
}

/// Names sort by time.
fn create(folder: &Path, now: Moment) -> io::Result<File> {
    let name: String = now
        .rfc3339()
        .chars()
        .filter(|letter| *letter != '-' && *letter != ':')
        .collect();
    OpenOptions::new()
        .create(true)
        .append(true)
        .open(folder.join(format!("{name}.jsonl")))
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

    /// A folder whose file of second `second` is a disk without room.
    fn full_at(folder: &Path, second: u64) {
        let probe = tempfile::tempdir().unwrap();
        create(probe.path(), Moment(second * 1_000_000)).unwrap();
        let name = names(probe.path()).remove(0);
        std::os::unix::fs::symlink("/dev/full", folder.join(name)).unwrap();
    }

    #[test]
    fn a_full_disk_loses_what_it_has_no_room_for_and_says_how_many() {
        let folder = tempfile::tempdir().unwrap();
        full_at(folder.path(), 1);
        let rotation = Rotation {
            bytes: 20,
            files: 9,
        };
        let at = |second: u64| Moment(second * 1_000_000);
        let mut files = RecordFiles::open(folder.path().to_owned(), rotation, at(1)).unwrap();
        files.append(b"1111").unwrap();
        files.append(b"2222").unwrap();
        let lost = files.flush().unwrap_err();
        assert_eq!(lost.records, 2);
        assert!(lost.to_string().contains("No space left"), "{lost}");
        assert!(files.flush().is_ok(), "nothing waits any more");
        // The next file has room. What waited for the full one is lost, what comes then is not.
        files.append(b"3333333333").unwrap();
        assert_eq!(files.rotate(10, at(2)).unwrap_err().records, 1);
        files.append(b"4444444444").unwrap();
        files.flush().unwrap();
        let last = std::fs::read_to_string(folder.path().join("19700101T000002.000000Z.jsonl"));
        assert_eq!(last.unwrap(), "4444444444\n");
    }

    #[test]
    fn a_file_that_cannot_be_opened_leaves_the_present_one_in_use() {
        let folder = tempfile::tempdir().unwrap();
        let rotation = Rotation {
            bytes: 20,
            files: 9,
        };
        let at = |second: u64| Moment(second * 1_000_000);
        let mut files = RecordFiles::open(folder.path().to_owned(), rotation, at(1)).unwrap();
        // Its name is taken by a folder.
        std::fs::create_dir(folder.path().join("19700101T000002.000000Z.jsonl")).unwrap();
        for second in [1, 2, 2] {
            let rotated = files.rotate(12, at(second));
            assert_eq!(rotated.is_err(), second == 2);
            files.append(b"012345678901").unwrap();
        }
        files.flush().unwrap();
        let first = std::fs::read_to_string(folder.path().join("19700101T000001.000000Z.jsonl"));
        assert_eq!(first.unwrap().lines().count(), 3);
    }

    #[test]
    fn after_half_a_line_the_next_record_has_a_line_of_its_own() {
        let folder = tempfile::tempdir().unwrap();
        let at = Moment(1_000_000);
        let mut files =
            RecordFiles::open(folder.path().to_owned(), Rotation::default(), at).unwrap();
        files.append(b"half").unwrap();
        // As after a write that took the first bytes only.
        files.file.write_all(b"ha").unwrap();
        files.pending.clear();
        files.torn = true;
        files.append(b"whole").unwrap();
        files.flush().unwrap();
        let text = std::fs::read_to_string(folder.path().join("19700101T000001.000000Z.jsonl"));
        assert_eq!(text.unwrap(), "ha\nwhole\n");
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
