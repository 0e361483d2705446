//! Stopping: which token ends a run, and which may not be chosen yet. Stop strings are the router's.

use baton_protocol::wire;

/// When a run ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stopping {
    /// New tokens over the whole run.
    pub max_tokens: u32,
    /// Ids that would end the run are not chosen before this many new tokens.
    pub min_tokens: u32,
    /// The model's own end does not end the run.
    pub ignore_eos: bool,
    pub stop_token_ids: Vec<u32>,
}

impl From<&wire::Stopping> for Stopping {
    fn from(message: &wire::Stopping) -> Self {
        Self {
            max_tokens: message.max_tokens,
            min_tokens: message.min_tokens,
            ignore_eos: message.ignore_eos,
            stop_token_ids: message.stop_token_ids.clone(),
        }
    }
}

/// Why a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// The model's end or a stop token.
    Stop,
    /// As many tokens as were asked for, or as fit the context.
    Length,
}

impl Stopping {
    /// Ids that may not be chosen after `generated` new tokens. `eos` are the model's own ends.
    pub fn forbidden(&self, generated: u32, eos: &[u32]) -> Vec<u32> {
        if generated >= self.min_tokens {
            return Vec::new();
        }
        eos.iter().chain(&self.stop_token_ids).copied().collect()
    }

    /// Whether the run ends with `token`, the last of `generated` new tokens.
    pub fn finish(&self, token: u32, generated: u32, eos: &[u32]) -> Option<Finish> {
        let ends =
            (!self.ignore_eos && eos.contains(&token)) || self.stop_token_ids.contains(&token);
        if ends && generated >= self.min_tokens {
            Some(Finish::Stop)
        } else if generated >= self.max_tokens {
            Some(Finish::Length)
        } else {
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stopping(min_tokens: u32, ignore_eos: bool) -> Stopping {
        Stopping {
            max_tokens: 4,
            min_tokens,
            ignore_eos,
            stop_token_ids: vec![9],
        }
    }

    #[test]
    fn the_end_of_the_model_and_a_stop_token_end_a_run() {
        assert_eq!(stopping(0, false).finish(2, 1, &[2]), Some(Finish::Stop));
        assert_eq!(stopping(0, false).finish(9, 1, &[2]), Some(Finish::Stop));
        assert_eq!(stopping(0, false).finish(5, 1, &[2]), None);
        assert_eq!(stopping(0, false).finish(5, 4, &[2]), Some(Finish::Length));
    }

    #[test]
    fn ignore_eos_runs_on_but_keeps_stop_tokens() {
        assert_eq!(stopping(0, true).finish(2, 1, &[2]), None);
        assert_eq!(stopping(0, true).finish(9, 1, &[2]), Some(Finish::Stop));
    }

    #[test]
    fn ends_are_forbidden_until_min_tokens() {
        assert_eq!(stopping(2, false).forbidden(1, &[2]), vec![2, 9]);
        assert!(stopping(2, false).forbidden(2, &[2]).is_empty());
    }
}
