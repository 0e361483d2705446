//! Builtin: Llama-architecture models on one CPU thread, from a GGUF file or generated.
//!
//! - [`llama`]: the forward pass. [`attention`]: over the f16 KV as it lies in the blocks. [`rope`]: positions.
//! - Matrices, their products and the inner loops of attention are `baton-kernels`, which also chooses the instruction set.
//! - [`gguf`]: reads a file, or says in one line what is wrong with it.
//!
//! The invariant of [`super::Model`] holds bit for bit because every number that comes out is a chain of operations over one
//! row of activations, in an order that is a function of the row's position alone: a product is a dot of one weight row with one
//! activation row quantised by itself, attention runs over the stored f16 values for the chunk's own tokens too, and nothing
//! is ever summed across rows. Row blocking only decides how often a weight is loaded.
//!
//! Absent on purpose: threads. Two busy threads on two busy cores spin against each other; a worker has one compute thread.

pub mod attention;
pub mod gguf;
pub mod llama;
pub mod rope;

use std::path::Path;

pub use llama::Llama;

use super::ModelError;

/// Reads a GGUF file and makes it ready to compute.
///
/// # Errors
/// [`ModelError::Unreadable`] and [`ModelError::Malformed`] name the file, and the field where one is to blame.
pub fn load(path: &Path) -> Result<Llama, ModelError> {
    let file = path.display().to_string();
    let bytes = std::fs::read(path).map_err(|error| ModelError::Unreadable {
        file: file.clone(),
        problem: error.to_string(),
    })?;
    gguf::parse(&bytes, &file)
}
