//! What is asked for, and the part of it that costs depend on.

use baton_protocol::ids::WorkerId;
use serde::{Deserialize, Serialize};

use crate::index::PrefixHits;
use crate::policy::Mode;

/// One request to place.
#[derive(Clone, Debug, Default)]
pub struct Request {
    /// Of the prompt; with a run that goes on after a failure, the tokens already sent included.
    pub tokens: u32,
    /// Still to come at most.
    pub max_output_tokens: u32,
    /// Running mean of the output length for this model and route; the maximum bounds it.
    pub expected_output_tokens: f64,
    /// What each worker holds of the prompt.
    pub hits: PrefixHits,
    /// Name of the adapter that is needed.
    pub adapter: Option<String>,
    /// From `x-baton-mode`; counts where the policy allows it.
    pub mode: Option<Mode>,
    /// It has to stay on one worker: several choices of one prompt, or a remote plan that was given up.
    pub whole: bool,
    /// Workers that failed this run before.
    pub exclude: Vec<WorkerId>,
    /// Runs that this router now runs locally for lack of a prefill worker.
    pub local_without_prefill: u32,
    /// How long this request has waited for a prefill worker.
    pub waited_milliseconds: f64,
}

/// What of a request, and of the fleet as a whole, the costs and the choice depend on. Recorded.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Facts {
    pub tokens: u32,
    pub max_output_tokens: u32,
    /// Bounded by the maximum, at least 1.
    pub expected_output_tokens: f64,
    pub local_without_prefill: u32,
    pub waited_milliseconds: f64,
    /// Decode workers that could take a whole request.
    pub local_workers: u32,
    /// Whether the policy names prefill pools.
    pub prefill_pools: bool,
    /// It has to stay on one worker.
    #[serde(default)]
    pub whole: bool,
    /// Of the policy's workers, whatever their state, none could ever hold the prompt's KV.
    #[serde(default)]
    pub too_large: bool,
}

impl Facts {
    /// A request for one token moves nothing, where a worker is there that does both halves.
    pub(crate) fn one_token(&self) -> bool {
        self.max_output_tokens <= 1
    }
}
