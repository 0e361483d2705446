//! Figures of several rounds.

use std::fmt;

#[derive(Debug, Default)]
pub(crate) struct Series(Vec<f64>);

impl Series {
    pub(crate) fn push(&mut self, value: f64) {
        let at = self.0.partition_point(|other| *other < value);
        self.0.insert(at, value);
    }

    pub(crate) fn median(&self) -> f64 {
        self.0.get(self.0.len() / 2).copied().unwrap_or(f64::NAN)
    }
}

impl fmt::Display for Series {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let at = |value: Option<&f64>| value.copied().unwrap_or(f64::NAN);
        write!(
            formatter,
            "{:6.2} / {:6.2} / {:6.2}",
            at(self.0.first()),
            self.median(),
            at(self.0.last())
        )
    }
}
