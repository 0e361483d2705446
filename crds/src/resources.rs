//! What a set of files says: the pools and policies in them, and the reading of them.

use std::collections::BTreeMap;

use serde::de::DeserializeOwned;

use crate::check::Findings;
use crate::node::{self, Node};
use crate::policy::{PoolReference, RoutePolicySpec};
use crate::pool::{LEVELS, PoolSpec};
use crate::problem::Problem;
use crate::schema::policy::ROUTE_POLICY;
use crate::schema::pool::POOL;
use crate::schema::{Field, METADATA, Shape, field, required};
use crate::{GROUP, VERSION, references, rules};

/// Every resource of the files, in the order in which they stand there.
#[derive(Debug, Default)]
pub struct Resources {
    pub pools: Vec<Pool>,
    pub policies: Vec<RoutePolicy>,
    /// What is legal and yet not as its author may think, one sentence each; fields that only a cluster can honour are
    /// one sentence together.
    pub warnings: Vec<String>,
    /// `kind/name` of resources that have problems and are therefore not among the above.
    pub(crate) broken: Vec<String>,
}

/// Which of the two pool kinds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum PoolRole {
    Prefill,
    Decode,
}

impl PoolRole {
    /// `PrefillPool` or `DecodePool`.
    #[must_use]
    pub fn kind(self) -> &'static str {
        match self {
            Self::Prefill => "PrefillPool",
            Self::Decode => "DecodePool",
        }
    }

    /// The role that pools of a kind have.
    #[must_use]
    pub fn of_kind(kind: &str) -> Option<Self> {
        [Self::Prefill, Self::Decode]
            .into_iter()
            .find(|role| role.kind() == kind)
    }

    /// As labels have it.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }

    /// The field of a policy that names pools of this role.
    #[must_use]
    pub fn references(self) -> &'static str {
        match self {
            Self::Prefill => "prefillPools",
            Self::Decode => "decodePools",
        }
    }
}

/// A `PrefillPool` or a `DecodePool`.
#[derive(Debug, Clone)]
pub struct Pool {
    pub role: PoolRole,
    pub metadata: Metadata,
    pub spec: PoolSpec,
    pub origin: Origin,
}

/// A `RoutePolicy`.
#[derive(Debug, Clone)]
pub struct RoutePolicy {
    pub metadata: Metadata,
    pub spec: RoutePolicySpec,
    pub origin: Origin,
}

/// What of an object's metadata matters here.
#[derive(Debug, Clone, PartialEq, Eq, serde::Deserialize)]
pub struct Metadata {
    pub name: String,
    #[serde(default = "default_namespace")]
    pub namespace: String,
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// Counts changes of the spec in a cluster; 1 where there is none.
    #[serde(default = "first_generation")]
    pub generation: i64,
    /// RFC 3339; only in a cluster.
    #[serde(default, rename = "creationTimestamp")]
    pub created: Option<String>,
}

fn first_generation() -> i64 {
    1
}

fn default_namespace() -> String {
    "default".to_owned()
}

/// The document that an object was read from, so that a later finding can name its line.
#[derive(Debug, Clone)]
pub struct Origin {
    /// Empty for an object of a cluster.
    pub file: String,
    pub(crate) document: Node,
}

impl Origin {
    /// Line of the field at `path`, or of the nearest one above it that the author wrote.
    #[must_use]
    pub fn line_of(&self, path: &str) -> u64 {
        self.document.line_of(path)
    }

    /// A problem with the field at `path` of an object of this document.
    #[must_use]
    pub fn problem(&self, object: String, path: &str, message: String) -> Problem {
        Problem {
            file: self.file.clone(),
            line: self.line_of(path),
            object,
            path: path.to_owned(),
            message,
        }
    }
}

impl Pool {
    /// `PrefillPool NAME` or `DecodePool NAME`.
    #[must_use]
    pub fn title(&self) -> String {
        format!("{} {}", self.role.kind(), self.metadata.name)
    }
}

impl RoutePolicy {
    #[must_use]
    pub fn title(&self) -> String {
        format!("RoutePolicy {}", self.metadata.name)
    }

