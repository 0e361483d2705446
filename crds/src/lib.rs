//! The three resources of Baton, `PrefillPool`, `DecodePool` and `RoutePolicy`, as Rust types, and a reader of YAML
//! whose errors name file, line, field and what is allowed.
//!
//! | module | subject |
//! |---|---|
//! | [`pool`] | `PoolSpec`: the one spec of both pool kinds |
//! | [`policy`] | `RoutePolicySpec` |
//! | [`status`] | what a cluster says about them |
//! | [`crd`] | the CustomResourceDefinitions |
//! | [`labels`] | names of labels, annotations and conditions |
//! | [`placement`] | a policy as `baton-placement` has it |
//! | [`worker_configuration`] | what a worker of a pool is started with |
//! | [`engine`] | the command line of a pool's vLLM or SGLang server |
//! | [`source`] | where a model comes from: exactly one of the sources, and the schemes of `uri` |
//! | [`differences`] | in which fields two pools contradict each other, so that they can never be paired |
//! | [`resources`] | what a set of files says, and [`read_documents`] / [`read_fleet`] that read it |
//! | `schema` | which fields there are, what each may hold, and who can honour it |
//! | `node`, `check` | YAML as a tree with lines, and the walk that holds the tree against the schema |
//! | `object` | an object of the API server, checked and typed |
//! | `rules`, `references` | what a field may hold given another field, and another resource |
//!
//! A file is parsed once into a tree that knows its lines. The tree is checked against the schema, so that every problem
//! of a file is found at once and not only the first, and only a tree without problems becomes the typed specs. The
//! schema and the types say the same; a test holds them together. What is absent: a Kubernetes client or type.

mod check;
pub mod crd;
pub mod differences;
pub mod engine;
pub mod labels;
mod nearest;
mod node;
mod object;
pub mod placement;
pub mod policy;
pub mod pool;
mod problem;
mod references;
pub mod resources;
mod rules;
mod schema;
pub mod source;
pub mod status;
pub mod worker_configuration;

pub use engine::{EngineCommand, EngineStart};
pub use object::check_object;
pub use policy::RoutePolicySpec;
pub use pool::PoolSpec;
pub use problem::Problem;
pub use resources::{Pool, PoolRole, Resources, RoutePolicy, read_documents, read_fleet};
pub use source::ModelLocation;
pub use status::{Condition, PoolStatus, RoutePolicyStatus};
pub use worker_configuration::{ServerOfWorker, Weights, WorkerConfiguration};

/// API group of all three kinds.
pub const GROUP: &str = "serving.baton.dev";
/// The one version there is.
pub const VERSION: &str = "v1alpha1";
