//! Which fields the resources have, what each may hold, and who can honour it.
//!
//! The tables are the reader's; the types in [`crate::pool`] and [`crate::policy`] hold what passed them. They are kept
//! apart because a type stops at its first error and knows no lines.

#[cfg(test)]
mod agreement;
pub(crate) mod policy;
pub(crate) mod pool;

/// One field of an object.
#[derive(Debug)]
pub(crate) struct Field {
    pub(crate) name: &'static str,
    pub(crate) shape: Shape,
    pub(crate) support: Support,
    pub(crate) required: bool,
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
    },
    /// Names of the author's choice.
    Map {
        of: &'static Shape,
        longest: usize,
    },
    /// Kubernetes' own structure, which the API server checks.
    Foreign,
}

/// What a text must look like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    /// Anything printable that is not empty.
    Free,
    /// A DNS label: lower-case letters, digits and `-`, an alphanumeric first and last.
    Label,
    /// A model name as clients send it: visible characters without spaces.
    Model,
    /// A path from the root.
    AbsolutePath,
}

/// A field that may be left out.
pub(crate) const fn field(name: &'static str, shape: Shape) -> Field {
    Field {
        name,
        shape,
        support: Support::Everywhere,
        required: false,
    }
}

pub(crate) const fn required(name: &'static str, shape: Shape) -> Field {
    Field {
        name,
        shape,
        support: Support::Everywhere,
        required: true,
    }
}

pub(crate) const fn cluster(name: &'static str, shape: Shape) -> Field {
    Field {
        name,
        shape,
        support: Support::Cluster,
        required: false,
    }
}

pub(crate) const fn later(name: &'static str, shape: Shape) -> Field {
    Field {
        name,
        shape,
        support: Support::Later,
        required: false,
    }
}

pub(crate) const fn integer(least: i64, most: i64) -> Shape {
    Shape::Integer { least, most }
}

pub(crate) const fn text(form: Form, longest: usize) -> Shape {
    Shape::Text { form, longest }
}

/// The author's text of a label or annotation value, environment variable and the like.
pub(crate) static FREE: Shape = text(Form::Free, 4096);
static FOREIGN: Shape = Shape::Foreign;

/// Names are joined to role, revision and number, and all of it has to fit 63 characters.
pub(crate) const LONGEST_NAME: usize = 40;

/// `metadata` of every kind. What Kubernetes itself adds to an object that was read back from it is let through.
pub(crate) static METADATA: &[Field] = &[
    required("name", text(Form::Label, LONGEST_NAME)),
    field("namespace", text(Form::Label, 63)),
    field(
        "labels",
        Shape::Map {
            of: &FREE,
            longest: 64,
        },
    ),
    field(
        "annotations",
        Shape::Map {
            of: &FOREIGN,
            longest: 256,
        },
    ),
    field("uid", Shape::Foreign),
    field("resourceVersion", Shape::Foreign),
    field("generation", Shape::Foreign),
    field("creationTimestamp", Shape::Foreign),
    field("managedFields", Shape::Foreign),
    field("ownerReferences", Shape::Foreign),
    field("finalizers", Shape::Foreign),
];
