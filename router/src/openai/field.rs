//! Reads a JSON object field by field and knows the path of each, so that an error names what is wrong and where.

use std::fmt::Display;
use std::ops::RangeInclusive;

use serde_json::{Map, Value};

use super::error::ApiError;

/// An object of the request. Reading a field takes it out; `null` reads as absent, as OpenAI's clients mean it.
#[derive(Clone, Debug)]
pub struct Object {
    /// Empty for the body itself.
    path: String,
    fields: Map<String, Value>,
}

/// Reads a request body. Says line and column where it is no JSON; text that is not UTF-8 and lone surrogates are no JSON.
pub fn parse_body(body: &[u8]) -> Result<Object, ApiError> {
    let value: Value = serde_json::from_slice(body).map_err(|error| {
        ApiError::bad_request(format!("the request body is not valid JSON: {error}"))
            .with_code("invalid_json")
    })?;
    match value {
        Value::Object(fields) => Ok(Object {
            path: String::new(),
            fields,
        }),
        other => Err(ApiError::bad_request(format!(
            "the request body must be a JSON object, found {}",
            kind(&other)
        ))),
    }
}

impl Object {
    pub fn new(path: String, value: Value) -> Result<Self, ApiError> {
        match value {
            Value::Object(fields) => Ok(Self { path, fields }),
            other => Err(mismatch(path, "an object", &other)),
        }
    }

    pub fn path(&self) -> &str {
        &self.path
    }

    /// The path of one of its fields.
    pub fn path_of(&self, name: &str) -> String {
        if self.path.is_empty() {
            name.to_owned()
        } else {
            format!("{}.{name}", self.path)
        }
    }

    /// The field as it is; `None` if it is absent or null.
    pub fn take(&mut self, name: &str) -> Option<Value> {
        self.fields.remove(name).filter(|value| !value.is_null())
    }

    pub fn string(&mut self, name: &str) -> Result<Option<String>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(mismatch(self.path_of(name), "a string", &other)),
        }
    }

    pub fn boolean(&mut self, name: &str, default: bool) -> Result<bool, ApiError> {
        match self.take(name) {
            None => Ok(default),
            Some(Value::Bool(value)) => Ok(value),
            Some(other) => Err(mismatch(self.path_of(name), "true or false", &other)),
        }
    }

    /// A finite number within `range`.
    pub fn number(
        &mut self,
        name: &str,
        range: RangeInclusive<f64>,
    ) -> Result<Option<f64>, ApiError> {
        let Some(value) = self.take(name) else {
            return Ok(None);
        };
        let number = value
            .as_f64()
            .ok_or_else(|| mismatch(self.path_of(name), "a number", &value))?;
        within(self.path_of(name), number, &range).map(Some)
    }

    /// A whole number within `range`. `8.0` is one.
    pub fn integer(
        &mut self,
        name: &str,
        range: RangeInclusive<i64>,
    ) -> Result<Option<i64>, ApiError> {
        let path = self.path_of(name);
        self.take(name)
            .map(|value| within(path.clone(), whole(path, &value)?, &range))
            .transpose()
    }

    /// A whole number that fits 32 bits, at least `least`.
    pub fn count(&mut self, name: &str, least: u32) -> Result<Option<u32>, ApiError> {
        let number = self.integer(name, i64::from(least)..=i64::from(u32::MAX))?;
        Ok(number.and_then(|number| u32::try_from(number).ok()))
    }

    pub fn array(&mut self, name: &str) -> Result<Option<Vec<Value>>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::Array(items)) => Ok(Some(items)),
            Some(other) => Err(mismatch(self.path_of(name), "an array", &other)),
        }
    }

    pub fn object(&mut self, name: &str) -> Result<Option<Self>, ApiError> {
        let path = self.path_of(name);
        self.take(name)
            .map(|value| Self::new(path, value))
            .transpose()
    }

    /// What has not been read.
    pub fn into_fields(self) -> Map<String, Value> {
        self.fields
    }
}

