//! Sampling: one token from one row of logits, the same wherever and whenever it is drawn.
//!
//! The random number is a function of (seed, position), not the state of a generator, so a worker that continues a run after a
//! hand-off draws what the first one would have drawn. Ties go to the lowest id. Order of the filters: temperature, top-k,
//! top-p, min-p, as vLLM and llama.cpp document them; a filter never removes the most probable token.

pub mod stopping;

use std::cmp::Ordering;

use baton_protocol::wire;

pub use stopping::{Finish, Stopping};

/// How a token is chosen.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// 0 is greedy.
    pub temperature: f64,
    /// Probability mass kept, most probable tokens first; 1 keeps all.
    pub top_p: f64,
    /// Number of tokens kept; 0 keeps all.
    pub top_k: u32,
    /// Tokens less probable than this share of the most probable one are dropped; 0 keeps all.
    pub min_p: f64,
    pub seed: u64,
    /// Alternatives reported beside each token; `None`: no log-probabilities at all.
    pub top_logprobs: Option<u32>,
}

/// Alternatives that may be asked for beside a token. They are ranked and sent for every token, so that what an operation keeps
/// unread is a few megabytes at most. OpenAI's API has 20, which is the router's affair.
pub const MOST_LOGPROBS: u32 = 256;

impl Sampling {
    pub fn greedy() -> Self {
        Self {
            temperature: 0.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            seed: 0,
            top_logprobs: None,
        }
    }
}

impl From<&wire::Sampling> for Sampling {
    fn from(message: &wire::Sampling) -> Self {
        Self {
            temperature: message.temperature,
            // Absent on the wire reads as 0, which would keep the most probable token only.
            top_p: if message.top_p == 0.0 {
                1.0
            } else {
                message.top_p
            },
            top_k: message.top_k,
            min_p: message.min_p,
            seed: message.seed,
            top_logprobs: message.top_logprobs,
        }
    }
}

/// A chosen token.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampled {
    pub token: u32,
    pub logprobs: Option<Logprobs>,
}

/// Log-probabilities under the model itself, before temperature and filters.
#[derive(Clone, Debug, PartialEq)]
pub struct Logprobs {
    pub chosen: f32,
    /// Most probable first.
    pub top: Vec<(u32, f32)>,
}

impl From<Logprobs> for wire::Logprobs {
    fn from(logprobs: Logprobs) -> Self {
        Self {
            chosen: logprobs.chosen,
            top: logprobs
                .top
                .into_iter()
                .map(|(id, logprob)| wire::TokenLogprob { id, logprob })
                .collect(),
        }
    }
}

/// Chooses the token at `position` of the whole sequence (prompt included, counted from zero).
///
/// Ids in `forbidden` are never chosen, unless that leaves nothing. A logit that is no number counts as minus infinity.
pub fn sample(logits: &[f32], sampling: &Sampling, position: u64, forbidden: &[u32]) -> Sampled {
    let allowed = |token: &u32| !forbidden.contains(token);
    let greedy = best(logits, allowed).unwrap_or_default();
    let token = if sampling.temperature > 0.0 && sampling.temperature.is_finite() {
        draw(logits, sampling, position, allowed).unwrap_or(greedy)
    } else {
        greedy
    };
    Sampled {
        token,
        logprobs: sampling
            .top_logprobs
            .map(|count| logprobs(logits, token, count)),
    }
}

// Highest logit first, lowest id among equals.
fn order(left: &(u32, f64), right: &(u32, f64)) -> Ordering {
    right.1.total_cmp(&left.1).then(left.0.cmp(&right.0))
}

fn best(logits: &[f32], allowed: impl Fn(&u32) -> bool) -> Option<u32> {
    let mut found: Option<(u32, f32)> = None;
    for (token, logit) in (0_u32..).zip(logits.iter().copied()) {
        let better = found.is_none_or(|(_, highest)| logit > highest);
        if better && !logit.is_nan() && allowed(&token) {
            found = Some((token, logit));
        }
    }
    found.map(|(token, _)| token)
}

