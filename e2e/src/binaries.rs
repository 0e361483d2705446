//! Where the programs under test are: what `make build` left.

use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};

/// The folder of the repository.
pub fn repository() -> &'static Path {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().unwrap_or(here)
}

/// A program of this repository. `BATON_BIN_DIR` names another folder than `target/release`.
///
/// # Errors
/// It is not there: the tests do not build it.
pub fn program(name: &str) -> Result<PathBuf> {
    let folder = std::env::var_os("BATON_BIN_DIR").map_or_else(
        || {
            std::env::var_os("CARGO_TARGET_DIR")
                .map_or_else(|| repository().join("target"), PathBuf::from)
                .join("release")
        },
        PathBuf::from,
    );
    let path = folder.join(name);
    ensure!(
        path.is_file(),
        "{} is not there: run `make build` first, or name the folder in BATON_BIN_DIR",
        path.display()
    );
    Ok(path)
}
