//! Figures of several rounds: least, median and most, and the ratios between two subjects.

use std::collections::BTreeMap;

use super::Case;

/// What one thing gave in several rounds.
#[derive(Clone, Debug, Default)]
pub(crate) struct Series(Vec<f64>);

impl Series {
    pub(crate) fn push(&mut self, value: f64) {
        self.0.push(value);
        self.0.sort_by(f64::total_cmp);
    }

    pub(crate) fn least(&self) -> f64 {
        self.0.first().copied().unwrap_or(f64::NAN)
    }

    pub(crate) fn median(&self) -> f64 {
        self.0.get(self.0.len() / 2).copied().unwrap_or(f64::NAN)
    }

    pub(crate) fn most(&self) -> f64 {
        self.0.last().copied().unwrap_or(f64::NAN)
    }
}

/// Tokens per second by subject and case.
#[derive(Debug, Default)]
pub(crate) struct Table(BTreeMap<(String, Case), Series>);

impl Table {
    pub(crate) fn push(&mut self, subject: &str, case: Case, tokens_per_second: f64) {
        self.0
            .entry((subject.to_owned(), case))
            .or_default()
            .push(tokens_per_second);
    }

    pub(crate) fn of(&self, subject: &str) -> impl Iterator<Item = (Case, &Series)> {
        self.0
            .iter()
            .filter(move |((name, _), _)| name == subject)
            .map(|((_, case), series)| (*case, series))
    }

    pub(crate) fn print(&self) {
        println!("tokens/s, least / median / most");
        for ((subject, case), series) in &self.0 {
            println!(
                "  {subject:32} {}: {:.1} / {:.1} / {:.1}",
                case.name(),
                series.least(),
                series.median(),
                series.most()
            );
        }
    }

    /// Prints the ratios of one subject's figures to another's, where both have them.
    pub(crate) fn compare(&self, subject: &str, other: &str) {
        let pairs: Vec<String> = self
            .of(subject)
            .filter_map(|(case, series)| {
                let (_, beside) = self.of(other).find(|(of, _)| *of == case)?;
                Some(format!(
                    "{} {:.2} (of the best {:.2})",
                    case.name(),
                    series.median() / beside.median(),
                    series.most() / beside.most()
                ))
            })
            .collect();
        if !pairs.is_empty() {
            println!("{subject} / {other}: {}", pairs.join(", "));
        }
    }
}

impl Case {
    pub(crate) fn name(self) -> String {
        match self {
            Self::Prefill(tokens) => format!("prefill {tokens}"),
            Self::Decode(context) => format!("decode after {context}"),
        }
    }
}