/// The tokens that the filters keep, most probable first, with weights relative to the first one's.
fn candidates(
    logits: &[f32],
    sampling: &Sampling,
    allowed: impl Fn(&u32) -> bool,
) -> Vec<(u32, f64)> {
    let highest = (0_u32..)
        .zip(logits)
        .filter(|(token, logit)| !logit.is_nan() && allowed(token))
        .map(|(_, logit)| f64::from(*logit))
        .fold(f64::NEG_INFINITY, f64::max);
    if !highest.is_finite() {
        return Vec::new();
    }
    let mut kept: Vec<(u32, f64)> = (0_u32..)
        .zip(logits)
        .filter(|(token, logit)| !logit.is_nan() && allowed(token))
        .map(|(token, logit)| {
            (
                token,
                ((f64::from(*logit) - highest) / sampling.temperature).exp(),
            )
        })
        .filter(|(_, weight)| *weight > 0.0)
        .collect();

    let top_k = sampling.top_k as usize;
    if top_k > 0 && top_k < kept.len() {
        kept.select_nth_unstable_by(top_k - 1, order);
        kept.truncate(top_k);
    }
    // Ids of equal weight and the running sum below need one order on every worker.
    kept.sort_unstable_by(order);

    if sampling.top_p < 1.0 {
        let wanted = sampling.top_p.max(0.0) * kept.iter().map(|(_, weight)| weight).sum::<f64>();
        let mut mass = 0.0;
        let mut count = 0;
        for (_, weight) in &kept {
            mass += weight;
            count += 1;
            if mass >= wanted {
                break;
            }
        }
        kept.truncate(count);
    }
    if sampling.min_p > 0.0 {
        // The first one's weight is 1.
        let least = sampling.min_p.min(1.0);
        kept.retain(|(_, weight)| *weight >= least);
    }
    kept
}

fn draw(
    logits: &[f32],
    sampling: &Sampling,
    position: u64,
    allowed: impl Fn(&u32) -> bool,
) -> Option<u32> {
    let kept = candidates(logits, sampling, allowed);
    let total: f64 = kept.iter().map(|(_, weight)| weight).sum();
    let mut left = uniform(sampling.seed, position) * total;
    for (token, weight) in &kept {
        left -= weight;
        if left < 0.0 {
            return Some(*token);
        }
    }
    // Rounding may leave a hair after the last one.
    kept.last().map(|(token, _)| *token)
}

/// A number in [0, 1) that is a function of its arguments alone.
pub fn uniform(seed: u64, position: u64) -> f64 {
    let mut hasher = blake3::Hasher::new();
    hasher.update(b"baton sampling v1");
    hasher.update(&seed.to_le_bytes());
    hasher.update(&position.to_le_bytes());
    let mut bytes = [0; 8];
    hasher.finalize_xof().fill(&mut bytes);
    // 53 bits are what a double in [0, 1) holds exactly.
    (u64::from_le_bytes(bytes) >> 11) as f64 / (1_u64 << 53) as f64
}

fn logprobs(logits: &[f32], chosen: u32, count: u32) -> Logprobs {
    let valid = || logits.iter().filter(|logit| !logit.is_nan());
    let highest = f64::from(valid().copied().fold(f32::NEG_INFINITY, f32::max));
    let sum: f64 = valid()
        .map(|logit| (f64::from(*logit) - highest).exp())
        .sum();
    let logprob = |logit: f64| (logit - highest - sum.ln()) as f32;

    let mut ranked: Vec<(u32, f64)> = (0_u32..)
        .zip(logits)
        .filter(|(_, logit)| !logit.is_nan())
        .map(|(token, logit)| (token, f64::from(*logit)))
        .collect();
    let count = (count as usize).min(ranked.len());
    if count > 0 {
        ranked.select_nth_unstable_by(count - 1, order);
    }
    ranked.truncate(count);
    ranked.sort_unstable_by(order);
    Logprobs {
        chosen: logits
            .get(chosen as usize)
            .map_or(f32::NEG_INFINITY, |logit| logprob(f64::from(*logit))),
        top: ranked
            .into_iter()
            .map(|(token, logit)| (token, logprob(logit)))
            .collect(),
    }
}

#[cfg(test)]
mod tests;
