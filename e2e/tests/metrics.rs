//! docs/metrics.md is whole: each metric that a program registers has its row there, and each row is of one that is registered.
//!
//! The programs' sources are read, not their output: a metric with labels is not in the output before it has a value.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use baton_e2e::binaries::repository;

/// Sections of the page: heading, where that program's metrics are registered, and what all of its names begin with.
const PROGRAMS: [(&str, &str, &str); 4] = [
    ("Router", "router/src", "baton_"),
    ("Worker", "worker/src/serve", "baton_"),
    (
        "Daemon beside a vLLM or SGLang server",
        "worker/src/beside",
        "baton_",
    ),
    ("Operator", "operator/src", ""),
];
/// Beside these nobody may register any.
const NAMED_BY_THEM: &str = "telemetry/src";

/// What page and program have to agree on.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Metric {
    name: String,
    kind: String,
    labels: BTreeSet<String>,
}

/// A source file without comments and tests, on one line.
struct Source {
    path: PathBuf,
    text: String,
}

fn sources(folder: &Path, into: &mut Vec<Source>) -> Result<()> {
    for entry in std::fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let path = entry?.path();
        if path.file_stem().is_some_and(|stem| stem == "tests") {
            continue;
        }
        if path.is_dir() {
            sources(&path, into)?;
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = std::fs::read_to_string(&path)?;
            let code = text.split("#[cfg(test)]").next().unwrap_or_default();
            let lines = code.lines().map(str::trim);
            let lines: Vec<&str> = lines.filter(|line| !line.starts_with("//")).collect();
            let text = lines.join(" ").replace("( ", "(");
            into.push(Source { path, text });
        }
    }
    Ok(())
}

/// What stands in a pair of brackets that has just been opened, and what follows.
fn within(text: &str) -> Option<(&str, &str)> {
    let (mut depth, mut before) = (1, ' ');
    for (at, letter) in text.char_indices() {
        match letter {
            '(' | '[' | '{' | '<' => depth += 1,
            // Not the one of an arrow.
            ')' | ']' | '}' => depth -= 1,
            '>' if before != '-' => depth -= 1,
            _ => {}
        }
        before = letter;
        if depth == 0 {
            return Some((&text[..at], &text[at + 1..]));
        }
    }
    None
}

/// The parts between commas that stand in no brackets.
fn parts(text: &str) -> Vec<&str> {
    let (mut depth, mut before, mut start, mut found) = (0, ' ', 0, Vec::new());
    for (at, letter) in text.char_indices() {
        match letter {
            '(' | '[' | '{' | '<' => depth += 1,
            ')' | ']' | '}' => depth -= 1,
            '>' if before != '-' => depth -= 1,
            ',' if depth == 0 => {
                found.push(text[start..at].trim());
                start = at + 1;
            }
            _ => {}
        }
        before = letter;
    }
    found.push(text[start..].trim());
    found.retain(|part| !part.is_empty());
    found
}

/// Name and type of the fields of every structure of that name in a text.
fn fields<'a>(text: &'a str, structure: &str) -> Option<Vec<(&'a str, &'a str)>> {
    let (_, rest) = text.split_once(&format!("struct {structure} {{"))?;
    let (body, _) = within(rest)?;
    let fields = parts(body).into_iter().filter_map(|field| {
        let (name, kind) = field.split_once(':')?;
        Some((name.rsplit(' ').next()?, kind.trim()))
    });
    Some(fields.collect())
}

/// Of a type, as written, its labels' structure and the metric it is at last; what other names stand for is looked up.
fn metric_type(written: &str, all: &[Source]) -> Option<(Option<String>, &'static str)> {
    let (head, arguments) = match written.split_once('<') {
        Some((head, rest)) => (head, within(rest)?.0),
        None => (written, ""),
    };
    match head.rsplit("::").next()? {
        "Counter" => return Some((None, "counter")),
        "Gauge" => return Some((None, "gauge")),
        "Histogram" => return Some((None, "histogram")),
        "Family" => {
            let [labels, metric, ..] = parts(arguments)[..] else {
                return None;
            };
            let (_, kind) = metric_type(metric, all)?;
            return Some((Some(labels.to_owned()), kind));
        }
        _ => {}
    }
    all.iter().find_map(|source| {
        let (_, rest) = source.text.split_once(&format!("type {head}"))?;
        let (parameter, meaning) = rest.split_once('=')?;
        let meaning = meaning.split(';').next()?.trim();
        let parameter = parameter.trim().trim_matches(['<', '>']);
        let meaning = match parameter {
            "" => meaning.to_owned(),
            parameter => meaning.replace(&format!("<{parameter},"), &format!("<{arguments},")),
        };
        (meaning != written).then(|| metric_type(&meaning, all))?
    })
}

