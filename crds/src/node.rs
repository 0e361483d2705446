//! YAML as a tree in which every value knows its line.

use std::fmt;

use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_saphyr::Spanned;

use crate::problem::Problem;

/// A value and the line it begins on.
#[derive(Debug, Clone)]
pub(crate) struct Node {
    pub(crate) line: u64,
    pub(crate) value: Value,
}

#[derive(Debug, Clone)]
pub(crate) enum Value {
    Null,
    Bool(bool),
    /// Wide enough that an integer out of every range is still shown as the author wrote it.
    Integer(i128),
    Float(f64),
    Text(String),
    List(Vec<Node>),
    /// In the author's order. Names are unique: the parser refuses a second one.
    Map(Vec<Entry>),
}

#[derive(Debug, Clone)]
pub(crate) struct Entry {
    pub(crate) name: String,
    pub(crate) line: u64,
    pub(crate) node: Node,
}

/// Lists and maps inside each other. The deepest field of a resource, in a pod's affinity, is at 13; the reader takes a stack frame
/// of a kilobyte and more for each, twenty times as much where it is not optimised.
const DEEPEST: usize = 32;

/// Every document of a file. What is not YAML is one problem: the parser cannot go on after it.
pub(crate) fn parse(file: &str, text: &str) -> Result<Vec<Node>, Problem> {
    let options = serde_saphyr::options! {
        budget: serde_saphyr::budget! { max_depth: DEEPEST },
    };
    serde_saphyr::from_multiple_with_options::<Node>(text, options).map_err(|error| {
        let error = error.without_snippet();
        let line = error.location().map_or(0, |location| location.line());
        let message = error.to_string();
        // The parser repeats the place at the end or the start of its sentence; the problem carries it already.
        let message = message.lines().next().unwrap_or_default();
        let message = message.split(" at line ").next().unwrap_or(message);
        Problem {
            file: file.to_owned(),
            line,
            object: String::new(),
            path: String::new(),
            message: format!("not valid YAML: {message}"),
        }
    })
}

impl Node {
    /// The value of a member, if this is a map that has it.
    pub(crate) fn get(&self, name: &str) -> Option<&Node> {
        self.entry(name).map(|entry| &entry.node)
    }

    pub(crate) fn entry(&self, name: &str) -> Option<&Entry> {
        match &self.value {
            Value::Map(entries) => entries.iter().find(|entry| entry.name == name),
            _ => None,
        }
    }

    pub(crate) fn text(&self) -> Option<&str> {
        match &self.value {
            Value::Text(text) => Some(text),
            _ => None,
        }
    }

    /// Line of the field at `path` (`spec.prefillPools[1].name`), or of the nearest field above it that is there.
    pub(crate) fn line_of(&self, path: &str) -> u64 {
        let mut line = self.line;
        let mut node = self;
        for step in path.split('.') {
            let (name, index) = match step.split_once('[') {
                Some((name, rest)) => (name, rest.trim_end_matches(']').parse::<usize>().ok()),
                None => (step, None),
            };
            let Some(entry) = node.entry(name) else { break };
            line = entry.line;
            node = &entry.node;
            if let (Some(index), Value::List(items)) = (index, &node.value) {
                let Some(item) = items.get(index) else { break };
                line = item.line;
                node = item;
            }
        }
        line
    }

    /// What the author wrote, short enough for a message.
    pub(crate) fn shown(&self) -> String {
        match &self.value {
            Value::Null => "nothing".to_owned(),
            Value::Bool(value) => value.to_string(),
            Value::Integer(value) => value.to_string(),
            // An integer too large for the parser comes as a float: as digits it is recognised.
            Value::Float(value) if value.abs() >= 1e15 => format!("{value}"),
            Value::Float(value) => format!("{value:?}"),
            Value::Text(text) => format!("\"{}\"", shortened(text)),
            Value::List(items) => format!("a list of {}", items.len()),
            Value::Map(_) => "an object".to_owned(),
        }
    }

    /// An object of the API server: a tree without lines.
    pub(crate) fn from_json(json: &serde_json::Value) -> Self {
        use serde_json::Value as Json;
        let value = match json {
            Json::Null => Value::Null,
            Json::Bool(value) => Value::Bool(*value),
            Json::Number(number) => match (number.as_i64(), number.as_u64()) {
                (Some(value), _) => Value::Integer(i128::from(value)),
                (None, Some(value)) => Value::Integer(i128::from(value)),
                (None, None) => Value::Float(number.as_f64().unwrap_or(f64::NAN)),
            },
            Json::String(text) => Value::Text(text.clone()),
            Json::Array(items) => Value::List(items.iter().map(Self::from_json).collect()),
            Json::Object(members) => Value::Map(
                members
                    .iter()
                    .map(|(name, value)| Entry {
                        name: name.clone(),
                        line: 0,
                        node: Self::from_json(value),
                    })
                    .collect(),
            ),
        };
        Self { line: 0, value }
    }

