//! Which runs are traced: `OTEL_TRACES_SAMPLER` and its argument.

use crate::context::{TraceContext, TraceId};

/// Decides when a trace begins here, and whether a client's decision is followed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampler {
    /// What is decided about a trace that nobody has decided about.
    root: Root,
    /// A client's decision is followed where there is one.
    parent_based: bool,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Root {
    All,
    None,
    /// A share, 0 to 1, by trace id: all processes decide alike.
    Ratio(f64),
}

impl Default for Sampler {
    /// `parentbased_always_on`, as the standard says.
    fn default() -> Self {
        Self {
            root: Root::All,
            parent_based: true,
        }
    }
}

/// A sampler that is not known, or an argument that is none.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UnknownSampler {
    #[error(
        "OTEL_TRACES_SAMPLER={0}: use always_on, always_off, traceidratio, or one of them after parentbased_"
    )]
    Name(String),
    #[error("OTEL_TRACES_SAMPLER_ARG={0}: use a share between 0 and 1")]
    Argument(String),
}

impl Sampler {
    /// Reads the two variables. The argument counts for `traceidratio` only; without it all are traced.
    pub fn parse(name: &str, argument: Option<&str>) -> Result<Self, UnknownSampler> {
        let (parent_based, root) = match name.strip_prefix("parentbased_") {
            Some(root) => (true, root),
            None => (false, name),
        };
        let root = match root {
            "always_on" => Root::All,
            "always_off" => Root::None,
            "traceidratio" => Root::Ratio(share(argument.unwrap_or("1"))?),
            _ => return Err(UnknownSampler::Name(name.to_owned())),
        };
        Ok(Self { root, parent_based })
    }

    pub fn decide(&self, trace: TraceId, parent: Option<&TraceContext>) -> bool {
        if let (true, Some(parent)) = (self.parent_based, parent) {
            return parent.sampled;
        }
        match self.root {
            Root::All => true,
            Root::None => false,
            Root::Ratio(share) => {
                let bytes = trace.bytes();
                let mut low = [0; 8];
                low.copy_from_slice(&bytes[8..]);
                // The lower 63 bits, as other implementations take them: they must agree about a trace.
                let number = u64::from_be_bytes(low) >> 1;
                (number as f64) < share * (1_u64 << 63) as f64
            }
        }
    }
}

fn share(text: &str) -> Result<f64, UnknownSampler> {
    let share: f64 = text
        .parse()
        .map_err(|_| UnknownSampler::Argument(text.to_owned()))?;
    if (0.0..=1.0).contains(&share) {
        Ok(share)
    } else {
        Err(UnknownSampler::Argument(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parent(sampled: bool) -> TraceContext {
        TraceContext::root(None, "client", sampled)
    }

    fn decides(name: &str, argument: Option<&str>, parent: Option<&TraceContext>) -> bool {
        let trace = TraceId::of_run("r0-1");
        Sampler::parse(name, argument)
            .unwrap()
            .decide(trace, parent)
    }

    #[test]
    fn a_client_s_decision_is_followed_by_the_parent_based_ones_only() {
        for (name, sampled, without) in [
            ("always_on", true, true),
            ("always_off", false, false),
            ("traceidratio", true, true),
        ] {
            assert_eq!(decides(name, None, None), without, "{name}");
            assert_eq!(decides(name, None, Some(&parent(!sampled))), without);
            let based = format!("parentbased_{name}");
            assert_eq!(decides(&based, None, None), without, "{based}");
            for sampled in [true, false] {
                assert_eq!(decides(&based, None, Some(&parent(sampled))), sampled);
            }
        }
        assert_eq!(
            Sampler::parse("parentbased_always_on", None),
            Ok(Sampler::default())
        );
    }

    #[test]
    fn a_ratio_takes_its_share_and_every_process_the_same_one() {
        let sampler = Sampler::parse("traceidratio", Some("0.25")).unwrap();
        let more = Sampler::parse("traceidratio", Some("0.5")).unwrap();
        let mut taken = 0;
        for run in 0..4_000 {
            let trace = TraceId::of_run(&format!("run {run}"));
            if sampler.decide(trace, None) {
                taken += 1;
                assert!(more.decide(trace, None), "a larger share holds the smaller");
            }
        }
        assert!((850..1150).contains(&taken), "{taken} of 4000");
    }

    #[test]
    fn what_is_not_known_is_said() {
        for name in ["", "jaeger_remote", "parentbased_", "ALWAYS_ON"] {
            let error = Sampler::parse(name, None).unwrap_err();
            assert!(error.to_string().contains("always_on"), "{error}");
        }
        for argument in ["2", "-0.1", "NaN", "x"] {
            let error = Sampler::parse("traceidratio", Some(argument)).unwrap_err();
            assert!(error.to_string().contains(argument), "{error}");
        }
    }
}
