//! A decision record as lines of text. Pure.

use baton_placement::record::{Actual, DecisionRecord, Kind, RecordedCandidate, TransportLeft};
use jiff::Timestamp;

use crate::table::{Align, Table};

/// The plan in words: `local on decode-0`, `remote prefill-0 → decode-1`.
pub(crate) fn plan_of(candidate: &RecordedCandidate) -> String {
    match (candidate.kind, &candidate.prefill) {
        (Kind::Remote, Some(prefill)) => format!("remote {prefill} → {}", candidate.decode),
        _ => format!("local on {}", candidate.decode),
    }
}

/// The decision in one line: plan, reason, explanation, and what became of it where that is another thing.
pub(crate) fn sentence(record: &DecisionRecord) -> String {
    let plan = record
        .chosen()
        .map_or_else(|| "nowhere".to_owned(), plan_of);
    let fallback = record.fallback.as_ref().map_or(String::new(), |fallback| {
        format!(" (then recomputed: {})", fallback.cause)
    });
    format!(
        "{plan}{fallback} · {} · {}",
        record.reason.word(),
        record.explanation
    )
}

/// Everything a record says, in the order in which one asks.
pub(crate) fn explanation(record: &DecisionRecord) -> Vec<String> {
    let mut lines = head(record);
    section(&mut lines, "candidates (milliseconds)", candidates(record));
    section(&mut lines, "what happened", states(record));
    section(&mut lines, "placed again", later(record));
    section(
        &mut lines,
        "estimate beside actual (milliseconds)",
        comparison(record),
    );
    lines.push(String::new());
    lines.extend(end(record));
    lines
}

fn section(lines: &mut Vec<String>, title: &str, body: Vec<String>) {
    if !body.is_empty() {
        lines.push(String::new());
        lines.push(format!("{title}:"));
        lines.extend(
            body.into_iter()
                .map(|line| format!("  {line}").trim_end().to_owned()),
        );
    }
}

fn head(record: &DecisionRecord) -> Vec<String> {
    let input = &record.input;
    let mut lines = vec![
        format!("run {}  {}", record.run, record.time),
        format!(
            "model {}, policy {} (generation {}), mode {}",
            record.model, record.policy.name, record.policy.generation, record.mode
        ),
        format!(
            "{} prompt tokens, at most {} new ones, {} expected",
            input.tokens,
            input.max_output_tokens,
            number(input.expected_output_tokens)
        ),
        String::new(),
        format!(
            "{}: {}",
            record
                .chosen()
                .map_or_else(|| "nowhere".to_owned(), plan_of),
            record.reason.word()
        ),
        format!("  {}", record.explanation),
    ];
    if let Some(second) = record
        .runner_up
        .and_then(|index| record.candidates.get(index))
    {
        lines.push(format!(
            "  next best: {}, cost {}",
            plan_of(second),
            number(second.cost)
        ));
    }
    lines
}

/// One line for each attempt after the first that was placed anew.
fn later(record: &DecisionRecord) -> Vec<String> {
    let lines = record.later_decisions.iter().map(|decision| {
        format!(
            "attempt {}: {} · {} · {}",
            decision.attempt,
            decision
                .chosen()
                .map_or_else(|| "nowhere".to_owned(), plan_of),
            decision.reason.word(),
            decision.explanation
        )
    });
    lines.collect()
}

fn candidates(record: &DecisionRecord) -> Vec<String> {
    // Terms that are nothing for all would only take room: empty columns are left out.
    let used: Vec<bool> = (0..12)
        .map(|index| {
            record
                .candidates
                .iter()
                .any(|candidate| candidate.terms.named()[index].1 != 0.0)
        })
        .collect();
    let names = record
        .candidates
        .first()
        .map(|first| first.terms.named().map(|(name, _)| name));
    let Some(names) = names else {
        return filtered(record);
    };
    let mut columns = vec![
        ("", Align::Left),
        ("plan", Align::Left),
        ("cached", Align::Right),
        ("decoding", Align::Right),
    ];
    columns.extend(names.iter().map(|name| (*name, Align::Right)));
    columns.extend([
        ("first token", Align::Right),
        ("at most", Align::Right),
        ("cost", Align::Right),
    ]);
    let mut table = Table::new(columns);
    let mut order: Vec<usize> = (0..record.candidates.len()).collect();
    order.sort_by(|a, b| {
        record.candidates[*a]
            .cost
            .total_cmp(&record.candidates[*b].cost)
    });
    for index in order {
        let candidate = &record.candidates[index];
        let mark = match index {
            _ if record.chosen == Some(index) => "→",
            _ if record.runner_up == Some(index) => "2",
            _ => "",
        };
        let cached = match candidate.kind {
            Kind::Local => candidate.cached_tokens.decode.to_string(),
            Kind::Remote => format!(
                "{}/{}",
                candidate.cached_tokens.prefill, candidate.cached_tokens.decode
            ),
        };
        let mut cells = vec![
            mark.to_owned(),
            plan_of(candidate),
            cached,
            candidate.inputs.compute.running_sequences.to_string(),
        ];
        let terms = candidate.terms.named();
        cells.extend(
            terms
                .iter()
                .zip(&used)
                .map(|((_, value), used)| if *used { number(*value) } else { String::new() }),
        );
        cells.extend([
            number(candidate.mean),
            number(candidate.upper),
            number(candidate.cost),
        ]);
        table.row(cells);
    }
    let mut lines = table.lines();
    lines.extend(filtered(record));
    lines
}

