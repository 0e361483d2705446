//! What can go wrong in a look, and what follows from it.

use crate::cause::innermost;
use crate::controller::work::LOOK_WITHIN;

/// Every message names the object and the next step.
#[derive(Debug, thiserror::Error)]
pub enum Fault {
    #[error("{what}: {}: {}", words(source), next_step(source))]
    Api {
        /// What was tried, and with which object.
        what: String,
        source: kube::Error,
    },
    #[error("the look took longer than {} s: check whether the API server is busy", LOOK_WITHIN.as_secs())]
    Late,
    /// Said by the lease.
    #[error("this process does not lead any more")]
    NotLeading,
    #[error("{0}")]
    Other(String),
}

/// How a fault is met.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// Somebody else wrote in between: look again soon.
    Conflict,
    /// Somebody else has to do it.
    NotLeading,
    /// The namespace is being deleted, and the object with it.
    Ending,
    /// Look again later, each time later.
    Failure,
}

impl Fault {
    #[must_use]
    pub fn api(what: impl Into<String>, source: kube::Error) -> Self {
        Self::Api {
            what: what.into(),
            source,
        }
    }

    #[must_use]
    pub fn class(&self) -> Class {
        match self {
            Self::Api { source, .. } if code(source) == Some(409) => Class::Conflict,
            Self::Api { source, .. } if is_ending(source) => Class::Ending,
            Self::NotLeading => Class::NotLeading,
            Self::Api { .. } | Self::Late | Self::Other(_) => Class::Failure,
        }
    }

    /// Whether the write may have been made although its answer is a fault.
    #[must_use]
    pub fn is_unanswered(&self) -> bool {
        match self {
            // 429 is said before anything is done; other server errors may be said after.
            Self::Api { source, .. } => code(source).is_none_or(|code| code >= 500),
            Self::Late => true,
            Self::NotLeading | Self::Other(_) => false,
        }
    }

    /// The API server refuses just this request; others may succeed.
    #[must_use]
    pub fn is_of_one_request(&self) -> bool {
        match self {
            Self::Api { source, .. } if is_ending(source) => false,
            Self::Api { source, .. } => {
                code(source).is_some_and(|code| matches!(code, 400 | 403 | 404 | 409 | 422))
            }
            Self::Other(_) => true,
            Self::Late | Self::NotLeading => false,
        }
    }
}

/// The namespace of the object is being deleted: nothing can be made in it any more.
fn is_ending(error: &kube::Error) -> bool {
    let kube::Error::Api(status) = error else {
        return false;
    };
    let causes = status.details.iter().flat_map(|details| &details.causes);
    causes
        .into_iter()
        .any(|cause| cause.reason == "NamespaceTerminating")
}

/// The status with which the API server answered, if it did.
#[must_use]
pub fn code(error: &kube::Error) -> Option<u16> {
    match error {
        kube::Error::Api(status) => Some(status.code),
        _ => None,
    }
}

/// What the API server says, without the client's own words around it.
#[must_use]
pub fn words(error: &kube::Error) -> String {
    match error {
        kube::Error::Api(status) => status.message.clone(),
        other => innermost(other),
    }
}

fn next_step(error: &kube::Error) -> &'static str {
    match code(error) {
        Some(401) => "check the operator's service account and its token",
        Some(403) => "check the operator's ClusterRole, and quotas and policies of the namespace",
        Some(404) => "check that the CustomResourceDefinitions are installed (chart baton-crds)",
        Some(409) => "somebody wrote in between, it is tried again",
        Some(422 | 400) => "check the fields that are named against the API server's version",
        Some(429 | 503 | 504) => "the API server is busy, it is tried again later",
        Some(_) => "it is tried again later",
        None => "check the connection to the API server; it is tried again later",
    }
}

#[cfg(test)]
mod tests {
    use kube::core::Status;

    use super::*;

    fn answered(code: u16) -> Fault {
        let status = Status {
            code,
            message: "words".into(),
            ..Status::default()
        };
        Fault::api("pod n/p", kube::Error::Api(Box::new(status)))
    }

    #[test]
    fn a_conflict_is_no_failure_and_a_refusal_stops_nothing_else() {
        assert_eq!(answered(409).class(), Class::Conflict);
        for code in [403, 404, 422, 429, 500, 503] {
            assert_eq!(answered(code).class(), Class::Failure);
        }
        assert!(answered(403).is_of_one_request() && answered(422).is_of_one_request());
        assert!(!answered(429).is_of_one_request() && !answered(500).is_of_one_request());
        let ending = serde_json::json!({
            "code": 403, "message": "words", "details": {"causes": [{"reason": "NamespaceTerminating", "message": "", "field": ""}]},
        });
        let ending = kube::Error::Api(Box::new(serde_json::from_value(ending).unwrap()));
        let ending = Fault::api("pod n/p", ending);
        assert_eq!(ending.class(), Class::Ending);
        assert!(!ending.is_of_one_request(), "nothing else would succeed");
        let text = answered(403).to_string();
        assert!(
            text.starts_with("pod n/p: ") && text.contains("ClusterRole"),
            "{text}"
        );
    }
}
