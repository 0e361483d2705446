//! Policies in force: read from a file, checked, kept by generation.

/// One policy in force, as requests are served under it.
#[derive(Clone, Debug)]
pub struct PolicyHandle {
    /// Name of the resource.
    pub name: String,
    /// As clients ask for it.
    pub model: String,
    pub aliases: Vec<String>,
    /// `overrides: Allowed`: the `x-baton-mode` header counts.
    pub allows_overrides: bool,
    /// Rises with each change of the file.
    pub generation: u64,
}
