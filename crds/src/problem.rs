//! One thing wrong with a resource, said so that its author can find and mend it.

use std::fmt;

/// Where and what: `FILE:LINE: KIND NAME: PATH: MESSAGE`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Problem {
    /// Name of the file, as it was given to the reader.
    pub file: String,
    /// Line in the file, counted from 1; 0 when the problem is with the file as a whole.
    pub line: u64,
    /// The object, `PrefillPool prefill`; empty where it is not known.
    pub object: String,
    /// The field, `spec.engine.blockSize`; empty where the document as a whole is meant.
    pub path: String,
    /// Lower case; what was found, what is allowed.
    pub message: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.file)?;
        if self.line > 0 {
            write!(f, ":{}", self.line)?;
        }
        if !self.object.is_empty() {
            write!(f, ": {}", self.object)?;
        }
        if !self.path.is_empty() {
            write!(f, ": {}", self.path)?;
        }
        write!(f, ": {}", self.message)
    }
}

impl std::error::Error for Problem {}
