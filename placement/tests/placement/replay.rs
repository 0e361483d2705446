//! Records hold all that decided: written to JSON lines, read again and replayed, decisions come out the same, bit for bit.

use baton_placement::coefficients::CoefficientSet;
use baton_placement::place::{Reason, Request, place};
use baton_placement::policy::{Enforcement, Mode, Overrides, Policy, Preset};
use baton_placement::record::{DecisionRecord, PolicyName, RecordHead};
use baton_placement::replay::{ReplayError, differences, replay, what_if};
use baton_placement::rng::Rng;
use baton_protocol::ids::WorkerId;

use crate::fleets::{
    build, entry, random_mode, random_policy, random_request, random_world, simple,
};
use crate::reference::NOW;

struct Written {
    line: String,
    coefficients: String,
    policy: String,
    chosen: Option<usize>,
}

fn head(policy: &Policy, run: usize) -> RecordHead {
    RecordHead {
        run: format!("r0-{run:032x}").into(),
        request_id: format!("request-{run}"),
        time: "2026-11-29T18:00:00.000000Z".into(),
        policy: PolicyName {
            name: policy.name.clone(),
            generation: policy.generation,
            digest: policy.digest(),
        },
        model: policy.model.clone(),
        prefix_fingerprint: "0".repeat(32),
        credit: None,
        unsplittable: None,
    }
}

fn write(seed: u64, count: usize) -> Vec<Written> {
    let mut rng = Rng::new(seed);
    let mut written = vec![];
    for run in 0..count {
        let most = [4, 14, 70][rng.below(3)];
        let mut world = random_world(&mut rng, most);
        let routers = [1, 1, 6][rng.below(3)];
        world.fleet = build(
            &world.set,
            &world.entries,
            &world.compatible,
            &world.level_links,
            &world.breakers,
            &world.promises,
            routers,
        );
        let request = random_request(&mut rng, &world);
        let mut policy = random_policy(&mut rng);
        policy.mode = random_mode(&mut rng);
        if rng.below(4) == 0 {
            policy.cost.temperature_percent = 5.0 + 20.0 * rng.unit();
        }
        let decision = place(&world.fleet, &request, &policy, NOW, &mut rng);
        let record = DecisionRecord::new(head(&policy, run), &decision, &world.fleet);
        written.push(Written {
            line: serde_json::to_string(&record).unwrap(),
            coefficients: serde_json::to_string(&world.set).unwrap(),
            policy: serde_json::to_string(&policy).unwrap(),
            chosen: decision.chosen,
        });
    }
    written
}

fn read(written: &Written) -> (DecisionRecord, CoefficientSet, Policy) {
    (
        serde_json::from_str(&written.line).unwrap(),
        serde_json::from_str(&written.coefficients).unwrap(),
        serde_json::from_str(&written.policy).unwrap(),
    )
}

#[test]
fn five_hundred_decisions_replay_the_same_bit_for_bit() {
    let mut reasons = std::collections::BTreeMap::<String, u32>::new();
    let mut cut = 0;
    for one in write(42, 500) {
        assert!(!one.line.contains('\n'));
        let (record, set, policy) = read(&one);
        let decision = replay(&record, &set, &policy).unwrap();
        assert_eq!(differences(&record, &decision), [], "{}", one.line);
        assert_eq!(decision.chosen, one.chosen);
        *reasons.entry(record.reason.word()).or_default() += 1;
        cut += u32::from(one.line.contains("ProvedWorse") || one.line.contains("NotRecorded"));
        // And the record itself survives reading and writing.
        assert_eq!(serde_json::to_string(&record).unwrap(), one.line);
    }
    // The draw has met what it is meant to: large fleets, chance, refusals, both plans.
    assert!(cut > 40, "{cut}");
    for reason in [
        "LocalCheaper",
        "RemoteCheaper",
        "SharedByChance",
        "NoPrefillWorker",
        "ModeDisaggregated",
    ] {
        assert!(
            reasons.contains_key(reason),
            "{reason} is missing: {reasons:?}"
        );
    }
}

