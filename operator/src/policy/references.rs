//! Which pools a policy names.

use baton_crds::PoolRole;
use baton_crds::policy::PoolReference;

use super::observed::{PolicyObject, PoolView};

/// One reference with the pools that it names.
#[derive(Clone, Debug)]
pub struct Followed<'a> {
    /// Path of the reference in the policy.
    pub path: String,
    pub reference: &'a PoolReference,
    pub pools: Vec<&'a PoolView>,
}

/// Both sides of a policy.
#[derive(Clone, Debug)]
pub struct Sides<'a> {
    pub prefill: Vec<&'a PoolView>,
    pub decode: Vec<&'a PoolView>,
    pub references: Vec<(PoolRole, Followed<'a>)>,
}

impl<'a> Sides<'a> {
    #[must_use]
    pub fn of(policy: &'a PolicyObject, pools: &'a [PoolView]) -> Self {
        let mut sides = Self {
            prefill: Vec::new(),
            decode: Vec::new(),
            references: Vec::new(),
        };
        for (role, field, references) in [
            (
                PoolRole::Prefill,
                "prefillPools",
                &policy.spec.prefill_pools,
            ),
            (PoolRole::Decode, "decodePools", &policy.spec.decode_pools),
        ] {
            for (index, reference) in references.iter().enumerate() {
                let found: Vec<&PoolView> = pools
                    .iter()
                    .filter(|pool| pool.role == role && names(reference, pool))
                    .collect();
                let side = match role {
                    PoolRole::Prefill => &mut sides.prefill,
                    PoolRole::Decode => &mut sides.decode,
                };
                for pool in &found {
                    if !side.iter().any(|known| known.name == pool.name) {
                        side.push(pool);
                    }
                }
                let followed = Followed {
                    path: format!("spec.{field}[{index}]"),
                    reference,
                    pools: found,
                };
                sides.references.push((role, followed));
            }
        }
        sides
    }
}

/// Does the reference name this pool of the right kind and namespace?
#[must_use]
pub fn names(reference: &PoolReference, pool: &PoolView) -> bool {
    reference.name.as_ref() == Some(&pool.name)
        || reference.selector.as_ref().is_some_and(|selector| {
            selector
                .match_labels
                .iter()
                .all(|(label, value)| pool.labels.get(label) == Some(value))
        })
}
