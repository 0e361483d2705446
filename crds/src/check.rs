//! The walk that holds a tree against the schema and finds everything that is wrong with it.

use crate::nearest::nearest;
use crate::node::{Entry, Node, Value, shortened};
use crate::problem::Problem;
use crate::schema::{Field, Form, Merge, Shape, Support};

/// Names that an object's label or a topology level may have.
const LONGEST_MAP_KEY: usize = 317;

/// What an integer without a range of its own may be.
const LARGEST: i128 = i64::MAX as i128;

/// What the walk found in one document.
#[derive(Debug)]
pub(crate) struct Findings<'a> {
    file: &'a str,
    object: String,
    pub(crate) problems: Vec<Problem>,
    /// Paths of fields that only a cluster can honour, in order.
    pub(crate) cluster_only: Vec<String>,
}

impl<'a> Findings<'a> {
    pub(crate) fn new(file: &'a str, object: String) -> Self {
        Self {
            file,
            object,
            problems: Vec::new(),
            cluster_only: Vec::new(),
        }
    }

    pub(crate) fn problem(&mut self, line: u64, path: &str, message: String) {
        self.problems.push(Problem {
            file: self.file.to_owned(),
            line,
            object: self.object.clone(),
            path: path.to_owned(),
            message,
        });
    }

    /// Holds an object against its fields. `path` is the object's own.
    pub(crate) fn object(&mut self, node: &Node, line: u64, path: &str, fields: &[Field]) {
        let Value::Map(entries) = &node.value else {
            let names = names(fields);
            self.problem(
                line,
                path,
                format!("found {}, must be an object with {names}", node.shown()),
            );
            return;
        };
        for entry in entries {
            self.known(entry, &join(path, &entry.name), fields);
        }
        for field in fields.iter().filter(|field| field.required) {
            let given = entries
                .iter()
                .any(|entry| entry.name == field.name && !is_null(&entry.node));
            if !given {
                self.problem(
                    line,
                    &join(path, field.name),
                    format!("is required: {}", allowed(&field.shape)),
                );
            }
        }
    }

    /// One member of an object, of which `fields` are known.
    pub(crate) fn known(&mut self, entry: &Entry, path: &str, fields: &[Field]) {
        match fields.iter().find(|field| field.name == entry.name) {
            None => self.unknown(entry, path, fields),
            Some(field) => self.field(entry, path, field),
        }
    }

    fn unknown(&mut self, entry: &Entry, path: &str, fields: &[Field]) {
        let known = || {
            fields
                .iter()
                .filter(|field| field.support != Support::Later)
                .map(|field| field.name)
        };
        let suggestion = nearest(&entry.name, known())
            .map_or(String::new(), |name| format!(", did you mean {name}?"));
        self.problem(
            entry.line,
            path,
            format!("unknown field{suggestion} (allowed: {})", names(fields)),
        );
    }

    fn field(&mut self, entry: &Entry, path: &str, field: &Field) {
        // A null is a field left out, as the API server sees it.
        if is_null(&entry.node) {
            return;
        }
        match field.support {
            Support::Later => {
                self.problem(
                    entry.line,
                    path,
                    "not supported yet by this version; leave the field out".to_owned(),
                );
                return;
            }
            Support::Cluster => self.cluster_only.push(path.to_owned()),
            Support::Everywhere => {}
        }
        self.shape(&entry.node, entry.line, path, &field.shape);
    }

