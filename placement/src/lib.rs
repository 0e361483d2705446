//! The pure heart of Baton: where a request's prefill and decode run, what that costs, and why.
//!
//! Everything here is a function of its arguments. Nothing does I/O, reads a clock, starts a task or knows Kubernetes; chance
//! comes from an [`rng::Rng`] whose seed is recorded. That is what makes replay honest: the router, the simulator and
//! `baton replay` run this very code. Times are milliseconds on one monotonic clock of the caller, as `f64`.
//!
//! # The way of a decision
//!
//! A router keeps a [`fleet::Fleet`]: an immutable snapshot of workers (parallel arrays), of what they do and of what lies between
//! them, made anew at each change and swapped as a whole: by [`fleet::FleetBuilder`] where workers or constants are others, else by
//! [`fleet::Renewal`]. For a request it asks the [`index::PrefixIndex`] what each worker holds of the prompt, and calls
//! [`place::place`]. The [`place::Decision`] says what to do ([`place::Outcome`]),
//! which candidates there were, what each would cost term by term, and why this one, in one word and in one sentence.
//! [`record::DecisionRecord`] is the same for people and files; [`replay`] makes the decision again from it.
//!
//! What a decision reads is learnt elsewhere in this crate: constants of steps and links in [`calibration`], upper bounds and
//! output lengths in [`estimate`], the health of links in [`breaker`]. [`budget`] limits what a failed hand-off may cost.
//!
//! # Where to find what
//!
//! | question | file |
//! |---|---|
//! | how long does a step, a prompt, a transfer take; how large is a chunk | `cost.rs` |
//! | which constants are these, and what is the set that a record names by digest | `coefficients.rs` |
//! | how are they learnt, and where do they start | `calibration.rs`, `calibration/` |
//! | what can a policy say, what is refused, which weights does a preset mean | `policy.rs`, `policy/` |
//! | what is known of workers, domains, links | `fleet.rs`, `fleet/` |
//! | who holds which prefix | `index.rs`, `index/` |
//! | who may take the request at all | `place/gather.rs` |
//! | the formula, term by term | `place/evaluate.rs` |
//! | how pairs are searched without trying all | `place/search.rs` |
//! | modes, margin, chance, nobody there | `place/choose.rs` |
//! | the sentence for the person on call | `place/explain.rs` |
//! | the schema `baton.decision.v1` | `record.rs`, `record/` |
//! | replay and what-if | `replay.rs` |
//! | were the estimates right | `estimate.rs` |
//! | is KV that is kept for a fixed time fetched within it | `lease.rs` |
//!
//! # What holds
//!
//! - The cheapest pair found is the cheapest pair there is: a test compares with trying all, by a second writing of the formula.
//! - Replay of a record with its coefficient set and policy gives the same decision, bit for bit, on the same build: the choice
//!   is made from recorded inputs only (`choose` sees candidates, facts, policy and counts, never the fleet). With more than 64
//!   candidates the 32 that are recorded are cut *before* the choice, and no rule's favourite is cut.
//! - A tie goes to the first in fleet order: local plans by worker, then pairs by prefill and decode worker.
//! - Nothing that a peer sends can make a decision that is no number: loads are clipped, unsound coefficients are refused when a
//!   snapshot is built.
//! - Fitted coefficients are never negative, and what samples do not determine stays where the prior had it.
//! - Upper bounds are used in the check of objectives and reported; the comparison of costs is by means.
//!
//! # What is absent
//!
//! No dwell time (the margin alone keeps placement from flapping), no look-ahead preset and no approximate prefix cache (both
//! refused by name when a policy is read), no tokens and no text anywhere.

pub mod breaker;
pub mod budget;
pub mod calibration;
pub mod coefficients;
pub mod cost;
mod digest;
pub mod estimate;
pub mod fleet;
pub mod index;
pub mod lease;
pub mod place;
pub mod policy;
pub mod record;
pub mod replay;
pub mod rng;
