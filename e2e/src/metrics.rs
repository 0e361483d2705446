//! What `/metrics` says, by name and labels.

use anyhow::{Context, Result, bail};

/// One reading of all samples.
#[derive(Clone, Debug, Default)]
pub struct Metrics(Vec<Sample>);

#[derive(Clone, Debug)]
struct Sample {
    name: String,
    labels: Vec<(String, String)>,
    value: f64,
}

impl Metrics {
    /// Reads the text format of Prometheus, and OpenMetrics where it is the same.
    ///
    /// # Errors
    /// A line that is no sample.
    pub fn parse(text: &str) -> Result<Self> {
        text.lines()
            .filter(|line| !line.is_empty() && !line.starts_with('#'))
            .map(|line| sample(line).with_context(|| format!("not a sample: {line}")))
            .collect::<Result<_>>()
            .map(Self)
    }

    /// Sum of all samples of that name which have all of these labels; nothing if there is none.
    pub fn sum(&self, name: &str, labels: &[(&str, &str)]) -> Option<f64> {
        let mut found = self
            .0
            .iter()
            .filter(|sample| sample.name == name && sample.has(labels))
            .map(|sample| sample.value)
            .peekable();
        found.peek()?;
        Some(found.sum())
    }

    /// The same, zero where a counter has no sample yet.
    pub fn count(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        self.sum(name, labels).unwrap_or(0.0)
    }

    /// That it is there, and zero.
    ///
    /// # Errors
    /// It is another number, or absent, which says nothing.
    pub fn zero(&self, name: &str, labels: &[(&str, &str)]) -> Result<()> {
        match self.sum(name, labels) {
            Some(0.0) => Ok(()),
            Some(value) => bail!("{name} {labels:?} is {value}"),
            None => bail!("{name} {labels:?} is absent"),
        }
    }

    /// Values of a label over all samples of a name.
    pub fn values(&self, name: &str, label: &str) -> Vec<&str> {
        self.0
            .iter()
            .filter(|sample| sample.name == name)
            .flat_map(|sample| &sample.labels)
            .filter(|(key, _)| key == label)
            .map(|(_, value)| value.as_str())
            .collect()
    }

    pub fn has(&self, name: &str) -> bool {
        self.0.iter().any(|sample| sample.name == name)
    }
}

impl Sample {
    fn has(&self, labels: &[(&str, &str)]) -> bool {
        labels.iter().all(|(key, value)| {
            self.labels
                .iter()
                .any(|(name, found)| name == key && found == value)
        })
    }
}

fn sample(line: &str) -> Option<Sample> {
    let (head, labels, rest) = match line.split_once('{') {
        Some((head, rest)) => {
            let (labels, rest) = rest.split_once("} ")?;
            (head, labels, rest)
        }
        None => {
            let (head, rest) = line.split_once(' ')?;
            (head, "", rest)
        }
    };
    // Labels of this product hold no comma, quote or brace: they are bounded words.
    let labels = labels
        .split(',')
        .filter(|label| !label.is_empty())
        .map(|label| {
            let (name, value) = label.split_once('=')?;
            Some((name.to_owned(), value.trim_matches('"').to_owned()))
        })
        .collect::<Option<_>>()?;
    Some(Sample {
        name: head.to_owned(),
        labels,
        value: rest.split(' ').next()?.parse().ok()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_summed_over_the_labels_not_asked_for() {
        let text =
            "# HELP a b\na_total{x=\"1\",y=\"2\"} 3\na_total{x=\"1\",y=\"4\"} 5\nb 7.5\n# EOF\n";
        let metrics = Metrics::parse(text).unwrap();
        assert_eq!(metrics.sum("a_total", &[("x", "1")]), Some(8.0));
        assert_eq!(metrics.sum("a_total", &[("y", "4")]), Some(5.0));
        assert_eq!(metrics.sum("a_total", &[("y", "9")]), None);
        assert_eq!(metrics.sum("b", &[]), Some(7.5));
        assert!(Metrics::parse("nonsense").is_err());
    }
}
