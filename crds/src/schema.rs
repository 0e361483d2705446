//! Which fields the resources have, what each may hold, and who can honour it.
//!
//! The tables are the reader's, and the CustomResourceDefinitions are made from them ([`crate::crd`]); the types in [`crate::pool`] and
//! [`crate::policy`] hold what passed them. They are kept apart because a type stops at its first error and knows no lines.

#[cfg(test)]
mod agreement;
mod kubernetes;
pub(crate) mod policy;
pub(crate) mod pool;
pub(crate) mod status;
mod template;

/// One field of an object.
#[derive(Debug)]
pub(crate) struct Field {
    pub(crate) name: &'static str,
    /// What it is, in its unit, and what it does; for `kubectl explain`.
    pub(crate) about: &'static str,
    pub(crate) shape: Shape,
    pub(crate) support: Support,
    pub(crate) required: bool,
    /// What a cluster writes into an object that leaves the field out; the types' own default is the same.
    pub(crate) default: Option<Preset>,
}

/// A default.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Preset {
    Integer(i64),
    False,
    Word(&'static str),
    Words(&'static [&'static str]),
}

impl Field {
    pub(crate) const fn or(mut self, default: Preset) -> Self {
        self.default = Some(default);
        self
    }

    pub(crate) const fn or_integer(self, default: i64) -> Self {
        self.or(Preset::Integer(default))
    }

    pub(crate) const fn or_word(self, default: &'static str) -> Self {
        self.or(Preset::Word(default))
    }
}

/// Who can honour a field.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Support {
    /// Any Baton.
    Everywhere,
    /// Only one on a cluster; elsewhere it is checked, and named in a warning.
    Cluster,
    /// A later version.
    Later,
}

/// What a field may hold.
#[derive(Debug)]
pub(crate) enum Shape {
    Text {
        form: Form,
        longest: usize,
    },
    Integer {
        least: i64,
        most: i64,
    },
    Bool,
    /// One word of `now`; those of `later` are known and refused.
    Choice {
        now: &'static [&'static str],
        later: &'static [&'static str],
    },
    Object(&'static [Field]),
    List {
        of: &'static Shape,
        longest: usize,
        merge: Merge,
    },
    /// Names of the author's choice.
    Map {
        of: &'static Shape,
        longest: usize,
    },
    /// Kubernetes' amount of a resource: a number with a unit as `"500m"` or `"8Gi"`, or an integer.
    Quantity,
    /// Kubernetes' own structure, which the API server checks.
    Foreign,
}

/// How a cluster merges lists that several people apply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Merge {
    /// Not: the last one has it all.
    Atomic,
    /// Item by item; none may be there twice.
    Set,
    /// By the members that name an item.
    Keys(&'static [&'static str]),
}

/// What a text must look like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    /// Anything, also nothing.
    Any,
    /// Anything printable that is not empty.
    Free,
    /// A DNS label: lower-case letters, digits and `-`, an alphanumeric first and last.
    Label,
    /// A model name as clients send it: visible characters without spaces.
    Model,
    /// A path from the root.
    AbsolutePath,
    /// The name of a label or of an extended resource: `name` or `domain/name`.
    Qualified,
    /// The name of a variable of the environment.
    Variable,
    /// RFC 3339; only a cluster writes it.
    Time,
}

const fn made(
    name: &'static str,
    about: &'static str,
    shape: Shape,
    support: Support,
    required: bool,
) -> Field {
    Field {
        name,
        about,
        shape,
        support,
        required,
        default: None,
    }
}

/// A field that may be left out.
pub(crate) const fn field(name: &'static str, about: &'static str, shape: Shape) -> Field {
    made(name, about, shape, Support::Everywhere, false)
}

pub(crate) const fn required(name: &'static str, about: &'static str, shape: Shape) -> Field {
    made(name, about, shape, Support::Everywhere, true)
}

pub(crate) const fn cluster(name: &'static str, about: &'static str, shape: Shape) -> Field {
    made(name, about, shape, Support::Cluster, false)
}

pub(crate) const fn later(name: &'static str, about: &'static str, shape: Shape) -> Field {
    made(name, about, shape, Support::Later, false)
}

pub(crate) const fn integer(least: i64, most: i64) -> Shape {
    Shape::Integer { least, most }
}

pub(crate) const fn text(form: Form, longest: usize) -> Shape {
    Shape::Text { form, longest }
}

pub(crate) const fn list(of: &'static Shape, longest: usize) -> Shape {
    Shape::List {
        of,
        longest,
        merge: Merge::Atomic,
    }
}

pub(crate) const fn set(of: &'static Shape, longest: usize) -> Shape {
    Shape::List {
        of,
        longest,
        merge: Merge::Set,
    }
}

pub(crate) const fn keyed(
    of: &'static Shape,
    longest: usize,
    keys: &'static [&'static str],
) -> Shape {
    Shape::List {
        of,
        longest,
        merge: Merge::Keys(keys),
    }
}

pub(crate) const fn map(of: &'static Shape, longest: usize) -> Shape {
    Shape::Map { of, longest }
}

/// One of these words.
pub(crate) const fn choice(now: &'static [&'static str]) -> Shape {
    Shape::Choice { now, later: &[] }
}

/// A label's value, an annotation, a variable's value.
pub(crate) static ANY: Shape = text(Form::Any, 4096);
/// The author's text that has to say something.
pub(crate) static FREE: Shape = text(Form::Free, 4096);
/// The value of a label that is looked for.
pub(crate) static LABEL_VALUE: Shape = text(Form::Any, 63);
static FOREIGN: Shape = Shape::Foreign;

/// Names are joined to role, revision and number, and all of it has to fit 63 characters.
pub(crate) const LONGEST_NAME: usize = 40;

/// `metadata` of every kind. What Kubernetes itself adds to an object that was read back from it is let through; a cluster's own schema
/// of it is Kubernetes'.
pub(crate) static METADATA: &[Field] = &[
    required("name", "", text(Form::Label, LONGEST_NAME)),
    field("namespace", "", text(Form::Label, 63)),
    field("labels", "", map(&ANY, 64)),
    field("annotations", "", map(&FOREIGN, 256)),
    field("uid", "", Shape::Foreign),
    field("resourceVersion", "", Shape::Foreign),
    field("generation", "", integer(0, i64::MAX)),
    field("creationTimestamp", "", text(Form::Any, 64)),
    field("managedFields", "", Shape::Foreign),
    field("ownerReferences", "", Shape::Foreign),
    field("finalizers", "", Shape::Foreign),
];
