//! Tokenizers and chat templates, fetched from workers by digest and kept by digest: in memory, and on disk for the next start.

use std::collections::{HashMap, HashSet};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use baton_protocol::wire::{self, worker_client::WorkerClient};
use bytes::Bytes;
use parking_lot::RwLock;
use tonic::transport::Channel;

/// Tokenizers are some megabytes; a worker that sends more than this is broken.
const LARGEST: usize = 256 << 20;
const FETCH_WITHIN: Duration = Duration::from_secs(60);

/// An artifact that could not be had.
#[derive(Debug, thiserror::Error)]
pub enum ArtifactError {
    #[error("artifact {digest}: {source}")]
    Fetch {
        digest: String,
        source: Box<tonic::Status>,
    },
    #[error("artifact {digest}: the worker did not send it within {} s", FETCH_WITHIN.as_secs())]
    Slow { digest: String },
    #[error("artifact {digest}: what the worker sent has digest {found}; it is not used")]
    Altered { digest: String, found: String },
    #[error("artifact {digest}: the worker sent more than {LARGEST} bytes")]
    TooLarge { digest: String },
    #[error("artifact {0:?} is no BLAKE3 digest in hex")]
    Malformed(String),
}

/// Verified artifacts by digest.
#[derive(Debug)]
pub struct Artifacts {
    folder: PathBuf,
    loaded: RwLock<HashMap<String, Bytes>>,
}

impl Artifacts {
    /// `folder` exists and is writable.
    pub fn new(folder: PathBuf) -> Self {
        Self {
            folder,
            loaded: RwLock::default(),
        }
    }

    pub fn get(&self, digest: &str) -> Option<Bytes> {
        self.loaded.read().get(digest).cloned()
    }

    pub fn has(&self, digest: &str) -> bool {
        self.loaded.read().contains_key(digest)
    }

    /// Forgets those of which nobody is left who names them; the disk has them still.
    pub fn keep(&self, named: &HashSet<&str>) {
        self.loaded
            .write()
            .retain(|digest, _| named.contains(digest.as_str()));
    }

    /// Makes an artifact available: from memory, from disk, or from the worker. What does not match its digest is never used.
    pub async fn fetch(
        &self,
        mut worker: WorkerClient<Channel>,
        digest: &str,
    ) -> Result<(), ArtifactError> {
        // It becomes a file name.
        if digest.len() != 64 || !digest.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err(ArtifactError::Malformed(digest.to_owned()));
        }
        if self.has(digest) {
            return Ok(());
        }
        if let Some(bytes) = from_disk(&self.folder, digest) {
            self.loaded.write().insert(digest.to_owned(), bytes);
            return Ok(());
        }
        let bytes = tokio::time::timeout(FETCH_WITHIN, receive(&mut worker, digest))
            .await
            .map_err(|_| ArtifactError::Slow {
                digest: digest.to_owned(),
            })??;
        let found = blake3::hash(&bytes).to_hex().to_string();
        if found != digest {
            return Err(ArtifactError::Altered {
                digest: digest.to_owned(),
                found,
            });
        }
        if let Err(error) = to_disk(&self.folder, digest, &bytes) {
            // It is fetched again at the next start.
            tracing::warn!(digest, %error, "artifact is not kept on disk");
        }
        self.loaded.write().insert(digest.to_owned(), bytes);
        Ok(())
    }
}

async fn receive(worker: &mut WorkerClient<Channel>, digest: &str) -> Result<Bytes, ArtifactError> {
    let failed = |status: tonic::Status| ArtifactError::Fetch {
        digest: digest.to_owned(),
        source: Box::new(status),
    };
    let request = wire::ArtifactRequest {
        digest: digest.to_owned(),
    };
    let mut chunks = worker.artifact(request).await.map_err(failed)?.into_inner();
    let mut bytes = Vec::new();
    while let Some(chunk) = chunks.message().await.map_err(failed)? {
        if bytes.len() + chunk.data.len() > LARGEST {
            return Err(ArtifactError::TooLarge {
                digest: digest.to_owned(),
            });
        }
        bytes.extend_from_slice(&chunk.data);
    }
    Ok(bytes.into())
}

fn from_disk(folder: &Path, digest: &str) -> Option<Bytes> {
    let bytes = std::fs::read(folder.join(digest)).ok()?;
    (blake3::hash(&bytes).to_hex().as_str() == digest).then(|| bytes.into())
}

/// A reader of the file sees all of it or nothing.
fn to_disk(folder: &Path, digest: &str, bytes: &[u8]) -> std::io::Result<()> {
    // Two workers may serve the same file at the same time.
    static WRITES: AtomicU64 = AtomicU64::new(0);
    let write = WRITES.fetch_add(1, Ordering::Relaxed);
    let partial = folder.join(format!("{digest}.{}-{write}.partial", std::process::id()));
    let mut file = std::fs::File::create(&partial)?;
    file.write_all(bytes)?;
    std::fs::rename(partial, folder.join(digest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_nobody_names_any_more_is_forgotten() {
        let artifacts = Artifacts::new(PathBuf::new());
        for digest in ["old", "new"] {
            let bytes = Bytes::from_static(b"tokenizer");
            artifacts.loaded.write().insert(digest.to_owned(), bytes);
        }
        artifacts.keep(&["new"].into());
        assert!(artifacts.has("new") && !artifacts.has("old"));
    }

    #[test]
    fn what_does_not_match_its_name_is_not_read_from_disk() {
        let folder = tempfile::tempdir().unwrap();
        let digest = blake3::hash(b"tokenizer").to_hex().to_string();
        to_disk(folder.path(), &digest, b"tokenizer").unwrap();
        assert_eq!(from_disk(folder.path(), &digest).unwrap(), "tokenizer");
        std::fs::write(folder.path().join(&digest), b"altered").unwrap();
        assert_eq!(from_disk(folder.path(), &digest), None);
    }
}