fn filtered(record: &DecisionRecord) -> Vec<String> {
    if record.filtered.is_empty() {
        return Vec::new();
    }
    let counts: Vec<String> = record
        .filtered
        .iter()
        .map(|(reason, count)| format!("{reason:?} {count}"))
        .collect();
    vec![format!("left out: {}", counts.join(", "))]
}

fn states(record: &DecisionRecord) -> Vec<String> {
    let time = |text: &str| text.parse::<Timestamp>().ok();
    let start = record.states.first().and_then(|first| time(&first.at));
    let mut table = Table::new([
        ("ms", Align::Right),
        ("state", Align::Left),
        ("attempt", Align::Right),
        ("worker", Align::Left),
        ("", Align::Left),
    ]);
    for entry in &record.states {
        let after = start
            .zip(time(&entry.at))
            .map(|(start, at)| at.duration_since(start).as_secs_f64() * 1e3)
            .map_or_else(|| entry.at.clone(), number);
        table.row([
            after,
            entry.state.clone(),
            entry.attempt.to_string(),
            entry
                .worker
                .as_ref()
                .map(ToString::to_string)
                .unwrap_or_default(),
            if entry.inferred {
                "inferred".to_owned()
            } else {
                String::new()
            },
        ]);
    }
    if table.is_empty() {
        Vec::new()
    } else {
        table.lines()
    }
}

fn comparison(record: &DecisionRecord) -> Vec<String> {
    let (Some(chosen), Some(actual)) = (record.chosen(), &record.actual) else {
        return Vec::new();
    };
    let mut table = Table::new([
        ("", Align::Left),
        ("estimated", Align::Right),
        ("actual", Align::Right),
        ("actual/estimated", Align::Right),
    ]);
    let observed = [
        ("queue", chosen.terms.queue, actual.terms.queue),
        ("prefill", chosen.terms.prefill, actual.terms.prefill),
        ("transfer", chosen.terms.transfer, actual.terms.transfer),
        (
            "synchronization",
            chosen.terms.synchronization,
            actual.terms.synchronization,
        ),
        ("admission", chosen.terms.admission, actual.terms.admission),
        ("first token", chosen.mean, first_token(record, actual)),
    ];
    for (name, estimated, actual) in observed {
        let ratio = actual
            .filter(|_| estimated > 0.05)
            .map(|actual| format!("{:.2}", actual / estimated));
        table.row([
            name.to_owned(),
            number(estimated),
            actual.map_or_else(|| "not observed".to_owned(), number),
            ratio.unwrap_or_default(),
        ]);
    }
    table.lines()
}

/// From dispatch on, as it is estimated; records of earlier releases only know it from the request's arrival on.
fn first_token(record: &DecisionRecord, actual: &Actual) -> Option<f64> {
    let outcome = record.outcome.as_ref();
    let since_arrival = outcome.and_then(|outcome| outcome.ttft_milliseconds);
    actual.first_token_milliseconds.or(since_arrival)
}

fn end(record: &DecisionRecord) -> Vec<String> {
    let mut lines = Vec::new();
    if let Some(actual) = record.actual.as_ref().filter(|actual| actual.bytes > 0) {
        let transport = actual.transport.as_deref().unwrap_or("?");
        let assurance = record
            .assurance
            .map_or(String::new(), |assurance| format!(", {assurance:?}"));
        lines.push(format!(
            "moved {} by {transport}, {} retries{assurance}",
            bytes(actual.bytes),
            actual.retries
        ));
        let planned = actual.planned_transport.as_deref();
        if let Some(planned) = planned.filter(|planned| *planned != transport) {
            lines.push(format!("  planned was {planned}"));
        }
        for left in &actual.transports_left {
            let TransportLeft { from, to, cause } = left;
            lines.push(format!("  {from} was left for {to}: {cause}"));
        }
    }
    let failed = record
        .actual
        .as_ref()
        .and_then(|actual| actual.failed_transfers);
    if let Some(failed) = failed.filter(|failed| *failed > 0) {
        lines.push(format!(
            "the engine counts failed transfers meanwhile: {failed}; it may have computed this prompt anew"
        ));
    }
    if let Some(fallback) = &record.fallback {
        lines.push(format!("fallback: {} at {}", fallback.cause, fallback.at));
    }
    match &record.outcome {
        None => lines.push("not ended yet".to_owned()),
        Some(outcome) => {
            let optional = |value: Option<f64>| {
                value.map_or_else(|| "-".to_owned(), |value| format!("{} ms", number(value)))
            };
            let finish = outcome
                .finish_reason
                .as_ref()
                .map_or(String::new(), |reason| format!(" ({reason})"));
            lines.push(format!(
                "{:?}{finish}: {} tokens in, {} of them cached, {} out; first token after {}, then {} each",
                outcome.status,
                outcome.input_tokens,
                outcome.cached_tokens,
                outcome.output_tokens,
                optional(outcome.ttft_milliseconds),
                optional(outcome.tpot_milliseconds)
            ));
        }
    }
    lines
}

/// Three digits that matter, at most one decimal from ten on.
pub(crate) fn number(value: f64) -> String {
    if !value.is_finite() {
        return "∞".to_owned();
    }
    let text = match value.abs() {
        size if size >= 100.0 => format!("{value:.0}"),
        size if size >= 10.0 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    };
    if text.contains('.') {
        text.trim_end_matches('0').trim_end_matches('.').to_owned()
    } else {
        text
    }
}

fn bytes(count: u64) -> String {
    match count {
        0..1_000 => format!("{count} B"),
        1_000..1_000_000 => format!("{:.1} kB", count as f64 / 1e3),
        _ => format!("{:.1} MB", count as f64 / 1e6),
    }
}

#[cfg(test)]
mod tests;
