//! The card: what a worker registers. First message of its Watch stream and the body of `GET /v1/card`.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::identity::{Layout, RouteFilter, SemanticIdentity};
use crate::ids::{Incarnation, WorkerId};

/// Versions of the worker protocol that this build speaks.
pub const WIRE_VERSIONS: WireVersions = WireVersions {
    lowest: 1,
    highest: 1,
};

/// Everything about a worker that does not change while its process lives.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Card {
    pub worker: WorkerId,
    pub incarnation: Incarnation,
    /// What the worker's engine can do.
    pub roles: Vec<Role>,
    pub pool: String,
    /// Role of the pool that the worker belongs to.
    pub pool_role: Role,
    /// Hash of the pool's pod template; `local` outside a cluster.
    pub revision: String,
    pub model: ModelName,
    /// Digest of `identity`.
    pub kv_identity: String,
    pub identity: SemanticIdentity,
    pub route_filter: RouteFilter,
    pub layout_digest: String,
    pub layout: Layout,
    pub engine: EngineName,
    /// What computes, in words, such as `H200, 1 device`. Workers of one engine, model and accelerator learn their costs together;
    /// empty: this one learns alone.
    #[serde(default)]
    pub accelerator: String,
    pub capacity: Capacity,
    pub transports: Vec<TransportOffer>,
    /// From the nearest level to the farthest.
    #[serde(default)]
    pub topology: Vec<TopologyDomain>,
    pub chunk: ChunkPolicy,
    pub dispatch: Dispatch,
    #[serde(default)]
    pub text: TextCheck,
    /// Address of the gRPC service, as peers reach it.
    pub control_address: String,
    /// What the worker lacks, in sentences for people: "no RDMA device found".
    #[serde(default)]
    pub notices: Vec<String>,
    pub wire_versions: WireVersions,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Role {
    Prefill,
    Decode,
}

impl Role {
    /// As in labels and `processes.json`.
    pub fn lower_case(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.lower_case())
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ModelName {
    /// As clients ask for it.
    pub name: String,
    #[serde(default)]
    pub revision: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EngineName {
    /// `Builtin`, `Simulated`, `VLLM`, `SGLang`.
    #[serde(rename = "type")]
    pub kind: String,
    pub version: String,
    /// Who moves KV: `Baton`, `Nixl`, `Mooncake`, `None`.
    pub connector: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Capacity {
    pub blocks: u32,
    /// Tokens per block.
    pub block_size: u32,
    /// Sequences that may decode at once.
    pub max_sequences: u32,
    /// Tokens of one step.
    pub max_batched_tokens: u32,
    /// Tokens of one sequence, prompt and output.
    pub max_context: u32,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TransportOffer {
    /// `Local`, `Tcp`, `Shm`, `Rdma`, `CudaIpc`.
    pub kind: String,
    pub address: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TopologyDomain {
    pub level: String,
    pub domain: String,
}

/// How the worker bounds the prompt tokens that it computes beside decoding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(
    tag = "type",
    rename_all = "camelCase",
    rename_all_fields = "camelCase"
)]
pub enum ChunkPolicy {
    /// Each step anew, so that a mixed step stays within 5/6 of the objective for time per output token.
    Bounded {
        minimum_tokens: u32,
        maximum_tokens: u32,
    },
    /// As the engine was started.
    Fixed { tokens: u32 },
}

/// How the router calls the worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type")]
pub enum Dispatch {
    /// By the service of `worker.proto`.
    Grpc,
    /// At the engine's own port, in OpenAI's protocol: the daemon beside it is off the data path.
    OpenAiHttp {
        /// Without a path, such as `http://10.0.0.7:8000`.
        url: String,
        /// The model's name as this engine serves it. Empty: the card's.
        #[serde(default)]
        model: String,
        #[serde(default)]
        split: Split,
    },
}

impl Dispatch {
    /// As records and messages name it.
    pub fn word(&self) -> &'static str {
        match self {
            Self::Grpc => "Grpc",
            Self::OpenAiHttp { .. } => "OpenAiHttp",
        }
    }

    /// How its KV is handed over, in a word: by Baton's own service for `Grpc`.
    pub fn split_word(&self) -> &'static str {
        match self {
            Self::Grpc => "Grpc",
            Self::OpenAiHttp { split, .. } => split.word(),
        }
    }
}

/// How an engine that is called over HTTP is told to compute a prompt for another one, or to take it over.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all_fields = "camelCase")]
pub enum Split {
    /// It cannot be: it takes whole requests only.
    #[default]
    None,
    /// vLLM's `NixlConnector`: the decode worker reads after the prefill worker has answered, and before its lease ends.
    NixlPull { lease_milliseconds: u64 },
    /// Baton's connector inside vLLM: its blocks are leased, checked and moved by the daemon beside it.
    Baton { lease_milliseconds: u64 },
    /// SGLang: both workers are called at once, with a room of the prefill worker's bootstrap server.
    Bootstrap { host: String, port: u16 },
}

impl Split {
    /// How long a prompt's blocks are kept for a reader, where that does not renew the lease from its admission on.
    pub fn lease_milliseconds(&self) -> Option<u64> {
        match self {
            Self::NixlPull { lease_milliseconds } | Self::Baton { lease_milliseconds } => {
                Some(*lease_milliseconds)
            }
            Self::None | Self::Bootstrap { .. } => None,
        }
    }

    /// Whether Baton checks each block on its way, and not an engine by itself.
    pub fn is_verified(&self) -> bool {
        match self {
            Self::None | Self::Baton { .. } => true,
            Self::NixlPull { .. } | Self::Bootstrap { .. } => false,
        }
    }

