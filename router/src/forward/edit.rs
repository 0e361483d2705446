//! Changes to top-level members of a JSON object, in its text: all other bytes stay as they were sent.

use std::borrow::Cow;
use std::ops::Range;

use super::members::{NoObject, visit};

/// One change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Edit {
    /// The member has this value, which is JSON. One that is there keeps its place; where a name is there twice both say the same
    /// afterwards, since servers differ in which one they read.
    Set(&'static str, String),
    /// As `Set`, where the member is there; it is not added.
    Replace(&'static str, String),
    /// There is no such member.
    Remove(&'static str),
    /// The member, where it is an object, has none of these members of its own.
    Strip(&'static str, Vec<&'static str>),
}

impl Edit {
    fn name(&self) -> &'static str {
        match self {
            Self::Set(name, _)
            | Self::Replace(name, _)
            | Self::Remove(name)
            | Self::Strip(name, _) => name,
        }
    }
}

/// A piece of the text that is left out, and what stands there instead.
struct Cut<'a> {
    at: Range<usize>,
    with: Cow<'a, str>,
}

/// The text with these changes. Of several about one member the last counts.
///
/// # Errors
/// The text is no JSON object.
pub fn edited(text: &[u8], edits: &[Edit]) -> Result<Vec<u8>, NoObject> {
    let mut cuts: Vec<Cut<'_>> = Vec::new();
    let mut seen = vec![false; edits.len()];
    // The end of the member before, or of the opening brace; and whether any member is left so far.
    let mut end = text
        .iter()
        .position(|&byte| byte == b'{')
        .map_or(0, |open| open + 1);
    let mut members = 0_usize;
    let mut kept = false;
    visit(text, |member| {
        let before = std::mem::replace(&mut end, member.at.end);
        let first = members == 0;
        members += 1;
        let edit = edits.iter().rposition(|edit| edit.name() == member.name);
        if let Some(edit) = edit {
            seen[edit] = true;
        }
        match edit.map(|edit| &edits[edit]) {
            Some(Edit::Remove(_)) => {
                cuts.push(Cut {
                    at: before..member.at.end,
                    with: "".into(),
                });
                return;
            }
            Some(Edit::Set(_, value) | Edit::Replace(_, value)) => {
                keep_separator(text, before, first || kept, &mut cuts);
                cuts.push(Cut {
                    at: member.at,
                    with: value.into(),
                });
            }
            Some(Edit::Strip(_, inner)) => {
                keep_separator(text, before, first || kept, &mut cuts);
                if let Some(with) = stripped(member.value, inner) {
                    cuts.push(Cut {
                        at: member.at,
                        with: with.into(),
                    });
                }
            }
            None => keep_separator(text, before, first || kept, &mut cuts),
        }
        kept = true;
    })?;
    let mut out = Vec::with_capacity(text.len() + 256);
    let mut at = 0;
    for cut in &cuts {
        out.extend_from_slice(&text[at..cut.at.start]);
        out.extend_from_slice(cut.with.as_bytes());
        at = cut.at.end;
    }
    out.extend_from_slice(&text[at..end]);
    for (index, edit) in edits.iter().enumerate() {
        let overruled = edits[index + 1..]
            .iter()
            .any(|later| later.name() == edit.name());
        if let Edit::Set(name, value) = edit
            && !seen[index]
            && !overruled
        {
            if kept {
                out.push(b',');
            }
            kept = true;
            out.extend_from_slice(format!("\"{name}\":{value}").as_bytes());
        }
    }
    out.extend_from_slice(&text[end..]);
    Ok(out)
}

