//! The members of a JSON object and where they lie in its text. Nothing is copied and nothing is changed.

use std::borrow::Cow;
use std::fmt;
use std::ops::Range;

use serde::de::{MapAccess, Visitor};
use serde::{Deserializer, de};
use serde_json::value::RawValue;

/// One member of the outermost object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member<'a> {
    /// Escapes resolved; as it is written where it is no text, which no name of ours is.
    pub name: Cow<'a, str>,
    /// The value as it is written.
    pub value: &'a str,
    /// Where the value is.
    pub at: Range<usize>,
}

/// Text that is no JSON object.
#[derive(Debug, thiserror::Error)]
pub enum NoObject {
    #[error("the request body is not valid JSON: {0}")]
    Syntax(#[from] serde_json::Error),
    #[error("the request body must be a JSON object")]
    OtherKind,
}

/// Goes through all members in the order of the text. Names may repeat.
///
/// # Errors
/// The text is no JSON object. What was visited before is void.
pub fn visit<'a>(text: &'a [u8], each: impl FnMut(Member<'a>)) -> Result<(), NoObject> {
    if text.iter().find(|byte| !byte.is_ascii_whitespace()) != Some(&b'{') {
        // Whether it is JSON at all is said first.
        serde_json::from_slice::<de::IgnoredAny>(text)?;
        return Err(NoObject::OtherKind);
    }
    let mut reader = serde_json::Deserializer::from_slice(text);
    reader.deserialize_map(Each { text, each })?;
    Ok(reader.end()?)
}

struct Each<'a, F> {
    text: &'a [u8],
    each: F,
}

impl<'a, F: FnMut(Member<'a>)> Visitor<'a> for Each<'a, F> {
    type Value = ();

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a JSON object")
    }

    fn visit_map<A: MapAccess<'a>>(mut self, mut map: A) -> Result<(), A::Error> {
        while let Some((name, value)) = map.next_entry::<&'a RawValue, &'a RawValue>()? {
            let (name, value) = (name.get(), value.get());
            let name: Cow<'a, str> = match name.strip_prefix('"').and_then(|n| n.strip_suffix('"'))
            {
                Some(plain) if !plain.contains('\\') => Cow::Borrowed(plain),
                // Half of a surrogate pair is no text: no name that means anything here.
                _ => serde_json::from_str::<String>(name).map_or(Cow::Borrowed(name), Cow::Owned),
            };
            // Both are parts of one text.
            let start = value.as_ptr().addr() - self.text.as_ptr().addr();
            (self.each)(Member {
                name,
                value,
                at: start..start + value.len(),
            });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn members(text: &str) -> Vec<(String, String)> {
        let mut found = Vec::new();
        visit(text.as_bytes(), |member| {
            assert_eq!(&text[member.at.clone()], member.value);
            found.push((member.name.into_owned(), member.value.to_owned()));
        })
        .unwrap();
        found
    }

    #[test]
    fn names_are_read_and_values_are_left_as_they_are() {
        let text =
            " { \"a\\u0062\" : 1e400 ,\"\\ud800\":\"\\ud800\", \"a\":{\"a\":[1,\n2]},\"a\":null}\n";
        let expected = [
            ("ab", "1e400"),
            ("\"\\ud800\"", "\"\\ud800\""),
            ("a", "{\"a\":[1,\n2]}"),
            ("a", "null"),
        ];
        let expected = expected.map(|(name, value)| (name.to_owned(), value.to_owned()));
        assert_eq!(members(text), expected);
        assert!(members("{}").is_empty());
    }

    #[test]
    fn depth_costs_no_stack() {
        let deep = format!("{{\"a\":{}{}}}", "[".repeat(1 << 20), "]".repeat(1 << 20));
        assert_eq!(members(&deep).len(), 1);
    }

    #[test]
    fn what_is_no_object_is_told_apart_from_what_is_no_json() {
        for text in [
            "",
            "{",
            "{\"a\":1,}",
            "{} x",
            "{\"a\" 1}",
            "[1",
            "{\"a\":\"\n\"}",
        ] {
            assert!(
                matches!(visit(text.as_bytes(), |_| {}), Err(NoObject::Syntax(_))),
                "{text}"
            );
        }
        assert!(matches!(
            visit(b"{\"a\":\"\xff\"}", |_| {}),
            Err(NoObject::Syntax(_))
        ));
        for text in ["[1]", "null", "\"a\""] {
            assert!(matches!(
                visit(text.as_bytes(), |_| {}),
                Err(NoObject::OtherKind)
            ));
        }
    }
}
