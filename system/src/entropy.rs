//! Random bytes, as an argument.

use std::fmt::Debug;

/// No random bytes can be had: nothing that is named by them may start.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no random bytes: {0}: check that /dev/urandom is readable")]
pub struct NoEntropy(pub String);

/// Where random bytes come from.
pub trait Entropy: Debug + Send + Sync {
    /// Fills all of `bytes`.
    ///
    /// # Errors
    /// [`NoEntropy`] when the machine has none; then nothing of `bytes` may be used.
    fn fill(&self, bytes: &mut [u8]) -> Result<(), NoEntropy>;
}

/// The machine's own.
#[derive(Clone, Copy, Debug)]
pub struct MachineEntropy;

impl Entropy for MachineEntropy {
    fn fill(&self, bytes: &mut [u8]) -> Result<(), NoEntropy> {
        getrandom::fill(bytes).map_err(|error| NoEntropy(error.to_string()))
    }
}

/// An array of random bytes.
///
/// # Errors
/// [`NoEntropy`] as of [`Entropy::fill`].
pub fn bytes<const COUNT: usize>(entropy: &dyn Entropy) -> Result<[u8; COUNT], NoEntropy> {
    let mut bytes = [0; COUNT];
    entropy.fill(&mut bytes)?;
    Ok(bytes)
}
