//! Why something has failed, in the words of whoever knows.

use std::error::Error;

/// The innermost cause: clients wrap what happened ("Connection refused") in what they were at ("client error (Connect)").
#[must_use]
pub fn innermost(error: &dyn Error) -> String {
    let mut cause = error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    cause.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("outer")]
    struct Outer(#[source] std::io::Error);

    #[test]
    fn the_innermost_cause_speaks() {
        assert_eq!(
            innermost(&Outer(std::io::Error::other("refused"))),
            "refused"
        );
        assert_eq!(innermost(&std::fmt::Error), std::fmt::Error.to_string());
    }
}
