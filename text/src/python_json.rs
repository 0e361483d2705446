//! The `tojson` filter of chat templates: JSON as Python writes it.

use std::io;

use minijinja::value::Kwargs;
use minijinja::{Error, ErrorKind, Value};
use serde::Serialize;

/// As Python's `json.dumps(value, ensure_ascii=False)`, with `indent` and `separators` as that takes them.
// The template engine hands over keyword arguments by value only.
#[allow(clippy::needless_pass_by_value)]
pub(super) fn to_json(value: &Value, options: Kwargs) -> Result<Value, Error> {
    let indent: Option<usize> = options.get("indent")?;
    let separators: Option<Vec<String>> = options.get("separators")?;
    // Taken and not needed: keys come sorted already, and text is never escaped to ASCII.
    let _: Option<bool> = options.get("ensure_ascii")?;
    let _: Option<bool> = options.get("sort_keys")?;
    options.assert_all_used()?;
    let (item, key) = match separators.as_deref() {
        Some([item, key]) => (item.clone(), key.clone()),
        Some(_) => {
            return Err(Error::new(
                ErrorKind::InvalidOperation,
                "tojson: separators must be two strings",
            ));
        }
        None if indent.is_some() => (",".to_owned(), ": ".to_owned()),
        None => (", ".to_owned(), ": ".to_owned()),
    };
    let style = PythonStyle {
        item,
        key,
        indent,
        depth: 0,
        empty: true,
    };
    let mut bytes = Vec::new();
    let written = value.serialize(&mut serde_json::Serializer::with_formatter(
        &mut bytes, style,
    ));
    let failed =
        |error: String| Error::new(ErrorKind::BadSerialization, format!("tojson: {error}"));
    written.map_err(|error| failed(error.to_string()))?;
    String::from_utf8(bytes)
        .map(Value::from)
        .map_err(|error| failed(error.to_string()))
}

/// Separators and indentation of Python's `json`.
struct PythonStyle {
    item: String,
    key: String,
    indent: Option<usize>,
    depth: usize,
    empty: bool,
}

impl PythonStyle {
    fn open<W: ?Sized + io::Write>(&mut self, writer: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.depth += 1;
        self.empty = true;
        writer.write_all(bracket)
    }

    fn close<W: ?Sized + io::Write>(&mut self, writer: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.depth -= 1;
        if !self.empty {
            self.line(writer)?;
        }
        self.empty = false;
        writer.write_all(bracket)
    }

    fn item<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if !first {
            writer.write_all(self.item.as_bytes())?;
        }
        self.empty = false;
        self.line(writer)
    }

    fn line<W: ?Sized + io::Write>(&self, writer: &mut W) -> io::Result<()> {
        let Some(indent) = self.indent else {
            return Ok(());
        };
        writer.write_all(b"\n")?;
        writer.write_all(" ".repeat(indent * self.depth).as_bytes())
    }
}

impl serde_json::ser::Formatter for PythonStyle {
    fn begin_array<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.open(writer, b"[")
    }

    fn end_array<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.close(writer, b"]")
    }

    fn begin_array_value<W: ?Sized + io::Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> io::Result<()> {
        self.item(writer, first)
    }

    fn begin_object<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.open(writer, b"{")
    }

    fn end_object<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.close(writer, b"}")
    }

    fn begin_object_key<W: ?Sized + io::Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> io::Result<()> {
        self.item(writer, first)
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(self.key.as_bytes())
    }
}
