//! Policies in force, from the objects that the API server shows: each stands for itself. Pure.
//!
//! A policy that cannot be honoured leaves its own last good version in force and touches no other. One that is deleted goes. A model has
//! one policy: the older has it, the younger is refused and told who.

use std::sync::Arc;

use baton_placement::policy::Policy;
use kube::api::DynamicObject;

use crate::clock::Moment;
use crate::policy::{Claimed, InForce, PolicyHandle, PolicySet, Refusal};

/// What is in force now, given what was. `read` makes an object placement's policy, or says why it cannot.
pub fn policies(
    before: &PolicySet,
    objects: &[Arc<DynamicObject>],
    now: Moment,
    read: impl Fn(&DynamicObject) -> Result<Policy, String>,
) -> InForce {
    let mut objects: Vec<&DynamicObject> = objects.iter().map(Arc::as_ref).collect();
    // The older first; of one second, by name, so that all routers decide alike.
    objects.sort_by_key(|object| {
        let created = object.metadata.creation_timestamp.as_ref();
        (created.map(|time| time.0), object.metadata.name.clone())
    });
    let mut set = PolicySet::default();
    let mut refused = Vec::new();
    for object in objects {
        let Some(name) = object.metadata.name.as_deref() else {
            continue;
        };
        let generation = object.metadata.generation.unwrap_or_default();
        let generation = u64::try_from(generation).unwrap_or_default();
        let known = before.named(name);
        let judged = read(object).and_then(|mut policy| {
            policy.generation = generation;
            let handle = match known {
                Some(known) if *known.policy == policy => known.clone(),
                _ => Arc::new(PolicyHandle::new(policy, now)),
            };
            set.add(handle).map_err(|claimed| already_served(&claimed))
        });
        if let Err(reason) = judged {
            refused.push(Refusal {
                name: Some(name.to_owned()),
                generation: Some(generation),
                models: models(object),
                reason,
            });
            if let Some(known) = known {
                // It may have lost its model to an older one: then nothing of it can stay.
                let _ = set.add(known.clone());
            }
        }
    }
    InForce {
        set: Arc::new(set),
        refused,
    }
}

/// The names that an object claims, whatever else is wrong with it.
fn models(object: &DynamicObject) -> Vec<String> {
    let spec = &object.data["spec"];
    let aliases = spec["aliases"].as_array().into_iter().flatten();
    std::iter::once(&spec["model"])
        .chain(aliases)
        .filter_map(|name| name.as_str().map(str::to_owned))
        .collect()
}

