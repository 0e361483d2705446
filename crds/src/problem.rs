//! One thing wrong with a resource, said so that its author can find and mend it.

use std::fmt;

/// Where and what: `FILE:LINE: KIND NAME: PATH: MESSAGE`; without its first part for an object of a cluster.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Problem {
    /// Name of the file, as it was given to the reader; empty for an object of a cluster.
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
        let mut parts = Vec::with_capacity(3);
        match (self.file.as_str(), self.line) {
            ("", _) => {}
            (file, 0) => parts.push(file.to_owned()),
            (file, line) => parts.push(format!("{file}:{line}")),
        }
        parts.extend(
            [&self.object, &self.path, &self.message]
                .into_iter()
                .filter(|part| !part.is_empty())
                .cloned(),
        );
        f.write_str(&parts.join(": "))
    }
}

impl std::error::Error for Problem {}
