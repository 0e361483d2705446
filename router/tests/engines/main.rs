//! The router in front of engines over HTTP, from a client's bytes to the engines' and back; the engines are played byte by byte.

// Whatever fails here fails the test, and helpers are part of it.
#![allow(clippy::unwrap_used)]

#[allow(dead_code)]
#[path = "../faults/double.rs"]
mod double;
mod early;
mod engine;
mod front;
mod keeping;
#[allow(dead_code)]
#[path = "../faults/obedient.rs"]
mod obedient;
mod opening;
mod pull;
mod room;
#[allow(dead_code)]
#[path = "../faults/router.rs"]
mod router;
#[path = "../faults/steady.rs"]
mod steady;
#[allow(dead_code)]
mod table;
mod tied;
mod whole;

use baton_placement::policy::{Overrides, Policy};
use baton_protocol::card::Split;
use baton_protocol::samples;
use engine::Engine;
use front::Served;

fn policy() -> Policy {
    Policy {
        overrides: Overrides::Allowed,
        ..Policy::new("chat", "m", &["p"], &["d"])
    }
}

const NIXL: Split = Split::NixlPull {
    lease_milliseconds: 30_000,
};

/// A router with one engine that generates.
async fn one() -> (Served, Engine) {
    let d = Engine::start(samples::card("d"), NIXL).await;
    let served = Served::start(&policy(), &[&d]).await;
    (served, d)
}

/// A router with one engine that computes prompts and one that generates.
async fn pair(policy: &Policy, split: Split) -> (Served, Engine, Engine) {
    let p = Engine::start(samples::prefill_card("p"), split.clone()).await;
    let d = Engine::start(samples::card("d"), split).await;
    let served = Served::start(policy, &[&p, &d]).await;
    (served, p, d)
}
