//! How a command ends: 0 done, 1 failed, 2 wrong usage or input.

use std::fmt;

/// The user gave something that cannot be used; everything else that goes wrong is a failure.
#[derive(Debug)]
pub(crate) struct WrongInput(pub(crate) String);

impl fmt::Display for WrongInput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for WrongInput {}

/// Ends the command with status 2.
pub(crate) fn wrong_input(message: impl Into<String>) -> anyhow::Error {
    anyhow::Error::new(WrongInput(message.into()))
}

/// What a command that ran to its end found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    Good,
    /// It did what was asked, and what was asked about is not as it should be.
    Bad,
}

/// Exit status of a command, and the lines that say why.
pub(crate) fn status(result: &anyhow::Result<Verdict>) -> (u8, Vec<String>) {
    match result {
        Ok(Verdict::Good) => (0, Vec::new()),
        Ok(Verdict::Bad) => (1, Vec::new()),
        Err(error) => {
            let status = if error.downcast_ref::<WrongInput>().is_some() {
                2
            } else {
                1
            };
            (
                status,
                format!("{error:#}")
                    .lines()
                    .map(ToOwned::to_owned)
                    .collect(),
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use anyhow::Context;

    use super::*;

    #[test]
    fn status_tells_input_from_failure() {
        assert_eq!(status(&Ok(Verdict::Good)).0, 0);
        assert_eq!(status(&Ok(Verdict::Bad)).0, 1);
        assert_eq!(status(&Err(anyhow::anyhow!("broken"))).0, 1);
        let input = Err(wrong_input("no such file")).context("reading x");
        assert_eq!(
            status(&input),
            (2, vec!["reading x: no such file".to_owned()])
        );
    }
}
