//! The kept inputs of a target, read from this crate's folder.

use std::path::{Path, PathBuf};
use std::{fs, io};

/// Inputs in `corpus/TARGET` and `findings/TARGET`, by name; a folder that is not there holds none.
///
/// # Errors
/// A file cannot be read.
pub fn kept(target: &str) -> io::Result<Vec<(PathBuf, Vec<u8>)>> {
    let crate_folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut inputs = Vec::new();
    for kind in ["corpus", "findings"] {
        let folder = crate_folder.join(kind).join(target);
        if !folder.is_dir() {
            continue;
        }
        for entry in fs::read_dir(folder)? {
            let path = entry?.path();
            inputs.push((path.clone(), fs::read(path)?));
        }
    }
    inputs.sort();
    Ok(inputs)
}