    /// Each of this policy's references of `role`, with the pools of `resources` that it names.
    #[must_use]
    pub fn references<'p, 'a>(
        &'p self,
        role: PoolRole,
        resources: &'a Resources,
    ) -> Vec<(&'p PoolReference, Vec<&'a Pool>)> {
        references::followed(self, role, &&resources.pools)
    }

    /// The pools of `resources` that this policy's references of `role` name, in the order of the references.
    #[must_use]
    pub fn pools<'a>(&self, role: PoolRole, resources: &'a Resources) -> Vec<&'a Pool> {
        references::named(self, role, &&resources.pools)
    }
}

/// Reads resources of all documents of all files, given as name and text. References between them are not followed: use
/// it where a file may stand alone, as a policy for a replay does.
///
/// # Errors
/// Every problem found, in the order of files and lines.
pub fn read_documents<'a>(
    files: impl IntoIterator<Item = (&'a str, &'a str)>,
) -> Result<Resources, Vec<Problem>> {
    let (resources, problems) = collect(files);
    if problems.is_empty() {
        Ok(resources)
    } else {
        Err(sorted(problems))
    }
}

/// Reads resources that are to run together: as [`read_documents`], and every pool that a policy names is there, is of
/// the right kind and serves the policy's model.
///
/// # Errors
/// Every problem found, in the order of files and lines.
pub fn read_fleet<'a>(
    files: impl IntoIterator<Item = (&'a str, &'a str)>,
) -> Result<Resources, Vec<Problem>> {
    let (mut resources, mut problems) = collect(files);
    problems.extend(references::check(&mut resources, !problems.is_empty()));
    if problems.is_empty() {
        Ok(resources)
    } else {
        Err(sorted(problems))
    }
}

fn sorted(mut problems: Vec<Problem>) -> Vec<Problem> {
    // Stable: problems of one line stay in the order in which they were found.
    problems.sort_by(|a, b| (&a.file, a.line).cmp(&(&b.file, b.line)));
    problems
}

fn collect<'a>(files: impl IntoIterator<Item = (&'a str, &'a str)>) -> (Resources, Vec<Problem>) {
    let mut resources = Resources::default();
    let mut problems = Vec::new();
    let mut cluster_only = Vec::new();
    for (file, text) in files {
        let documents = match node::parse(file, text) {
            Ok(documents) => documents,
            Err(problem) => {
                problems.push(problem);
                continue;
            }
        };
        let written: Vec<Node> = documents
            .into_iter()
            .filter(|document| !matches!(document.value, node::Value::Null))
            .collect();
        if written.is_empty() {
            let message =
                "holds no resource; give a PrefillPool, a DecodePool or a RoutePolicy".to_owned();
            problems.push(Problem {
                file: file.to_owned(),
                line: 0,
                object: String::new(),
                path: String::new(),
                message,
            });
        }
        for document in written {
            read_one(
                file,
                document,
                &mut resources,
                &mut problems,
                &mut cluster_only,
            );
        }
    }
    problems.extend(references::duplicates(&resources));
    if !cluster_only.is_empty() {
        resources.warnings.push(format!(
            "only a cluster can honour these fields, they have no effect here: {}",
            cluster_only.join(", ")
        ));
    }
    (resources, problems)
}

/// The kinds, with the fields of their specs.
pub(crate) fn spec_fields(kind: &str) -> Option<&'static [Field]> {
    match kind {
        "PrefillPool" | "DecodePool" => Some(POOL),
        "RoutePolicy" => Some(ROUTE_POLICY),
        _ => None,
    }
}

const KINDS: [&str; 3] = ["PrefillPool", "DecodePool", "RoutePolicy"];

