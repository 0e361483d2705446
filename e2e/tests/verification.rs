//! KV that cannot be proven right is never used: the answer is that of a worker that computed everything itself, and the record
//! says what was wrong.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use baton_e2e::fleet::Fleet;
use baton_e2e::interposer::{Artifact, Changes, Interposer};
use baton_e2e::lone_router::{LoneRouter, control};
use baton_e2e::manifest::Manifest;
use baton_e2e::openai::{Ask, Completion, Output};
use baton_e2e::record::Record;
use baton_e2e::scenario;
use baton_protocol::card::Card;
use baton_protocol::identity::{Fact, Rope};
use baton_protocol::wire::Descriptor;
use serde_json::Value;

const LEASE: Duration = Duration::from_secs(10);

/// Eleven full blocks and one that is partly filled.
fn prompt() -> Vec<u32> {
    (0..180).map(|index| 3 + (index * 11) % 200).collect()
}

async fn ask(fleet: &Fleet, mode: &'static str, salt: &str) -> Result<Completion> {
    Ask::ids("tiny", &prompt(), 12)
        .with("ignore_eos", true)
        .with("cache_salt", salt)
        .mode(mode)
        .send(&fleet.api)
        .await
}

async fn aggregated(fleet: &Fleet) -> Result<Output> {
    Ok(ask(fleet, "Aggregated", "reference").await?.output)
}

#[test]
fn a_flipped_byte_in_a_transferred_block_is_found_and_recomputed() {
    for block in ["flip-byte:1", "flip-byte:7", "flip-byte:12"] {
        a_fault_is_found(block, "checksum-mismatch");
    }
}

#[test]
fn a_block_reused_under_its_reader_is_found_and_recomputed() {
    for block in ["reuse:1", "reuse:9"] {
        a_fault_is_found(block, "generation-mismatch");
    }
}

/// The prefill worker lies about one block that it sends, once.
fn a_fault_is_found(fault: &str, cause: &str) {
    scenario(async {
        let fleet = Fleet::of_with(&Manifest::tiny(), &[("BATON_FAULT", fault)]).await?;
        let expected = aggregated(&fleet).await?;
        let answer = ask(&fleet, "Disaggregated", "first").await?;
        let about = format!("{fault}: {:?}, expected {expected:?}", answer.output);
        ensure!(answer.output == expected, "another answer: {about}");
        let record = Record::of(&fleet.admin, &answer.run).await?;
        record.check_order()?;
        ensure!(
            record.kind()? == "Remote",
            "{fault}: not remote: {}",
            record.0
        );
        ensure!(
            record.0["fallback"]["cause"] == cause,
            "{fault}: fallback {} instead of {cause}",
            record.0["fallback"]
        );
        let metrics = fleet.metrics().await?;
        ensure!(
            metrics.count("baton_fallbacks_total", &[("cause", cause)]) == 1.0,
            "{fault}: no fallback counted for {cause}: {:?}",
            metrics.values("baton_fallbacks_total", "cause")
        );

        // It was one block: the next hand-off is used.
        let answer = ask(&fleet, "Disaggregated", "second").await?;
        ensure!(
            answer.output == expected,
            "another answer: {:?}",
            answer.output
        );
        let record = Record::of(&fleet.admin, &answer.run).await?;
        ensure!(
            record.0["fallback"].is_null() && record.bytes() > 0,
            "{fault}: the second hand-off: {}",
            record.0
        );
        // And nothing of the bad block stayed in the cache of the decode worker.
        let answer = ask(&fleet, "Aggregated", "first").await?;
        ensure!(
            answer.output == expected,
            "the cache holds what was not proven: {:?}",
            answer.output
        );
        fleet.idle(LEASE).await?;
        fleet.end().await
    });
}

#[test]
fn pools_whose_kv_means_something_else_are_never_paired() {
    let other_weights = Manifest {
        prefill_source: Some("uri: \"builtin://tiny?seed=8\"".to_owned()),
        ..Manifest::tiny()
    };
    let other_blocks = Manifest {
        prefill_engine: Some("{type: Builtin, blockSize: 32}".to_owned()),
        ..Manifest::tiny()
    };
    for (manifest, field) in [
        (other_weights, "identity.weights"),
        (other_blocks, "identity.blockSize"),
    ] {
        scenario(async move {
            let fleet = Fleet::of(&manifest).await?;
            let view = fleet.view().await?;
            let pairs = view["pairs"].as_array().context("no pairs")?;
            ensure!(!pairs.is_empty(), "no pair is shown: {view}");
            for pair in pairs {
                names_the_difference(pair, field)?;
            }
            nothing_is_handed_over(&fleet).await?;
            fleet.end().await
        });
    }
}

