//! Placement seen from outside: fleets are built as a router builds them, decisions are read as a router reads them.

#![allow(
    clippy::unwrap_used,
    reason = "a test that cannot build its fleet has failed"
)]

mod assurance;
mod calibration;
mod exhaustive;
mod fleets;
mod modes;
mod quickstart;
mod reference;
mod replay;
mod room;