fn already_served(Claimed { model, by }: &Claimed) -> String {
    format!(
        "model {model:?} is served by RoutePolicy {} already, which is older: one policy serves a model; delete one of the two or give this one another model",
        by.name
    )
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// `"b@3 m,alias"`: policy b of generation 3 for model m; created in the order of the list.
    fn objects(texts: &[&str]) -> Vec<Arc<DynamicObject>> {
        let object = |(second, text): (usize, &&str)| {
            let (head, models) = text.split_once(' ').unwrap();
            let (name, generation) = head.split_once('@').unwrap();
            let generation: i64 = generation.parse().unwrap();
            let object = json!({
                "metadata": {
                    "name": name, "generation": generation,
                    "creationTimestamp": format!("2026-11-30T00:00:{second:02}Z"),
                },
                "spec": {"models": models, "model": models.split(',').next(), "aliases": models.split(',').skip(1).collect::<Vec<_>>()},
            });
            Arc::new(serde_json::from_value(object).unwrap())
        };
        texts.iter().enumerate().map(object).collect()
    }

    fn read(object: &DynamicObject) -> Result<Policy, String> {
        let mut models = object.data["spec"]["models"].as_str().unwrap().split(',');
        let model = models.next().unwrap();
        if model == "bad" {
            return Err("spec.model: bad".to_owned());
        }
        let name = object.metadata.name.as_deref().unwrap();
        let mut policy = Policy::new(name, model, &[], &["d"]);
        policy.aliases = models.map(str::to_owned).collect();
        Ok(policy)
    }

    fn next(before: &InForce, texts: &[&str], second: u64) -> InForce {
        policies(
            &before.set,
            &objects(texts),
            Moment(second * 1_000_000),
            read,
        )
    }

    /// `"name@generation model"` of what is in force.
    fn standing(in_force: &InForce) -> Vec<String> {
        let shown = |policy: &Arc<PolicyHandle>| {
            format!("{}@{} {}", policy.name, policy.generation, policy.model)
        };
        in_force.set.policies.iter().map(shown).collect()
    }

    fn refusals(in_force: &InForce) -> Vec<(&str, u64, &str)> {
        in_force
            .refused
            .iter()
            .map(|refusal| {
                (
                    refusal.name.as_deref().unwrap(),
                    refusal.generation.unwrap(),
                    refusal.reason.as_str(),
                )
            })
            .collect()
    }

    #[test]
    fn each_policy_is_in_force_by_the_generation_of_its_object() {
        let first = next(&InForce::default(), &["a@1 m", "b@7 n"], 1);
        assert_eq!(standing(&first), ["a@1 m", "b@7 n"]);
        let second = next(&first, &["a@2 m,gpt", "b@7 n"], 2);
        assert_eq!(second.set.of_model("gpt").unwrap().generation, 2);
        let since = |in_force: &InForce, name| in_force.set.named(name).unwrap().since;
        assert_eq!(since(&second, "a"), Moment(2_000_000));
        assert_eq!(since(&second, "b"), Moment(1_000_000), "it did not change");
        let old = first.set.of_model("m").unwrap();
        assert!(
            old.aliases.is_empty(),
            "a request under way keeps its policy"
        );
        assert_eq!(
            standing(&next(&second, &["b@7 n"], 3)),
            ["b@7 n"],
            "a deleted one goes"
        );
        assert!(standing(&next(&second, &[], 3)).is_empty());
    }

    #[test]
    fn a_bad_policy_keeps_its_own_last_good_version_and_touches_no_other() {
        let first = next(&InForce::default(), &["a@1 m", "b@1 n"], 1);
        let second = next(&first, &["a@2 bad", "b@2 n,more"], 2);
        assert_eq!(standing(&second), ["a@1 m", "b@2 n"]);
        assert_eq!(refusals(&second), [("a", 2, "spec.model: bad")]);
        let third = next(&second, &["a@3 bad", "b@2 n,more"], 3);
        assert_eq!(standing(&third), ["a@1 m", "b@2 n"]);
        assert_eq!(refusals(&third), [("a", 3, "spec.model: bad")]);
        let fourth = next(&third, &["a@4 m", "b@2 n,more"], 4);
        assert_eq!(standing(&fourth), ["a@4 m", "b@2 n"]);
        assert!(fourth.refused.is_empty());
        // One that was never good has nothing to keep.
        let never = next(&InForce::default(), &["a@1 bad", "b@1 n"], 1);
        assert_eq!(standing(&never), ["b@1 n"]);
        // Who asks for its model is told so.
        let named = |model| {
            never
                .refused_for(model)
                .and_then(|refusal| refusal.name.as_deref())
        };
        assert_eq!((named("bad"), named("n")), (Some("a"), None));
    }

    #[test]
    fn the_older_policy_has_a_model_and_the_younger_is_told_who() {
        let both = next(&InForce::default(), &["z@1 m", "a@1 n,m"], 1);
        assert_eq!(standing(&both), ["z@1 m"]);
        let [(name, generation, reason)] = refusals(&both)[..] else {
            panic!("{both:?}");
        };
        assert_eq!((name, generation), ("a", 1));
        assert!(
            reason.starts_with("model \"m\" is served by RoutePolicy z already"),
            "{reason}"
        );
        assert!(
            both.set.of_model("n").is_none(),
            "nothing of it is in force"
        );
        // The younger is edited onto a model that is taken: what it served before goes on.
        let apart = next(&InForce::default(), &["z@1 m", "a@1 n"], 1);
        let taken = next(&apart, &["z@1 m", "a@2 m"], 2);
        assert_eq!(standing(&taken), ["z@1 m", "a@1 n"]);
        assert_eq!(taken.refused.len(), 1);
        // The older goes, and the younger has it.
        let alone = next(&taken, &["a@2 m"], 3);
        assert_eq!(standing(&alone), ["a@2 m"]);
        // The older takes the younger's model: nothing of the younger can stay.
        let robbed = next(&apart, &["z@2 m,n", "a@1 n"], 2);
        assert_eq!(standing(&robbed), ["z@2 m"]);
        assert_eq!(robbed.refused.len(), 1);
    }

    #[test]
    fn policies_made_in_one_second_are_ordered_by_name_on_every_router() {
        let mut same = objects(&["b@1 m", "a@1 m"]);
        let created = same[0].metadata.creation_timestamp.clone();
        for object in &mut same {
            Arc::make_mut(object).metadata.creation_timestamp = created.clone();
        }
        for _ in 0..2 {
            same.reverse();
            let chosen = policies(&PolicySet::default(), &same, Moment(0), read);
            assert_eq!(standing(&chosen), ["a@1 m"]);
        }
    }
}
