//! The two streams: results on standard output, what happens meanwhile on standard error.

use std::io::{IsTerminal, Write};

use anyhow::Context;

/// A result line. A reader that has gone (`| head`) ends the command, so it is an error.
pub(crate) fn line(text: &str) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{text}")
        .and_then(|()| out.flush())
        .context("cannot write to standard output")
}

pub(crate) fn lines<T: AsRef<str>>(lines: impl IntoIterator<Item = T>) -> anyhow::Result<()> {
    lines.into_iter().try_for_each(|text| line(text.as_ref()))
}

/// Part of a line, shown at once.
pub(crate) fn part(text: &str) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes())
        .and_then(|()| out.flush())
        .context("cannot write to standard output")
}

/// A value for programs, on one line.
pub(crate) fn json<T: serde::Serialize>(value: &T) -> anyhow::Result<()> {
    line(&serde_json::to_string(value).context("cannot write as JSON")?)
}

/// What happens. Nothing depends on it, so a closed stream is no error.
pub(crate) fn note(text: &str) {
    let mut err = std::io::stderr().lock();
    let _ = writeln!(err, "{text}");
}

/// A line that is rewritten while something goes on, where a person watches; elsewhere, a line whenever it changed.
#[derive(Debug)]
pub(crate) struct Status {
    live: bool,
    shown: String,
}

impl Status {
    pub(crate) fn new() -> Self {
        Self {
            live: std::io::stderr().is_terminal(),
            shown: String::new(),
        }
    }

    /// `stable` changes when something happened, `ticking` (a clock) always; only a live line shows the latter.
    pub(crate) fn show(&mut self, stable: &str, ticking: &str) {
        if self.live {
            let text = format!("{stable} {ticking}");
            let mut err = std::io::stderr().lock();
            let _ = write!(err, "\r\x1b[2K{}", text.trim_end()).and_then(|()| err.flush());
            self.shown = text;
        } else if self.shown != stable {
            note(stable);
            stable.clone_into(&mut self.shown);
        }
    }

    /// Leaves the last state standing on a line of its own.
    pub(crate) fn end(&mut self) {
        if self.live && !self.shown.is_empty() {
            note("");
        }
        self.shown.clear();
    }
}
