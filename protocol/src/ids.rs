//! Names of things: each its own type, so that none is passed where another is meant.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

macro_rules! name {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub String);

        impl $name {
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str(&self.0)
            }
        }

        impl From<&str> for $name {
            fn from(text: &str) -> Self {
                Self(text.to_owned())
            }
        }

        impl From<String> for $name {
            fn from(text: String) -> Self {
                Self(text)
            }
        }
    };
}

name! {
    /// One client request. Carries the router replica that took it, so that its record can be found among several:
    /// `<replica>-<128 random bits in hex>`.
    RunId
}
name! {
    /// A worker, as its pool names it; stable over restarts of its process.
    WorkerId
}
name! {
    /// One step of an attempt. Never reused: a second call with it returns the first call's result.
    OperationId
}
name! {
    /// One reading of a lease. Names source and target incarnation, run and attempt; never reused.
    TransferId
}

impl OperationId {
    /// `<run>/<attempt>/<step>`.
    pub fn new(run: &RunId, attempt: u32, step: &str) -> Self {
        Self(format!("{run}/{attempt}/{step}"))
    }
}

impl TransferId {
    /// A transfer is between two starts of two processes, for one operation: after either restarts it is another one.
    pub fn new(source: Incarnation, target: Incarnation, operation: &OperationId) -> Self {
        Self(format!("{source}>{target}/{operation}"))
    }
}

/// One start of a worker process; random, so that a restarted worker is never taken for the one before.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Incarnation(pub u64);

impl fmt::Display for Incarnation {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{:016x}", self.0)
    }
}

impl FromStr for Incarnation {
    type Err = MalformedId;

    fn from_str(text: &str) -> Result<Self, MalformedId> {
        u64::from_str_radix(text, 16)
            .map(Self)
            .map_err(|_| MalformedId {
                kind: "incarnation",
                expected: "up to 16 hexadecimal digits",
                found: text.to_owned(),
            })
    }
}

/// Counts the uses of a lease or of a block; a reader that was promised one generation never accepts another.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Generation(pub u64);

impl fmt::Display for Generation {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(formatter)
    }
}

/// A lease on KV. 128 random bits: knowing it is the right to read, so it is never logged whole.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct LeaseId(pub [u8; 16]);

impl LeaseId {
    /// Reads the wire form, exactly 16 bytes.
    pub fn from_wire(bytes: &[u8]) -> Result<Self, MalformedId> {
        bytes.try_into().map(Self).map_err(|_| MalformedId {
            kind: "lease",
            expected: "16 bytes",
            found: format!("{} bytes", bytes.len()),
        })
    }
}

impl fmt::Display for LeaseId {
    /// The first four bytes: enough to find it in a log, not enough to use it.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        for byte in &self.0[..4] {
            write!(formatter, "{byte:02x}")?;
        }
        formatter.write_str("…")
    }
}

impl fmt::Debug for LeaseId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "LeaseId({self})")
    }
}

/// Text or bytes that are not the id that they should be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("malformed {kind}: expected {expected}, found {found}")]
pub struct MalformedId {
    pub kind: &'static str,
    pub expected: &'static str,
    pub found: String,
}

impl Serialize for Incarnation {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Incarnation {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_shows_only_its_beginning() {
        let lease = LeaseId([0xab; 16]);
        assert_eq!(lease.to_string(), "abababab…");
        assert_eq!(format!("{lease:?}"), "LeaseId(abababab…)");
    }

    #[test]
    fn a_lease_of_another_length_is_refused() {
        assert!(LeaseId::from_wire(&[1; 16]).is_ok());
        for length in [0, 15, 17] {
            assert!(LeaseId::from_wire(&vec![1; length]).is_err());
        }
    }

    #[test]
    fn an_incarnation_survives_json() {
        let incarnation = Incarnation(0xdead_beef_0000_0001);
        let json = serde_json::to_string(&incarnation).unwrap();
        assert_eq!(json, "\"deadbeef00000001\"");
        assert_eq!(
            serde_json::from_str::<Incarnation>(&json).unwrap(),
            incarnation
        );
    }

    #[test]
    fn a_transfer_of_a_restarted_worker_is_another_transfer() {
        let operation = OperationId::new(&RunId::from("r"), 1, "decode");
        let before = TransferId::new(Incarnation(1), Incarnation(2), &operation);
        let after = TransferId::new(Incarnation(3), Incarnation(2), &operation);
        assert_ne!(before, after);
    }
}