/// An object without these members; `None` where it is another kind of value: what is wrong with that is the engine's to say.
fn stripped(value: &str, names: &[&'static str]) -> Option<String> {
    let edits: Vec<Edit> = names.iter().copied().map(Edit::Remove).collect();
    let bytes = edited(value.as_bytes(), &edits).ok()?;
    String::from_utf8(bytes).ok()
}

/// The comma before the first member that is left goes with those that are not.
fn keep_separator(text: &[u8], before: usize, needed: bool, cuts: &mut Vec<Cut<'_>>) {
    if needed {
        return;
    }
    let comma = text[before..].iter().position(|&byte| byte == b',');
    if let Some(comma) = comma {
        let at = before + comma;
        cuts.push(Cut {
            at: at..at + 1,
            with: "".into(),
        });
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Map, Value, json};

    use super::*;

    fn set(name: &'static str, value: &str) -> Edit {
        Edit::Set(name, value.to_owned())
    }

    fn edit(text: &str, edits: &[Edit]) -> String {
        String::from_utf8(edited(text.as_bytes(), edits).unwrap()).unwrap()
    }

    #[test]
    fn members_are_added_replaced_and_taken_away_and_all_else_stays() {
        let remove = [Edit::Remove("a")];
        for (text, expected) in [
            ("{}", "{}"),
            ("{ \"a\" : 1 }", "{ }"),
            ("{ \"a\":1, \"b\" :2 }", "{ \"b\" :2 }"),
            ("{\"b\":2 , \"a\":1 }", "{\"b\":2 }"),
            ("{\"a\":1,\"a\":2,\"b\":3,\"a\":4}", "{\"b\":3}"),
            ("{\"\\u0061\":1,\"b\":{\"a\":1}}", "{\"b\":{\"a\":1}}"),
        ] {
            assert_eq!(edit(text, &remove), expected, "{text}");
        }
        let sets = [set("a", "[7]")];
        for (text, expected) in [
            ("{}", "{\"a\":[7]}"),
            ("{ }", "{\"a\":[7] }"),
            ("{\"b\":1 }\n", "{\"b\":1,\"a\":[7] }\n"),
            ("{\"a\" : 1, \"a\":2}", "{\"a\" : [7], \"a\":[7]}"),
        ] {
            assert_eq!(edit(text, &sets), expected, "{text}");
        }
        let replace = [Edit::Replace("a", "0".to_owned())];
        assert_eq!(edit("{\"b\":1}", &replace), "{\"b\":1}");
        assert_eq!(edit("{\"a\":1}", &replace), "{\"a\":0}");
        assert_eq!(
            edit(
                "{\"a\":1}",
                &[Edit::Remove("a"), set("b", "2"), set("a", "3")]
            ),
            "{\"a\":3,\"b\":2}",
            "the last word about a member counts"
        );
        assert_eq!(
            edit("{\"a\":1}", &[set("b", "2"), Edit::Remove("b")]),
            "{\"a\":1}"
        );
    }

    #[test]
    fn members_of_a_member_are_taken_away_wherever_it_stands() {
        let strip = [Edit::Strip("x", vec!["a", "b"])];
        for (text, expected) in [
            (r#"{"x":{"a":1}}"#, r#"{"x":{}}"#),
            (
                r#"{"a":0, "x" : {"c":1e0 , "\u0061":"s","b":[{"a":1}]}, "b":0}"#,
                r#"{"a":0, "x" : {"c":1e0}, "b":0}"#,
            ),
            (
                r#"{"x":{"a":1},"x":{"b":2,"d":{"a":1}}}"#,
                r#"{"x":{},"x":{"d":{"a":1}}}"#,
            ),
            (
                r#"{"x":null,"x":"a","x":[{"a":1}]}"#,
                r#"{"x":null,"x":"a","x":[{"a":1}]}"#,
            ),
            ("{}", "{}"),
        ] {
            assert_eq!(edit(text, &strip), expected, "{text}");
        }
    }

    #[test]
    fn numbers_escapes_and_lone_surrogates_are_not_touched() {
        let text = r#"{"seed":123456789012345678901234567890,"t":1.10,"s":"\ud83d x","u":"\u00e9é","m":1}"#;
        let expected = text.replace(",\"m\":1", ",\"m\":2");
        assert_eq!(edit(text, &[set("m", "2")]), expected);
    }

    fn value() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            "[a-e,:{}\"\\\\ é]{0,6}".prop_map(Value::from),
        ];
        leaf.prop_recursive(2, 8, 3, |inner| {
            prop_oneof![
                proptest::collection::vec(inner.clone(), 0..3).prop_map(Value::from),
                proptest::collection::vec(("[a-d]", inner), 0..3)
                    .prop_map(|members| Value::Object(members.into_iter().collect())),
            ]
        })
    }

    fn space() -> impl Strategy<Value = String> {
        "[ \n\t]{0,2}"
    }

    proptest! {
        #[test]
        fn the_result_means_what_it_should_and_keeps_the_rest(
            members in proptest::collection::vec(("[a-f]", value(), space(), space(), space()), 0..6),
            tail in space(),
            changes in proptest::collection::vec((0_usize..3, 0_usize..4, value()), 0..4),
        ) {
            let mut text = String::from("{");
            let mut written = Vec::new();
            for (index, (name, value, one, two, three)) in members.iter().enumerate() {
                if index > 0 {
                    text.push(',');
                }
                let member = format!("{one}{}:{two}{value}{three}", json!(name));
                written.push((name.clone(), member.trim().to_owned()));
                text.push_str(&member);
            }
            text.push('}');
            text.push_str(&tail);
            const NAMES: [&str; 4] = ["a", "b", "c", "z"];
            let edits: Vec<Edit> = changes
                .iter()
                .map(|(kind, name, value)| match kind {
                    0 => Edit::Remove(NAMES[*name]),
                    1 => Edit::Replace(NAMES[*name], value.to_string()),
                    _ => Edit::Set(NAMES[*name], value.to_string()),
                })
                .collect();
            let result = edit(&text, &edits);
            let mut expected: Map<String, Value> = serde_json::from_str(&text).unwrap();
            for name in NAMES {
                match edits.iter().rfind(|edit| edit.name() == name) {
                    Some(Edit::Remove(_)) => {
                        expected.remove(name);
                    }
                    Some(Edit::Replace(_, value)) if expected.contains_key(name) => {
                        expected.insert(name.to_owned(), serde_json::from_str(value).unwrap());
                    }
                    Some(Edit::Set(_, value)) => {
                        expected.insert(name.to_owned(), serde_json::from_str(value).unwrap());
                    }
                    _ => {}
                }
            }
            let found: Map<String, Value> = serde_json::from_str(&result).unwrap();
            prop_assert_eq!(found, expected);
            for (name, member) in &written {
                if !edits.iter().any(|edit| edit.name() == name) {
                    prop_assert!(result.contains(member), "{} lost {}", result, member);
                }
            }
            if edits.is_empty() {
                prop_assert_eq!(result, text);
            }
        }
    }
}