    /// Without lines, for the typed specs. Members that are null are left out, as the API server does.
    pub(crate) fn to_json(&self) -> serde_json::Value {
        use serde_json::Value as Json;
        match &self.value {
            Value::Null => Json::Null,
            Value::Bool(value) => Json::Bool(*value),
            Value::Integer(value) => i64::try_from(*value).map_or(Json::Null, Json::from),
            Value::Float(value) => Json::from(*value),
            Value::Text(text) => Json::String(text.clone()),
            Value::List(items) => Json::Array(items.iter().map(Node::to_json).collect()),
            Value::Map(entries) => Json::Object(
                entries
                    .iter()
                    .filter(|entry| !matches!(entry.node.value, Value::Null))
                    .map(|entry| (entry.name.clone(), entry.node.to_json()))
                    .collect(),
            ),
        }
    }
}

/// The beginning of a text, where the whole is too long for a message.
pub(crate) fn shortened(text: &str) -> String {
    if text.chars().count() <= 60 {
        return text.to_owned();
    }
    let start: String = text.chars().take(57).collect();
    format!("{start}…")
}

impl<'de> Deserialize<'de> for Node {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let spanned = Spanned::<Value>::deserialize(deserializer)?;
        Ok(Self {
            line: spanned.referenced.line(),
            value: spanned.value,
        })
    }
}

impl<'de> Deserialize<'de> for Value {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ValueVisitor)
    }
}

struct ValueVisitor;

impl<'de> Visitor<'de> for ValueVisitor {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a YAML value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_none<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        Value::deserialize(deserializer)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(Value::Integer(i128::from(value)))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(Value::Integer(i128::from(value)))
    }

    fn visit_i128<E>(self, value: i128) -> Result<Value, E> {
        Ok(Value::Integer(value))
    }

    fn visit_u128<E>(self, value: u128) -> Result<Value, E> {
        Ok(i128::try_from(value).map_or(Value::Float(value as f64), Value::Integer))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(Value::Float(value))
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(Value::Text(value.to_owned()))
    }

    fn visit_string<E>(self, value: String) -> Result<Value, E> {
        Ok(Value::Text(value))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<Value, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = access.next_element::<Node>()? {
            items.push(item);
        }
        Ok(Value::List(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Value, A::Error> {
        let mut entries = Vec::new();
        while let Some(name) = access.next_key::<Spanned<String>>()? {
            let line = name.referenced.line();
            entries.push(Entry {
                name: name.value,
                line,
                node: access.next_value()?,
            });
        }
        Ok(Value::Map(entries))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_those_of_the_file_in_every_document() {
        let text = "# note\na: 1\nb:\n  - x\n  - y: {z: \"2\"}\n---\nc: 3\n";
        let documents = parse("f.yaml", text).unwrap();
        assert_eq!(documents.len(), 2);
        assert_eq!(documents[0].line_of("a"), 2);
        assert_eq!(documents[0].line_of("b[0]"), 4);
        assert_eq!(documents[0].line_of("b[1].y.z"), 5);
        assert_eq!(
            documents[0].line_of("b[1].nothing"),
            5,
            "a field that is not there has its parent's line"
        );
        assert_eq!(documents[1].line_of("c"), 7);
        assert_eq!(
            documents[0].to_json(),
            serde_json::json!({"a": 1, "b": ["x", {"y": {"z": "2"}}]})
        );
    }

    #[test]
    fn scalars_keep_their_kind() {
        let documents = parse(
            "f",
            "[1, -2, 1.5, true, ~, text, \"7\", 99999999999999999999]\n",
        )
        .unwrap();
        let Value::List(items) = &documents[0].value else {
            panic!("a list")
        };
        let shown: Vec<String> = items.iter().map(Node::shown).collect();
        assert_eq!(
            shown,
            [
                "1",
                "-2",
                "1.5",
                "true",
                "nothing",
                "\"text\"",
                "\"7\"",
                "100000000000000000000"
            ]
        );
    }

    #[test]
    fn what_is_not_yaml_names_its_line() {
        let problem = parse("f.yaml", "a: 1\nb: [1, 2\nc: 3\n").unwrap_err();
        assert!(problem.line >= 2, "{problem}");
        assert!(problem.to_string().starts_with("f.yaml:"), "{problem}");
        let problem = parse("f.yaml", "a: 1\nb: 2\na: 3\n").unwrap_err();
        assert_eq!(problem.line, 3, "{problem}");
        assert!(problem.message.contains("duplicate"), "{problem}");
    }
}