#[test]
fn a_tampered_record_is_reported_field_by_field() {
    let (record, set, policy) = read(
        &write(1, 40)
            .into_iter()
            .find(|one| one.chosen.is_some())
            .unwrap(),
    );
    let chosen = record.chosen.unwrap();

    let mut other_input = record.clone();
    other_input.candidates[chosen].inputs.compute.queued_tokens += 50_000;
    let found = differences(&other_input, &replay(&other_input, &set, &policy).unwrap());
    assert!(
        found
            .iter()
            .any(|one| one.field == format!("candidates[{chosen}].terms.queue")),
        "{found:?}"
    );

    let mut other_cost = record.clone();
    let cost = &mut other_cost.candidates[chosen].cost;
    *cost = f64::from_bits(cost.to_bits() + 1);
    let found = differences(&other_cost, &replay(&other_cost, &set, &policy).unwrap());
    assert_eq!(found.len(), 1);
    assert_eq!(found[0].field, format!("candidates[{chosen}].cost"));

    let mut other_choice = record;
    other_choice.reason = Reason::QueueFull;
    let found = differences(
        &other_choice,
        &replay(&other_choice, &set, &policy).unwrap(),
    );
    assert_eq!(found[0].field, "reason");
}

#[test]
fn wrong_coefficients_or_policy_are_refused_by_digest() {
    let (record, mut set, mut policy) = read(&write(2, 1)[0]);
    policy.generation += 1;
    let error = replay(&record, &set, &policy).unwrap_err();
    assert!(matches!(error, ReplayError::Policy { .. }), "{error}");
    policy.generation -= 1;
    set.workers[0].coefficients.a += 1.0;
    let error = replay(&record, &set, &policy).unwrap_err();
    assert!(error.to_string().contains("coefficients/"), "{error}");
}

#[test]
fn what_if_tells_where_another_policy_would_have_gone_and_at_what_cost() {
    let busy = |id: &str, slot| {
        let mut worker = entry(id, "decode", slot);
        worker.load.running_sequences = 1;
        worker.load.context_tokens = 300;
        worker
    };
    let fleet = simple(vec![
        entry("p0", "prefill", 0),
        busy("d0", 1),
        busy("d1", 2),
    ]);
    let mut policy = Policy::new("chat", "m", &["prefill"], &["decode"]);
    policy.pooling = baton_placement::policy::Pooling::Strict;
    policy.objective.ttft_milliseconds = Some(2_000.0);
    let request = Request {
        tokens: 600,
        max_output_tokens: 64,
        expected_output_tokens: 64.0,
        ..Request::default()
    };
    let decision = place(&fleet, &request, &policy, 0.0, &mut Rng::new(1));
    let record = DecisionRecord::new(head(&policy, 0), &decision, &fleet);
    let set = crate::fleets::cpu_set();
    assert_eq!(what_if(&record, &set, &policy).unwrap(), None);

    let mut local = policy.clone();
    local.mode = Mode::Aggregated;
    let changed = what_if(&record, &set, &local).unwrap().unwrap();
    assert_eq!(
        (changed.before.plan.as_str(), changed.after.plan.as_str()),
        ("p0 → d0", "d0")
    );
    assert!(changed.after.cost.unwrap() > changed.before.cost.unwrap());

    let mut latency = policy;
    latency.cost.preset = Preset::Latency;
    let compared = what_if(&record, &set, &latency).unwrap();
    assert!(compared.is_none_or(|one| one.after.cost < one.before.cost));
}