    fn shape(&mut self, node: &Node, line: u64, path: &str, shape: &Shape) {
        let wrong = |what: &str| format!("found {}{what}, {}", node.shown(), allowed(shape));
        match (shape, &node.value) {
            (Shape::Foreign, _)
            | (Shape::Bool, Value::Bool(_))
            | (Shape::Quantity, Value::Integer(0..=LARGEST)) => {}
            (Shape::Quantity, Value::Text(text)) => {
                if !is_quantity(text) {
                    self.problem(line, path, wrong(""));
                }
            }
            (Shape::Text { form, longest }, Value::Text(text)) => {
                let length = text.chars().count();
                if length > *longest {
                    self.problem(line, path, wrong(&format!(" of {length} characters")));
                } else if !fits(*form, text) {
                    self.problem(line, path, wrong(""));
                }
            }
            (Shape::Text { .. }, Value::Integer(_) | Value::Float(_) | Value::Bool(_)) => {
                self.problem(line, path, format!("{}: write it in quotes", wrong("")));
            }
            (Shape::Integer { least, most }, Value::Integer(value)) => {
                if *value < i128::from(*least) || *value > i128::from(*most) {
                    self.problem(line, path, wrong(""));
                }
            }
            (Shape::Integer { .. }, Value::Text(text)) if text.parse::<i64>().is_ok() => {
                self.problem(
                    line,
                    path,
                    format!("{}: write it without quotes", wrong("")),
                );
            }
            (Shape::Choice { now, later }, Value::Text(text)) => {
                if now.contains(&text.as_str()) {
                } else if later.contains(&text.as_str()) {
                    self.problem(
                        line,
                        path,
                        format!(
                            "\"{text}\" is not supported yet by this version; allowed: {}",
                            list(now)
                        ),
                    );
                } else {
                    let suggestion = nearest(text, now.iter().copied())
                        .map_or(String::new(), |name| format!("; did you mean {name}?"));
                    self.problem(line, path, format!("{}{suggestion}", wrong("")));
                }
            }
            (Shape::Object(fields), _) => self.object(node, line, path, fields),
            (Shape::List { of, longest, merge }, Value::List(items)) => {
                if items.len() > *longest {
                    self.problem(line, path, wrong(" items"));
                }
                self.repeated(items, path, *merge);
                for (index, item) in items.iter().enumerate() {
                    self.shape(item, item.line, &format!("{path}[{index}]"), of);
                }
            }
            (Shape::Map { of, longest }, Value::Map(entries)) => {
                if entries.len() > *longest {
                    self.problem(
                        line,
                        path,
                        format!("found {} entries, {}", entries.len(), allowed(shape)),
                    );
                }
                for entry in entries {
                    let path = join(path, &entry.name);
                    if entry.name.is_empty() || entry.name.len() > LONGEST_MAP_KEY {
                        self.problem(
                            entry.line,
                            &path,
                            format!("a name must have 1 to {LONGEST_MAP_KEY} characters"),
                        );
                    }
                    self.shape(&entry.node, entry.line, &path, of);
                }
            }
            _ => self.problem(line, path, wrong("")),
        }
    }

    /// Items of a list that is merged item by item name what is to be merged: none may be there twice.
    fn repeated(&mut self, items: &[Node], path: &str, merge: Merge) {
        let name = |item: &Node| match merge {
            Merge::Atomic => None,
            Merge::Set => Some(item.text()?.to_owned()),
            Merge::Keys(keys) => {
                let names: Option<Vec<&str>> =
                    keys.iter().map(|key| item.get(key)?.text()).collect();
                Some(names?.join(" "))
            }
        };
        let names: Vec<Option<String>> = items.iter().map(name).collect();
        for (index, (item, name)) in items.iter().zip(&names).enumerate() {
            if let Some(given) = name
                && names[..index].contains(name)
            {
                let path = format!("{path}[{index}]");
                let given = shortened(given);
                self.problem(item.line, &path, format!("{given} is listed twice"));
            }
        }
    }
}

fn is_null(node: &Node) -> bool {
    matches!(node.value, Value::Null)
}

pub(crate) fn join(path: &str, name: &str) -> String {
    if path.is_empty() {
        name.to_owned()
    } else {
        format!("{path}.{name}")
    }
}

fn names(fields: &[Field]) -> String {
    let names: Vec<&str> = fields
        .iter()
        .filter(|field| field.support != Support::Later)
        .map(|field| field.name)
        .collect();
    list(&names)
}