fn read_one(
    file: &str,
    document: Node,
    resources: &mut Resources,
    problems: &mut Vec<Problem>,
    cluster_only: &mut Vec<String>,
) {
    let kind = document
        .get("kind")
        .and_then(Node::text)
        .unwrap_or_default()
        .to_owned();
    let name = document
        .get("metadata")
        .and_then(|metadata| metadata.get("name"))
        .and_then(Node::text)
        .unwrap_or_default();
    let title = format!("{kind} {name}").trim().to_owned();
    let broken = format!("{kind}/{name}");
    let mut findings = Findings::new(file, title.clone());

    if let Some(fields) = check_type(&document, &kind, &mut findings) {
        let top = [
            required("apiVersion", "", Shape::Foreign),
            required("kind", "", Shape::Foreign),
            required("metadata", "", Shape::Object(METADATA)),
            required("spec", "", Shape::Object(fields)),
            field("status", "", Shape::Foreign),
        ];
        findings.object(&document, document.line, "", &top);
        cluster_only.extend(
            findings
                .cluster_only
                .iter()
                .map(|path| format!("{title} {path}")),
        );
    }
    let mut found = std::mem::take(&mut findings.problems);
    if found.is_empty() {
        let origin = Origin {
            file: file.to_owned(),
            document,
        };
        match kind.as_str() {
            "RoutePolicy" => found = read_policy(origin, resources, &title),
            kind => {
                let role = PoolRole::of_kind(kind).unwrap_or(PoolRole::Decode);
                found = read_pool(role, origin, resources, &title);
            }
        }
    }
    if !found.is_empty() {
        resources.broken.push(broken);
        problems.extend(found);
    }
}

/// The fields of the document's spec, if its `apiVersion` and `kind` are known.
fn check_type(
    document: &Node,
    kind: &str,
    findings: &mut Findings<'_>,
) -> Option<&'static [Field]> {
    let wanted = format!("{GROUP}/{VERSION}");
    if !matches!(document.value, node::Value::Map(_)) {
        let message = format!(
            "found {}, must be an object with apiVersion, kind, metadata, spec",
            document.shown()
        );
        findings.problem(document.line, "", message);
        return None;
    }
    let version_ok = match document.get("apiVersion") {
        Some(node) if node.text() == Some(&wanted) => true,
        found => {
            let shown = found.map_or("nothing".to_owned(), Node::shown);
            findings.problem(
                document.line_of("apiVersion"),
                "apiVersion",
                format!("found {shown}, must be {wanted}"),
            );
            false
        }
    };
    let fields = spec_fields(kind);
    if fields.is_none() {
        let shown = document
            .get("kind")
            .map_or("nothing".to_owned(), Node::shown);
        let suggestion = crate::nearest::nearest(kind, KINDS)
            .map_or(String::new(), |kind| format!("; did you mean {kind}?"));
        let message = format!(
            "found {shown}, must be one of {}{suggestion}",
            KINDS.join(", ")
        );
        findings.problem(document.line_of("kind"), "kind", message);
    }
    fields.filter(|_| version_ok)
}

fn read_pool(
    role: PoolRole,
    origin: Origin,
    resources: &mut Resources,
    title: &str,
) -> Vec<Problem> {
    match typed::<PoolSpec>(&origin, title) {
        Ok((metadata, spec)) => {
            let problems = rules::pool(&spec, &origin, title, Some(&LEVELS));
            if problems.is_empty() {
                resources.pools.push(Pool {
                    role,
                    metadata,
                    spec,
                    origin,
                });
            }
            problems
        }
        Err(problem) => vec![problem],
    }
}

fn read_policy(origin: Origin, resources: &mut Resources, title: &str) -> Vec<Problem> {
    match typed::<RoutePolicySpec>(&origin, title) {
        Ok((metadata, spec)) => {
            let problems = rules::policy(&spec, &origin, title, Some(&LEVELS));
            if problems.is_empty() {
                resources.policies.push(RoutePolicy {
                    metadata,
                    spec,
                    origin,
                });
            }
            problems
        }
        Err(problem) => vec![problem],
    }
}

/// The schema let it through, so this fails only where schema and types disagree.
pub(crate) fn typed<S: DeserializeOwned>(
    origin: &Origin,
    title: &str,
) -> Result<(Metadata, S), Problem> {
    let mut json = origin.document.to_json();
    let metadata = serde_json::from_value(json["metadata"].take())
        .map_err(|error| origin.problem(title.to_owned(), "metadata", error.to_string()))?;
    let spec = serde_json::from_value(json["spec"].take())
        .map_err(|error| origin.problem(title.to_owned(), "spec", error.to_string()))?;
    Ok((metadata, spec))
}