#[test]
fn a_record_has_the_names_of_the_contract_and_no_tokens() {
    let (record, ..) = read(
        &write(3, 60)
            .into_iter()
            .find(|one| one.line.contains("\"Remote\""))
            .unwrap(),
    );
    let value = serde_json::to_value(&record).unwrap();
    assert_eq!(value["schema"], "baton.decision.v1");
    for field in [
        "run",
        "requestId",
        "time",
        "now",
        "randomSeed",
        "coefficients",
        "fleetVersion",
        "indexAgeMilliseconds",
        "model",
        "kvIdentity",
        "mode",
        "filtered",
        "chosen",
        "runnerUp",
        "reason",
        "explanation",
        "states",
    ] {
        assert!(value.get(field).is_some(), "{field}");
    }
    for field in ["name", "generation", "digest"] {
        assert!(value["policy"].get(field).is_some(), "policy.{field}");
    }
    for field in ["tokens", "prefixFingerprint", "maxOutputTokens"] {
        assert!(value["input"].get(field).is_some(), "input.{field}");
    }
    let remote = value["candidates"]
        .as_array()
        .unwrap()
        .iter()
        .find(|one| one["kind"] == "Remote")
        .unwrap();
    for field in ["prefill", "decode", "mean", "upper"] {
        assert!(!remote[field].is_null(), "{field}");
    }
    for field in ["prefill", "decode"] {
        assert!(
            remote["cachedTokens"].get(field).is_some(),
            "cachedTokens.{field}"
        );
    }
    for field in [
        "queuedTokens",
        "runningSequences",
        "contextTokens",
        "missingBytes",
        "level",
        "link",
        "reportAge",
    ] {
        assert!(!remote["inputs"][field].is_null(), "inputs.{field}");
    }
    for field in [
        "queue",
        "prefill",
        "transfer",
        "synchronization",
        "admission",
        "machine",
        "interference",
        "decode",
        "residents",
        "objective",
        "penalty",
    ] {
        assert!(remote["terms"][field].is_number(), "terms.{field}");
    }
}

#[test]
fn fields_of_a_later_release_are_kept() {
    let one = &write(4, 1)[0];
    let longer = one.line.replacen('{', "{\"colour\":\"blue\",", 1);
    let record: DecisionRecord = serde_json::from_str(&longer).unwrap();
    assert_eq!(record.more["colour"], "blue");
    assert!(
        serde_json::to_string(&record)
            .unwrap()
            .contains("\"colour\":\"blue\"")
    );
}

#[test]
fn what_another_policy_does_not_allow_is_not_what_it_would_have_done() {
    let workers = vec![entry("p0", "prefill", 0), entry("d0", "decode", 1)];
    let fleet = simple(workers);
    let mut policy = Policy::new("chat", "m", &["prefill"], &["decode"]);
    policy.mode = Mode::Disaggregated;
    policy.overrides = Overrides::Allowed;
    let request = Request {
        tokens: 900,
        max_output_tokens: 64,
        expected_output_tokens: 64.0,
        mode: Some(Mode::Disaggregated),
        ..Request::default()
    };
    let decision = place(&fleet, &request, &policy, NOW, &mut Rng::new(0));
    let record = DecisionRecord::new(head(&policy, 0), &decision, &fleet);
    assert_eq!(record.pools[&WorkerId::from("p0")], "prefill");
    let set = &fleet.coefficients;
    let elsewhere = |change: &dyn Fn(&mut Policy)| {
        let mut other = policy.clone();
        change(&mut other);
        what_if(&record, set, &other)
            .unwrap()
            .map(|what| what.after.plan)
    };
    assert_eq!(elsewhere(&|_| ()), None, "the same policy does the same");
    // The header that came with the request counts only where the other policy lets it.
    assert_eq!(elsewhere(&|other| other.mode = Mode::Aggregated), None);
    let local = elsewhere(&|other| {
        other.mode = Mode::Aggregated;
        other.overrides = Overrides::Ignored;
    });
    assert_eq!(local.as_deref(), Some("p0"));
    let own = elsewhere(&|other| other.prefill_pools = vec!["another".into()]);
    assert_eq!(own.as_deref(), Some("d0"));
    let near = elsewhere(&|other| {
        other.topology.farthest_level = Some("nowhere".into());
        other.topology.enforcement = Enforcement::Required;
    });
    assert_eq!(near.as_deref(), Some("p0"));
}