fn list(names: &[&str]) -> String {
    if names.is_empty() {
        "none".to_owned()
    } else {
        names.join(", ")
    }
}

/// What a field may hold, as the end of a sentence.
pub(crate) fn allowed(shape: &Shape) -> String {
    match shape {
        Shape::Text { form, longest } => match form {
            Form::Any => format!("must be a text of at most {longest} characters"),
            Form::Free => format!("must be a text of 1 to {longest} characters"),
            Form::Qualified => {
                format!("must be a name as nvidia.com/gpu, of at most {longest} characters")
            }
            Form::Variable => format!(
                "must be the name of a variable, of at most {longest} characters: letters, digits, _, - and ., no digit first"
            ),
            Form::Time => "must be a time as 2026-01-31T12:00:00Z".to_owned(),
            Form::Label => format!(
                "must be a DNS label of at most {longest} characters (lower-case letters, digits and -, a letter or digit first and last)"
            ),
            Form::Model => format!("must be a name of 1 to {longest} characters without spaces"),
            Form::AbsolutePath => "must be a path that begins with /".to_owned(),
        },
        Shape::Integer { least, most } if *most == i64::MAX => {
            format!("must be an integer of at least {least}")
        }
        Shape::Integer { least, most } => format!("must be an integer from {least} to {most}"),
        Shape::Bool => "must be true or false".to_owned(),
        Shape::Choice { now, .. } => format!("must be one of {}", list(now)),
        Shape::Object(fields) => format!("must be an object with {}", names(fields)),
        Shape::List { longest, .. } => format!("must be a list of at most {longest} items"),
        Shape::Map { longest, .. } => format!("must be an object of at most {longest} entries"),
        Shape::Quantity => "must be a quantity as 2, \"500m\" or \"8Gi\"".to_owned(),
        Shape::Foreign => "must be what Kubernetes takes there".to_owned(),
    }
}

pub(crate) fn fits(form: Form, text: &str) -> bool {
    let visible = |text: &str| !text.is_empty() && !text.chars().any(char::is_control);
    match form {
        Form::Any => !text.contains('\0'),
        Form::Free => !text.is_empty() && !text.contains('\0'),
        Form::Time => !text.is_empty(),
        Form::Qualified => match text.split_once('/') {
            Some((domain, name)) => {
                domain.split('.').all(|part| fits(Form::Label, part)) && is_name(name)
            }
            None => is_name(text),
        },
        Form::Variable => {
            !text.is_empty()
                && !text.starts_with(|c: char| c.is_ascii_digit())
                && text
                    .chars()
                    .all(|c| c.is_ascii_alphanumeric() || "_-.".contains(c))
        }
        Form::Model => visible(text) && !text.contains(char::is_whitespace),
        Form::AbsolutePath => text.starts_with('/') && visible(text),
        Form::Label => {
            let edge =
                |c: Option<char>| c.is_some_and(|c| c.is_ascii_lowercase() || c.is_ascii_digit());
            edge(text.chars().next())
                && edge(text.chars().last())
                && text
                    .chars()
                    .all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-')
        }
    }
}

/// The part of a qualified name after its domain.
fn is_name(text: &str) -> bool {
    let edge = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric());
    text.len() <= 63
        && edge(text.chars().next())
        && edge(text.chars().last())
        && text
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
}

/// Digits, perhaps with a point, and one of Kubernetes' suffixes or an exponent. Negative amounts of anything make no sense here.
fn is_quantity(text: &str) -> bool {
    const SUFFIXES: [&str; 15] = [
        "", "n", "u", "m", "k", "M", "G", "T", "P", "E", "Ki", "Mi", "Gi", "Ti", "Pi",
    ];
    let number = text.trim_start_matches(|c: char| c.is_ascii_digit() || c == '.');
    let (digits, suffix) = text.split_at(text.len() - number.len());
    digits.contains(|c: char| c.is_ascii_digit())
        && digits.matches('.').count() <= 1
        && SUFFIXES.contains(&suffix)
}
