//! The good fleet, what is replaced in it, and what its author is told then: by the reader of files and by an API server.
//!
//! Two tests walk this one table, so that a file that `baton up` refuses is refused by a cluster, and for the same reason.

mod engines;
mod names;
mod pods;
mod references;
mod relations;
mod values;

pub(crate) struct Case {
    /// What of the fleet is replaced, where it first stands.
    pub(crate) old: &'static str,
    /// By what; `#!` marks the line that the reader has to name.
    pub(crate) new: &'static str,
    /// The field that the reader names.
    pub(crate) path: &'static str,
    /// A part of what the reader says.
    pub(crate) message: &'static str,
    /// A part of what `kubectl apply` says, with the field; empty where a cluster takes it.
    pub(crate) cluster: &'static str,
}

const fn case(
    old: &'static str,
    new: &'static str,
    path: &'static str,
    message: &'static str,
    cluster: &'static str,
) -> Case {
    Case {
        old,
        new,
        path,
        message,
        cluster,
    }
}

impl Case {
    /// The fleet with the passage replaced.
    pub(crate) fn manifest(&self) -> String {
        assert!(FLEET.contains(self.old), "the fleet has no {:?}", self.old);
        FLEET.replacen(self.old, self.new, 1)
    }
}

pub(crate) fn all() -> impl Iterator<Item = &'static Case> {
    [
        engines::CASES,
        names::CASES,
        values::CASES,
        relations::CASES,
        pods::CASES,
        references::CASES,
    ]
    .into_iter()
    .flatten()
}

pub(crate) const FLEET: &str = r#"# a fleet in one file
apiVersion: serving.baton.dev/v1alpha1
kind: PrefillPool
metadata:
  name: prefill
  labels: {tier: small}
spec:
  replicas: 1
  model:
    name: tiny
    source:
      uri: builtin://tiny?seed=1
  engine:
    type: Builtin
    blockSize: 16
    maxModelLength: 2048
  kvPool:
    blocks: 256
    leaseSeconds: 30
    transports: [Tcp]
  topology:
    domain: {host: a, rack: r}
---
apiVersion: serving.baton.dev/v1alpha1
kind: DecodePool
metadata:
  name: decode
spec:
  replicas: 2
  model:
    name: tiny
    source:
      uri: builtin://tiny?seed=1
  engine:
    type: Builtin
  kvPool:
    bytes: 1000000
---
apiVersion: serving.baton.dev/v1alpha1
kind: RoutePolicy
metadata:
  name: tiny
spec:
  model: tiny
  aliases: [small]
  prefillPools:
  - name: prefill
  decodePools:
  - name: decode
  mode: Conditional
  overrides: Allowed
  objective:
    ttftMilliseconds: 2000
  cost:
    preset: Balanced
    marginPercent: 10
  cache:
    source: Events
  fallback:
    replans: 1
  verify:
    checksum: Always
"#;