    /// As records and messages name it.
    pub fn word(&self) -> &'static str {
        match self {
            Self::None => "None",
            Self::NixlPull { .. } => "NixlPull",
            Self::Baton { .. } => "Baton",
            Self::Bootstrap { .. } => "Bootstrap",
        }
    }
}

/// Whether the tokenizer and the chat template that the card names give the tokens that the engine computes with.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all_fields = "camelCase")]
pub enum TextCheck {
    /// They are the engine's own, or were compared with what it says of sample texts.
    #[default]
    Verified,
    /// Prefixes are not credited: the router's tokens may not be the engine's.
    Unverified { reason: String },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WireVersions {
    pub lowest: u32,
    pub highest: u32,
}

/// Far above what any worker has, so that products of a card's numbers fit.
const MOST_TOKENS_PER_BLOCK: u64 = 1 << 16;
const MOST_BYTES_PER_TOKEN: u64 = 1 << 32;

/// A card that cannot be read, or contradicts itself.
#[derive(Debug, thiserror::Error)]
pub enum InvalidCard {
    #[error("card is not readable: {0}")]
    Json(#[from] serde_json::Error),
    #[error(
        "card of worker {worker}: {field} says {stated}, but its contents give {computed}: the worker speaks another version or the card was altered"
    )]
    Digest {
        worker: WorkerId,
        field: &'static str,
        stated: String,
        computed: String,
    },
    #[error("card of worker {worker}: {field} must not be zero")]
    Zero {
        worker: WorkerId,
        field: &'static str,
    },
    #[error("card of worker {worker}: {field} is {value}, and no worker has more than {most}")]
    TooLarge {
        worker: WorkerId,
        field: &'static str,
        value: u64,
        most: u64,
    },
    #[error(
        "worker {worker} speaks protocol versions {}..{}, this process {}..{}", theirs.lowest, theirs.highest, WIRE_VERSIONS.lowest, WIRE_VERSIONS.highest
    )]
    Version {
        worker: WorkerId,
        theirs: WireVersions,
    },
}

impl Card {
    pub fn to_json(&self) -> Result<String, serde_json::Error> {
        serde_json::to_string(self)
    }

    /// Reads a card and checks that its digests are those of its contents.
    pub fn from_json(json: &str) -> Result<Self, InvalidCard> {
        let card: Self = serde_json::from_str(json)?;
        let worker = || card.worker.clone();
        let theirs = card.wire_versions;
        if theirs.lowest > WIRE_VERSIONS.highest || theirs.highest < WIRE_VERSIONS.lowest {
            return Err(InvalidCard::Version {
                worker: worker(),
                theirs,
            });
        }
        for (field, stated, computed) in [
            ("kvIdentity", &card.kv_identity, card.identity.digest()),
            ("layoutDigest", &card.layout_digest, card.layout.digest()),
        ] {
            if *stated != computed {
                return Err(InvalidCard::Digest {
                    worker: worker(),
                    field,
                    stated: stated.clone(),
                    computed,
                });
            }
        }
        for (field, value) in [
            ("capacity.blocks", card.capacity.blocks),
            ("capacity.blockSize", card.capacity.block_size),
            ("capacity.maxContext", card.capacity.max_context),
        ] {
            if value == 0 {
                return Err(InvalidCard::Zero {
                    worker: worker(),
                    field,
                });
            }
        }
        let bytes_per_token = card.layout.bytes_per_token.known().copied();
        for (field, value, most) in [
            (
                "capacity.blockSize",
                u64::from(card.capacity.block_size),
                MOST_TOKENS_PER_BLOCK,
            ),
            (
                "layout.bytesPerToken",
                bytes_per_token.unwrap_or(0),
                MOST_BYTES_PER_TOKEN,
            ),
        ] {
            if value > most {
                return Err(InvalidCard::TooLarge {
                    worker: worker(),
                    field,
                    value,
                    most,
                });
            }
        }
        Ok(card)
    }

    pub fn can(&self, role: Role) -> bool {
        self.roles.contains(&role)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::samples::card;

    #[test]
    fn a_card_round_trips_and_unknown_fields_are_ignored() {
        let card = card("d");
        let mut json: serde_json::Value = serde_json::from_str(&card.to_json().unwrap()).unwrap();
        json["addedInALaterVersion"] = true.into();
        assert_eq!(Card::from_json(&json.to_string()).unwrap(), card);
    }

    #[test]
    fn numbers_that_no_worker_has_are_refused_by_name() {
        let mut large = card("d");
        large.capacity.block_size = 1 << 17;
        let error = Card::from_json(&large.to_json().unwrap()).unwrap_err();
        assert!(error.to_string().contains("capacity.blockSize is 131072"));
        let mut large = card("d");
        large.layout.bytes_per_token = crate::identity::Fact::observed(u64::MAX);
        large.layout_digest = large.layout.digest();
        let error = Card::from_json(&large.to_json().unwrap()).unwrap_err();
        assert!(error.to_string().contains("layout.bytesPerToken"));
    }

    #[test]
    fn an_altered_card_is_refused_by_name() {
        let json = card("d").to_json().unwrap().replace("\"F16\"", "\"F32\"");
        let error = Card::from_json(&json).unwrap_err().to_string();
        assert!(
            error.starts_with("card of worker d: kvIdentity says"),
            "{error}"
        );
    }

    #[test]
    fn a_card_of_the_future_is_refused_by_version() {
        let mut card = card("d");
        card.wire_versions = WireVersions {
            lowest: 2,
            highest: 3,
        };
        let error = Card::from_json(&card.to_json().unwrap()).unwrap_err();
        assert_eq!(
            error.to_string(),
            "worker d speaks protocol versions 2..3, this process 1..1"
        );
    }
}