/// A whole number of any size that JSON integers have here.
pub fn whole(path: String, value: &Value) -> Result<i64, ApiError> {
    // Floats up to 2^53 are exact; beyond that a fraction cannot be told from a whole number.
    const EXACT: f64 = 9_007_199_254_740_992.0;
    let number = match value.as_i64() {
        Some(number) => Some(number),
        None => value
            .as_f64()
            .filter(|number| number.fract() == 0.0 && number.abs() <= EXACT)
            .map(|number| number as i64),
    };
    number.ok_or_else(|| mismatch(path, "a whole number", value))
}

/// A token id.
pub fn token_id(path: String, value: &Value) -> Result<u32, ApiError> {
    let number = within(
        path.clone(),
        whole(path.clone(), value)?,
        &(0..=i64::from(u32::MAX)),
    )?;
    u32::try_from(number).map_err(|_| mismatch(path, "a token id", value))
}

fn within<T: PartialOrd + Display>(
    path: String,
    number: T,
    range: &RangeInclusive<T>,
) -> Result<T, ApiError> {
    if range.contains(&number) {
        return Ok(number);
    }
    let message = format!(
        "{path} must be from {} to {}, found {number}",
        range.start(),
        range.end()
    );
    Err(ApiError::field(path, message))
}

/// 400: a field of another type than it must have.
pub fn mismatch(path: String, expected: &str, found: &Value) -> ApiError {
    let message = format!("{path} must be {expected}, found {}", kind(found));
    ApiError::field(path, message)
}

/// What a value is, for people. Never the value itself: it may be long, or private.
pub fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(number) if number.is_f64() => "a fraction",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn body(json: &str) -> Object {
        parse_body(json.as_bytes()).unwrap()
    }

    #[test]
    fn what_is_no_json_is_refused_with_its_place() {
        let table: [(&[u8], &str); 6] = [
            (b"{\n  \"a\": ,}", "line 2 column 8"),
            (b"", "EOF while parsing a value at line 1 column 0"),
            (b"{\"a\": \"\xff\"}", "line 1"),
            (br#"{"a": "\ud800"}"#, "line 1"),
            (br#"{"a": 1} x"#, "trailing characters at line 1 column 10"),
            (b"[1]", "must be a JSON object, found an array"),
        ];
        for (json, expected) in table {
            let error = parse_body(json).unwrap_err();
            assert_eq!(error.status, 400);
            assert!(
                error.message.contains(expected),
                "{:?}: {}",
                json.escape_ascii().to_string(),
                error.message
            );
        }
    }

    #[test]
    fn nesting_has_a_limit() {
        let deep = format!("{{\"a\": {}{}}}", "[".repeat(4000), "]".repeat(4000));
        let error = parse_body(deep.as_bytes()).unwrap_err();
        assert!(
            error.message.contains("recursion limit exceeded"),
            "{}",
            error.message
        );
    }

    #[test]
    fn a_field_of_another_type_is_named_with_both_types() {
        let mut object = body(r#"{"inner": {"flag": "yes"}}"#)
            .object("inner")
            .unwrap()
            .unwrap();
        let error = object.boolean("flag", false).unwrap_err();
        assert_eq!(error.param.as_deref(), Some("inner.flag"));
        assert_eq!(
            error.message,
            "inner.flag must be true or false, found a string"
        );
    }

    #[test]
    fn null_is_absent_and_a_whole_float_is_an_integer() {
        let mut object = body(r#"{"a": null, "b": 8.0, "c": 8.5, "d": 1e300}"#);
        assert_eq!(object.integer("a", 0..=9).unwrap(), None);
        assert_eq!(object.integer("b", 0..=9).unwrap(), Some(8));
        assert_eq!(
            object.integer("c", 0..=9).unwrap_err().message,
            "c must be a whole number, found a fraction"
        );
        assert!(object.integer("d", 0..=9).is_err());
    }

    #[test]
    fn a_number_out_of_range_is_told_the_range() {
        let error = body(r#"{"temperature": 2.5}"#)
            .number("temperature", 0.0..=2.0)
            .unwrap_err();
        assert_eq!(error.message, "temperature must be from 0 to 2, found 2.5");
        let error = body(r#"{"max_tokens": 0}"#)
            .count("max_tokens", 1)
            .unwrap_err();
        assert_eq!(
            error.message,
            "max_tokens must be from 1 to 4294967295, found 0"
        );
    }
}
