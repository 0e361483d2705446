//! Which object a controller looks at.

use std::fmt;

use baton_crds::PoolRole;

/// A pool, by kind and name: a `PrefillPool` and a `DecodePool` may have one name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PoolKey {
    pub role: PoolRole,
    pub namespace: String,
    pub name: String,
}

impl fmt::Display for PoolKey {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            formatter,
            "{} {}/{}",
            self.role.kind(),
            self.namespace,
            self.name
        )
    }
}

/// A `RoutePolicy`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PolicyKey {
    pub namespace: String,
    pub name: String,
}

impl fmt::Display for PolicyKey {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "RoutePolicy {}/{}", self.namespace, self.name)
    }
}
