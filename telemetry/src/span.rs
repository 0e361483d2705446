//! What a span says: where it hangs, when it was, and facts about it. A plain value, made when all of it is known.

use crate::context::{SpanId, TraceContext, TraceId};

/// A part of a run, over.
#[derive(Clone, Debug, PartialEq)]
pub struct Span {
    pub trace: TraceId,
    pub id: SpanId,
    pub parent: Option<SpanId>,
    /// The parent is another process's.
    pub parent_is_remote: bool,
    pub name: &'static str,
    pub kind: Kind,
    /// Microseconds since the Unix epoch.
    pub begin: u64,
    /// Not before `begin`.
    pub end: u64,
    pub attributes: Attributes,
    pub events: Vec<SpanEvent>,
    /// It ended badly, and how people are told.
    pub error: Option<String>,
}

/// A moment within a span.
#[derive(Clone, Debug, PartialEq)]
pub struct SpanEvent {
    pub name: String,
    /// Microseconds since the Unix epoch.
    pub at: u64,
    pub attributes: Attributes,
}

/// As OpenTelemetry tells spans apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Within one process.
    Internal,
    /// Serves another process's call.
    Server,
    /// Calls another process.
    Client,
}

/// Value of an attribute.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    Text(String),
    Integer(i64),
    Float(f64),
    Flag(bool),
    Texts(Vec<String>),
}

/// Named facts, each name once.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Attributes(Vec<(&'static str, Value)>);

impl Span {
    /// A span in the place `context` under `parent`. An end before the begin is put to the begin: times of two reports may race.
    pub fn new(
        context: &TraceContext,
        parent: Option<&TraceContext>,
        name: &'static str,
        kind: Kind,
        (begin, end): (u64, u64),
    ) -> Self {
        Self {
            trace: context.trace,
            id: context.span,
            parent: parent.map(|parent| parent.span),
            parent_is_remote: kind == Kind::Server,
            name,
            kind,
            begin,
            end: end.max(begin),
            attributes: Attributes::default(),
            events: Vec::new(),
            error: None,
        }
    }

    /// It ended badly: `kind` is a word of a small set (the convention's `error.type`).
    pub fn fail(&mut self, kind: &str, message: impl Into<String>) {
        self.attributes.set("error.type", kind);
        self.error = Some(message.into());
    }
}

impl Attributes {
    /// Sets a fact; a later value takes the place of an earlier one.
    pub fn set(&mut self, name: &'static str, value: impl Into<Value>) -> &mut Self {
        let value = value.into();
        match self.0.iter_mut().find(|(known, _)| *known == name) {
            Some((_, old)) => *old = value,
            None => self.0.push((name, value)),
        }
        self
    }

    /// Sets a fact that may be unknown.
    pub fn maybe(&mut self, name: &'static str, value: Option<impl Into<Value>>) -> &mut Self {
        if let Some(value) = value {
            self.set(name, value);
        }
        self
    }

    pub fn get(&self, name: &str) -> Option<&Value> {
        let found = self.0.iter().find(|(known, _)| *known == name);
        found.map(|(_, value)| value)
    }

    pub fn iter(&self) -> impl Iterator<Item = (&'static str, &Value)> {
        self.0.iter().map(|(name, value)| (*name, value))
    }
}

impl IntoIterator for Attributes {
    type Item = (&'static str, Value);
    type IntoIter = std::vec::IntoIter<(&'static str, Value)>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.into_iter()
    }
}

impl From<&str> for Value {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

impl From<String> for Value {
    fn from(text: String) -> Self {
        Self::Text(text)
    }
}

impl From<bool> for Value {
    fn from(flag: bool) -> Self {
        Self::Flag(flag)
    }
}

impl From<f64> for Value {
    fn from(number: f64) -> Self {
        Self::Float(number)
    }
}

impl From<i32> for Value {
    fn from(number: i32) -> Self {
        Self::Integer(number.into())
    }
}

impl From<u32> for Value {
    fn from(number: u32) -> Self {
        Self::Integer(number.into())
    }
}

impl From<u64> for Value {
    /// OTLP has no unsigned numbers: what does not fit is written as text, so that no id is changed.
    fn from(number: u64) -> Self {
        i64::try_from(number).map_or_else(|_| Self::Text(number.to_string()), Self::Integer)
    }
}

impl From<usize> for Value {
    fn from(number: usize) -> Self {
        Self::from(u64::try_from(number).unwrap_or(u64::MAX))
    }
}

impl From<Vec<String>> for Value {
    fn from(texts: Vec<String>) -> Self {
        Self::Texts(texts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fact_is_there_once() {
        let mut attributes = Attributes::default();
        attributes
            .set("a", 1_u32)
            .set("b", "x")
            .set("a", 2_u32)
            .maybe("c", None::<bool>);
        assert_eq!(attributes.iter().count(), 2);
        assert_eq!(attributes.get("a"), Some(&Value::Integer(2)));
        assert_eq!(attributes.get("c"), None);
    }

    #[test]
    fn a_number_that_otlp_lacks_is_not_changed() {
        assert_eq!(Value::from(7_u64), Value::Integer(7));
        assert_eq!(
            Value::from(u64::MAX),
            Value::Text("18446744073709551615".to_owned())
        );
    }

    #[test]
    fn a_span_never_ends_before_it_begins() {
        let context = TraceContext::root(None, "r", true);
        let span = Span::new(&context, None, "decode", Kind::Server, (10, 7));
        assert_eq!((span.begin, span.end), (10, 10));
    }
}
