//! Policies in force, from a file or from a cluster: what requests are served under, and which policies are refused and why.
//!
//! - [`file`]: a list of policies in one file.

pub mod file;

use std::collections::HashMap;
use std::sync::Arc;

use arc_swap::ArcSwap;
use baton_placement::policy::{Overrides, Policy};
use serde::Serialize;
use tracing::info;

use crate::clock::Moment;

/// One policy in force, as requests are served under it. A request keeps its policy when another comes into force.
#[derive(Clone, Debug)]
pub struct PolicyHandle {
    /// Name of the resource.
    pub name: String,
    /// As clients ask for it.
    pub model: String,
    pub aliases: Vec<String>,
    /// `overrides: Allowed`: the `x-baton-mode` header counts.
    pub allows_overrides: bool,
    pub generation: u64,
    pub digest: String,
    /// When it came into force.
    pub since: Moment,
    pub policy: Arc<Policy>,
}

impl PolicyHandle {
    pub fn new(policy: Policy, since: Moment) -> Self {
        Self {
            name: policy.name.clone(),
            model: policy.model.clone(),
            aliases: policy.aliases.clone(),
            allows_overrides: policy.overrides == Overrides::Allowed,
            generation: policy.generation,
            digest: policy.digest(),
            since,
            policy: Arc::new(policy),
        }
    }
}

/// A name of a model that two policies claim.
#[derive(Clone, Debug)]
pub struct Claimed {
    pub model: String,
    /// Who has it.
    pub by: Arc<PolicyHandle>,
}

/// The policies of one reading, by every name that clients may use.
#[derive(Clone, Debug, Default)]
pub struct PolicySet {
    pub policies: Vec<Arc<PolicyHandle>>,
    by_model: HashMap<String, Arc<PolicyHandle>>,
}

impl PolicySet {
    /// Adds a policy.
    ///
    /// # Errors
    /// One of its names is another policy's already: then nothing is added.
    pub fn add(&mut self, handle: Arc<PolicyHandle>) -> Result<(), Claimed> {
        let names = || std::iter::once(&handle.model).chain(&handle.aliases);
        for name in names() {
            if let Some(by) = self.of_model(name) {
                let model = name.clone();
                return Err(Claimed { model, by });
            }
        }
        for name in names() {
            self.by_model.insert(name.clone(), handle.clone());
        }
        self.policies.push(handle);
        Ok(())
    }

    pub fn of_model(&self, model: &str) -> Option<Arc<PolicyHandle>> {
        self.by_model.get(model).cloned()
    }

    /// The very same policies.
    pub fn is(&self, other: &Self) -> bool {
        let mut pairs = self.policies.iter().zip(&other.policies);
        self.policies.len() == other.policies.len() && pairs.all(|(a, b)| Arc::ptr_eq(a, b))
    }

    pub fn named(&self, name: &str) -> Option<&Arc<PolicyHandle>> {
        self.policies.iter().find(|policy| policy.name == name)
    }
}

/// Why something is not in force.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Refusal {
    /// The policy's; none where a whole file is refused.
    pub name: Option<String>,
    /// The one that is refused, not the one in force.
    pub generation: Option<u64>,
    /// Names of the model that it would serve, as far as they can be read.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub models: Vec<String>,
    pub reason: String,
}

/// What is in force, and what is not.
#[derive(Clone, Debug, Default)]
pub struct InForce {
    pub set: Arc<PolicySet>,
    pub refused: Vec<Refusal>,
}

impl InForce {
    /// The policy that would serve a model which nothing serves, if it were not refused: a router that has just started knows no
    /// earlier version of it.
    pub fn refused_for(&self, model: &str) -> Option<&Refusal> {
        let mut refused = self.refused.iter();
        refused.find(|refusal| refusal.models.iter().any(|name| name == model))
    }
}

/// The policies in force, wherever they come from.
#[derive(Debug, Default)]
pub struct Policies(ArcSwap<InForce>);

impl Policies {
    pub fn new(set: Arc<PolicySet>) -> Self {
        let policies = Self::default();
        policies.put(InForce {
            set,
            refused: Vec::new(),
        });
        policies
    }

    pub fn in_force(&self) -> Arc<InForce> {
        self.0.load_full()
    }

    /// From now on requests are served under these.
    pub fn put(&self, next: InForce) {
        let before = self.in_force();
        for policy in &next.set.policies {
            let known = before.set.named(&policy.name);
            if !known.is_some_and(|known| Arc::ptr_eq(known, policy)) {
                info!(
                    policy = policy.name,
                    generation = policy.generation,
                    "policy in force"
                );
            }
        }
        for policy in &before.set.policies {
            if next.set.named(&policy.name).is_none() {
                info!(policy = policy.name, "policy no longer in force");
            }
        }
        self.0.store(Arc::new(next));
    }
}

/// A policy in `GET /v1/policies`.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ListedPolicy {
    pub name: String,
    pub generation: u64,
    pub digest: String,
    /// RFC 3339.
    pub since: String,
    pub policy: Arc<Policy>,
}

impl From<&PolicyHandle> for ListedPolicy {
    fn from(handle: &PolicyHandle) -> Self {
        Self {
            name: handle.name.clone(),
            generation: handle.generation,
            digest: handle.digest.clone(),
            since: handle.since.rfc3339(),
            policy: handle.policy.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn handle(name: &str, model: &str, aliases: &[&str]) -> Arc<PolicyHandle> {
        let mut policy = Policy::new(name, model, &[], &["d"]);
        policy.aliases = aliases.iter().map(|alias| (*alias).to_owned()).collect();
        Arc::new(PolicyHandle::new(policy, Moment(0)))
    }

    #[test]
    fn a_name_that_is_taken_adds_nothing() {
        let mut set = PolicySet::default();
        set.add(handle("a", "m", &["gpt"])).unwrap();
        let claimed = set.add(handle("b", "n", &["o", "gpt"])).unwrap_err();
        assert_eq!(
            (claimed.model.as_str(), claimed.by.name.as_str()),
            ("gpt", "a")
        );
        assert!(set.of_model("n").is_none() && set.of_model("o").is_none());
        assert_eq!(set.of_model("gpt").unwrap().name, "a");
        assert_eq!(set.policies.len(), 1);
    }
}