/// Every call whose first two arguments are a name and a sentence.
fn registered(source: &Source, prefix: &str, all: &[Source]) -> Result<Vec<Metric>> {
    let mut found = Vec::new();
    if !source.text.contains("prometheus_client::registry") {
        return Ok(found);
    }
    for (at, _) in source.text.match_indices("(\"") {
        let Some((call, _)) = within(&source.text[at + 1..]) else {
            continue;
        };
        let quoted: Vec<&str> = call.splitn(5, '"').collect();
        let [_, name, between, _, rest] = quoted[..] else {
            continue;
        };
        let is_name = name.bytes().all(|b| b.is_ascii_lowercase() || b == b'_');
        if !is_name || between.trim() != "," {
            continue;
        }
        let arguments = parts(rest);
        let (unit, value) = match arguments[..] {
            [value] => ("", value),
            ["Unit::Seconds", value] => ("_seconds", value),
            ["Unit::Bytes", value] => ("_bytes", value),
            [r#"Unit::Other("ratio".to_owned())"#, value] => ("_ratio", value),
            _ => anyhow::bail!("{}: {call} is not understood", source.path.display()),
        };
        let value = value.trim_start_matches('&').trim_end_matches(".clone()");
        let field = value.rsplit('.').next().unwrap_or(value);
        let metric = metric(source, field, all);
        let (labels, kind) = metric.with_context(|| {
            format!(
                "{}: what {field} of {name} is cannot be found: keep it in a field of that name",
                source.path.display()
            )
        })?;
        let total = if kind == "counter" { "_total" } else { "" };
        found.push(Metric {
            name: format!("{prefix}{name}{unit}{total}"),
            kind: kind.to_owned(),
            labels,
        });
    }
    Ok(found)
}

/// Labels and kind of a metric that a structure of this file holds in this field.
fn metric(
    source: &Source,
    field: &str,
    all: &[Source],
) -> Option<(BTreeSet<String>, &'static str)> {
    let structures = source.text.match_indices("struct ").filter_map(|(at, _)| {
        let name = source.text[at + 7..].split([' ', '<', '(', ';']).next()?;
        fields(&source.text, name)
    });
    let written = structures
        .flatten()
        .find_map(|(name, written)| (name == field).then_some(written))?;
    let (labels, kind) = metric_type(written, all)?;
    let Some(labels) = labels else {
        return Some((BTreeSet::new(), kind));
    };
    let here = fields(&source.text, &labels);
    let labels = here.or_else(|| all.iter().find_map(|other| fields(&other.text, &labels)))?;
    Some((
        labels.iter().map(|(name, _)| (*name).to_owned()).collect(),
        kind,
    ))
}

/// Rows of the page by their section.
fn documented() -> Result<BTreeMap<String, Vec<Metric>>> {
    let page = std::fs::read_to_string(repository().join("docs/metrics.md"))?;
    let mut sections: BTreeMap<String, Vec<Metric>> = BTreeMap::new();
    let mut section = String::new();
    for line in page.lines() {
        if let Some(heading) = line.strip_prefix("## ") {
            section = heading.to_owned();
        }
        if !line.starts_with("| `") {
            continue;
        }
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        let [name, kind, unit, labels, what, worry] = cells[..] else {
            anyhow::bail!("not six cells: {line}");
        };
        ensure!(
            ![unit, what, worry].contains(&""),
            "an empty cell in: {line}"
        );
        let words = |cell: &str| -> BTreeSet<String> {
            let quoted = cell.split('`').skip(1).step_by(2);
            quoted.map(str::to_owned).collect()
        };
        sections.entry(section.clone()).or_default().push(Metric {
            name: name.trim_matches('`').to_owned(),
            kind: kind.to_owned(),
            labels: words(labels),
        });
    }
    Ok(sections)
}

#[test]
fn the_page_of_metrics_has_each_that_is_registered_and_no_other() -> Result<()> {
    let mut all = Vec::new();
    for folder in ["router/src", "worker/src", "operator/src", NAMED_BY_THEM] {
        sources(&repository().join(folder), &mut all)?;
    }
    let mut page = documented()?;
    let mut problems = Vec::new();
    let mut read = BTreeSet::new();
    for (section, folder, prefix) in PROGRAMS {
        let folder = repository().join(folder);
        let mut there = Vec::new();
        for source in all.iter().filter(|one| one.path.starts_with(&folder)) {
            read.insert(&source.path);
            there.extend(registered(source, prefix, &all)?);
        }
        // What finds nothing where there is some proves nothing.
        ensure!(there.len() > 5, "{section}: only {there:?}");
        let mut rows = page.remove(section).unwrap_or_default();
        there.sort();
        rows.sort();
        for metric in there.iter().filter(|metric| !rows.contains(metric)) {
            problems.push(format!("{section} has no row of {metric:?}"));
        }
        for metric in rows.iter().filter(|metric| !there.contains(metric)) {
            problems.push(format!("{section}: nobody registers {metric:?}"));
        }
        for pair in rows.windows(2).filter(|pair| pair[0] == pair[1]) {
            problems.push(format!("{section} has two rows of {:?}", pair[0]));
        }
    }
    for (section, rows) in page {
        problems.push(format!("section {section} is of no program: {rows:?}"));
    }
    for source in all.iter().filter(|source| !read.contains(&source.path)) {
        if source.text.contains("prometheus_client::registry") {
            problems.push(format!(
                "{} registers metrics and belongs to no section: say here to which",
                source.path.display()
            ));
        }
    }
    ensure!(problems.is_empty(), "\n{}", problems.join("\n"));
    Ok(())
}