/// The pair is not compatible, and the field is named with both values.
fn names_the_difference(pair: &Value, field: &str) -> Result<()> {
    ensure!(pair["compatible"] == false, "{field}: paired: {pair}");
    let differences = pair["differences"].as_array().context("no differences")?;
    let named = differences
        .iter()
        .find(|difference| difference["field"] == field)
        .with_context(|| format!("{field} is not named in {pair}"))?;
    let values = (&named["prefill"], &named["decode"]);
    ensure!(
        values.0.is_string() && values.1.is_string() && values.0 != values.1,
        "{field}: {named}"
    );
    Ok(())
}

/// A request that asks for a remote plan is answered all the same, by one worker, and the record says why.
async fn nothing_is_handed_over(fleet: &Fleet) -> Result<()> {
    let expected = aggregated(fleet).await?;
    let answer = ask(fleet, "Disaggregated", "never").await?;
    ensure!(
        answer.output == expected,
        "another answer: {:?}",
        answer.output
    );
    let record = Record::of(&fleet.admin, &answer.run).await?;
    record.check_order()?;
    ensure!(
        record.kind()? == "Local" && record.bytes() == 0,
        "{}",
        record.0
    );
    ensure!(
        record.0["filtered"]["Incompatible"].as_u64() > Some(0),
        "the pair is not among those filtered: {}",
        record.0["filtered"]
    );
    ensure!(
        record.text("reason") == "NoPrefillWorker",
        "reason {}: {}",
        record.text("reason"),
        record.text("explanation")
    );
    Ok(())
}

/// Name, what has to be named, and how to bring it about.
type Case<T> = (&'static str, &'static str, fn(&mut T));

/// What a card may differ in, and the field that has to be named.
const CARDS: [Case<Card>; 6] = [
    ("dtype", "identity.kvDtype", |card| {
        card.identity.kv_dtype = Fact::observed("f32".to_owned());
    }),
    ("block-size", "identity.blockSize", |card| {
        card.identity.block_size = Fact::observed(32);
        card.capacity.block_size = 32;
    }),
    ("rope", "identity.rope", |card| {
        if let Some(rope) = card.identity.rope.known().cloned() {
            let base = format!("{}0", rope.base);
            card.identity.rope = Fact::observed(Rope { base, ..rope });
        }
    }),
    ("weights", "identity.weights", |card| {
        card.identity.weights = Fact::observed("blake3:0".to_owned());
    }),
    ("unknown", "identity.weights", |card| {
        card.identity.weights = Fact::unknown();
    }),
    ("layout", "layout.order", |card| {
        card.layout.order = Fact::observed("kv,layer,token,head,dim".to_owned());
    }),
];

/// Texts that the card names by their digests.
const ARTIFACTS: [(&str, &str, Artifact); 2] = [
    ("tokenizer", "routeFilter.tokenizer", Artifact::Tokenizer),
    (
        "template",
        "routeFilter.chatTemplate",
        Artifact::ChatTemplate,
    ),
];

