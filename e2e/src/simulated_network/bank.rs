//! What is asked in simulations, and the answers of one worker left in peace, to compare with.

use baton_placement::rng::Rng;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::client::{Answer, Ended};
use super::plan::{EngineKind, Plan};
use super::scene;

/// Different requests there are.
pub const REQUESTS: usize = 24;

/// Requests and their right answers, for one kind of engine.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Bank {
    pub engine: EngineKind,
    pub bodies: Vec<Value>,
    pub answers: Vec<Answer>,
}

impl Bank {
    /// Asks one worker, one request after the other, without any fault.
    ///
    /// # Errors
    /// It does not answer all of them.
    pub fn of(engine: EngineKind) -> anyhow::Result<Self> {
        let bodies: Vec<Value> = (0..REQUESTS).map(|index| body(engine, index)).collect();
        let report = scene::play(&Plan::quiet(engine, bodies.len()), &bodies, None)?;
        let answers = report
            .outcomes
            .into_iter()
            .map(|outcome| match outcome.ended {
                Ended::Complete(answer) => Ok(answer),
                other => Err(anyhow::anyhow!("the reference failed: {other:?}")),
            });
        Ok(Self {
            engine,
            answers: answers.collect::<anyhow::Result<_>>()?,
            bodies,
        })
    }
}

/// The request of an index: prompts of three families, so that some share their beginnings.
fn body(engine: EngineKind, index: usize) -> Value {
    let mut rng = Rng::new(0xba70_0000 + index as u64);
    let family = index % 3;
    let longest = match engine {
        EngineKind::Simulated => 700,
        EngineKind::Tiny => 260,
    };
    let shared = longest / 4 * family;
    let own = 2 + rng.below(longest - shared);
    let mut family_rng = Rng::new(0xfa31_1700 + family as u64);
    let letters = |rng: &mut Rng, count: usize| -> String {
        (0..count)
            .map(|_| char::from(b'a' + u8::try_from(rng.below(26)).unwrap_or(0)))
            .collect()
    };
    let prompt = letters(&mut family_rng, shared) + &letters(&mut rng, own);
    let hot = rng.below(2) == 1;
    json!({
        "model": "m",
        "prompt": prompt,
        "max_tokens": 1 + rng.below(60),
        "min_tokens": 1,
        "ignore_eos": rng.below(2) == 1,
        "temperature": if hot { 1.0 } else { 0.0 },
        "seed": index,
        "stream": true,
        "stream_options": {"include_usage": true},
    })
}
