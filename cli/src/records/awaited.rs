//! The record of a run that goes on: waited for where records are written, each byte of them read once.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail};
use baton_placement::record::DecisionRecord;

use super::{Records, files};

/// Between two looks.
const POLL: Duration = Duration::from_millis(50);

/// Records written from a moment on.
#[derive(Debug)]
pub(crate) struct Awaited<'a> {
    records: &'a Records,
    /// How far each file has been read.
    read: BTreeMap<PathBuf, u64>,
}

impl<'a> Awaited<'a> {
    /// From now on: made before a request is sent, it sees the request's record and none before.
    pub(crate) fn from_now(records: &'a Records) -> Self {
        let files = match records {
            // A folder that cannot be read is said when its record is wanted.
            Records::StateDir(folder) => files(folder).unwrap_or_default(),
            Records::Router(_) => Vec::new(),
        };
        let length = |file: &Path| file.metadata().map_or(0, |metadata| metadata.len());
        Self {
            records,
            read: files
                .into_iter()
                .map(|file| (file.clone(), length(&file)))
                .collect(),
        }
    }

    /// The record of a run, once the run has ended.
    ///
    /// # Errors
    /// It is not there within this time, or records cannot be read.
    pub(crate) async fn record(
        &mut self,
        run: &str,
        within: Duration,
    ) -> anyhow::Result<DecisionRecord> {
        let wait = async {
            loop {
                let found = match self.records {
                    Records::StateDir(folder) => self.look(folder, run)?,
                    Records::Router(_) => self.records.find(run).await?,
                };
                if let Some(record) = found.filter(|record| record.outcome.is_some()) {
                    return Ok(record);
                }
                tokio::time::sleep(POLL).await;
            }
        };
        match tokio::time::timeout(within, wait).await {
            Ok(found) => found,
            Err(_) => bail!("no record of run {run} after {} s", within.as_secs()),
        }
    }

    /// Reads what has been written since the last look.
    fn look(&mut self, folder: &Path, run: &str) -> anyhow::Result<Option<DecisionRecord>> {
        for file in files(folder)? {
            let read = self.read.entry(file.clone()).or_default();
            let lines = whole_lines(&file, read)
                .with_context(|| format!("cannot read {}", file.display()))?;
            let found = lines
                .split(|byte| *byte == b'\n')
                .filter_map(|line| serde_json::from_slice::<DecisionRecord>(line).ok())
                .find(|record| record.run.0 == run);
            if found.is_some() {
                return Ok(found);
            }
        }
        Ok(None)
    }
}

/// What stands in a file behind `read`, up to the end of the last whole line; `read` is moved there.
fn whole_lines(file: &Path, read: &mut u64) -> std::io::Result<Vec<u8>> {
    let mut file = File::open(file)?;
    if file.metadata()?.len() < *read {
        // Cut off meanwhile: what is there now is new.
        *read = 0;
    }
    file.seek(SeekFrom::Start(*read))?;
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes)?;
    let whole = bytes
        .iter()
        .rposition(|byte| *byte == b'\n')
        .map_or(0, |end| end + 1);
    bytes.truncate(whole);
    *read += whole as u64;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;
    use crate::explain::sample::line;

    fn append(file: &Path, text: &str) {
        let mut file = File::options()
            .append(true)
            .create(true)
            .open(file)
            .unwrap();
        file.write_all(text.as_bytes()).unwrap();
    }

    #[test]
    fn a_record_is_seen_when_its_line_is_whole_and_what_was_read_is_not_read_again() {
        let folder = tempfile::tempdir().unwrap();
        let decisions = folder.path().join("decisions");
        std::fs::create_dir(&decisions).unwrap();
        let (first, second) = (decisions.join("1.jsonl"), decisions.join("2.jsonl"));
        append(&first, &format!("{}\n", line("r0-old")));
        let records = Records::StateDir(folder.path().to_owned());
        let mut awaited = Awaited::from_now(&records);
        let mut look = |run: &str| {
            awaited
                .look(folder.path(), run)
                .unwrap()
                .map(|record| record.run.0)
        };
        assert_eq!(look("r0-old"), None, "it was there before");
        let text = line("r0-a");
        append(&first, &text[..40]);
        assert_eq!(look("r0-a"), None);
        append(&first, &format!("{}\n", &text[40..]));
        append(&second, &format!("{}\n", line("r0-b")));
        assert_eq!(look("r0-a").as_deref(), Some("r0-a"));
        assert_eq!(
            look("r0-b").as_deref(),
            Some("r0-b"),
            "in a file that began later"
        );
        assert_eq!(look("r0-a"), None, "it is behind what was read");
        std::fs::write(&first, format!("{}\n", line("r0-c"))).unwrap();
        assert_eq!(look("r0-c").as_deref(), Some("r0-c"), "the file began anew");
    }

    #[tokio::test]
    async fn a_record_that_never_comes_is_not_waited_for_for_ever() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("decisions")).unwrap();
        let records = Records::StateDir(folder.path().to_owned());
        let wait = Awaited::from_now(&records)
            .record("r0-a", Duration::ZERO)
            .await;
        assert_eq!(
            wait.unwrap_err().to_string(),
            "no record of run r0-a after 0 s"
        );
    }
}