#[test]
fn a_worker_whose_card_differs_is_never_asked_and_the_field_is_named() {
    scenario(async {
        let fleet = Fleet::of(&Manifest::tiny()).await?;
        let (_, upstream) = control(&fleet, "prefill")?;
        let mut stand_ins = Vec::new();
        for (name, _, change) in CARDS {
            stand_ins.push(Interposer::before(&upstream, name, Changes::of_card(change)).await?);
        }
        for (name, _, artifact) in ARTIFACTS {
            let changes = Changes::of_artifact(artifact);
            stand_ins.push(Interposer::before(&upstream, name, changes).await?);
        }
        let mut all: Vec<&Interposer> = stand_ins.iter().collect();
        let router = LoneRouter::over(&fleet, &all).await?;
        let view = router.view().await?;
        let cards = CARDS.map(|(name, field, _)| (name, field));
        let artifacts = ARTIFACTS.map(|(name, field, _)| (name, field));
        for (name, field) in cards.into_iter().chain(artifacts) {
            let pairs = view["pairs"].as_array().context("no pairs")?;
            let pair = pairs
                .iter()
                .find(|pair| pair["prefill"] == name)
                .with_context(|| format!("no pair of {name} in {view}"))?;
            names_the_difference(pair, field)?;
        }
        let expected = through(&router, "Aggregated", "reference").await?;
        let answer = through(&router, "Disaggregated", "never").await?;
        ensure!(
            answer.output == expected.output,
            "{answer:?} is not {expected:?}"
        );
        let record = Record::of(&router.admin, &answer.run).await?;
        ensure!(
            record.kind()? == "Local" && record.bytes() == 0,
            "{}",
            record.0
        );

        // One that does not differ is used at once: it was the cards that kept the others out.
        let same = Interposer::before(&upstream, "same", Changes::none()).await?;
        all.push(&same);
        router.take(&fleet, &all).await?;
        let answer = through(&router, "Disaggregated", "used").await?;
        ensure!(
            answer.output == expected.output,
            "{answer:?} is not {expected:?}"
        );
        let record = Record::of(&router.admin, &answer.run).await?;
        ensure!(
            record.chosen()?["prefill"] == "same" && record.bytes() > 0,
            "{}\n{}",
            record.0,
            router.log()
        );
        ensure!(
            same.dispatched() > 0,
            "the record says so, but it was not asked"
        );
        for stand_in in &stand_ins {
            ensure!(
                stand_in.dispatched() == 0,
                "{} was asked {} times",
                stand_in.name,
                stand_in.dispatched()
            );
        }
        fleet.end().await
    });
}

/// What a descriptor may be wrong in, and the cause that the record has to name.
const DESCRIPTORS: [Case<Descriptor>; 8] = [
    ("identity", "identity-mismatch", |descriptor| {
        descriptor.kv_identity = "0".repeat(64);
    }),
    ("layout", "layout-mismatch", |descriptor| {
        descriptor.layout_digest = "0".repeat(64);
    }),
    ("generation", "lease-gone", |descriptor| {
        descriptor.generation += 1;
    }),
    ("lease", "lease-gone", |descriptor| {
        descriptor.lease = vec![7; 16].into();
    }),
    ("tokens", "fill-mismatch", |descriptor| {
        descriptor.tokens += 16;
    }),
    ("transports", "no-transport", |descriptor| {
        descriptor.transports.clear();
    }),
    ("address", "source-lost", |descriptor| {
        for transport in &mut descriptor.transports {
            // Nobody listens on the discard port of a test machine.
            transport.address = "127.0.0.1:9".to_owned();
        }
    }),
    ("owner", "source-lost", |descriptor| {
        descriptor.control_address = "127.0.0.1:9".to_owned();
    }),
];

#[test]
fn a_wrong_descriptor_is_refused_by_its_reader_and_the_cause_is_named() {
    scenario(async {
        let fleet = Fleet::of(&Manifest::tiny()).await?;
        let (_, upstream) = control(&fleet, "prefill")?;
        for (name, cause, change) in DESCRIPTORS {
            let changes = Changes::of_descriptor(change);
            let stand_in = Interposer::before(&upstream, name, changes).await?;
            let router = LoneRouter::over(&fleet, &[&stand_in]).await?;
            let expected = through(&router, "Aggregated", "reference").await?;
            let answer = through(&router, "Disaggregated", name).await?;
            ensure!(
                answer.output == expected.output,
                "{name}: {answer:?} is not {expected:?}"
            );
            let record = Record::of(&router.admin, &answer.run).await?;
            record.check_order()?;
            ensure!(record.kind()? == "Remote", "{name}: {}", record.0);
            ensure!(
                record.0["fallback"]["cause"] == cause,
                "{name}: fallback {} instead of {cause}\n{}",
                record.0["fallback"],
                router.log()
            );
        }
        fleet.idle(LEASE).await?;
        fleet.end().await
    });
}

async fn through(router: &LoneRouter, mode: &'static str, salt: &str) -> Result<Completion> {
    Ask::ids("tiny", &prompt(), 12)
        .with("ignore_eos", true)
        .with("cache_salt", salt)
        .mode(mode)
        .send(&router.api)
        .await
}
