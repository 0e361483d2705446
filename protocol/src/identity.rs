//! When the KV of one worker means the same on another.
//!
//! Three questions, kept apart: does the KV *mean* the same ([`SemanticIdentity`]), would the same request give the same *tokens*
//! ([`RouteFilter`]), does it *lie* the same in memory ([`Layout`]). An unknown fact equals nothing, not even another unknown.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::card::{Card, Split};

/// Where a fact is from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FactSource {
    /// Read from what really runs.
    Observed,
    /// Taken from the pool's declaration.
    Declared,
    /// Nobody knows.
    Unknown,
}

/// One property of a worker and where it is known from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Fact<T> {
    #[serde(default = "Option::default", skip_serializing_if = "Option::is_none")]
    value: Option<T>,
    source: FactSource,
}

impl<T> Fact<T> {
    pub fn observed(value: T) -> Self {
        Self {
            value: Some(value),
            source: FactSource::Observed,
        }
    }

    pub fn declared(value: T) -> Self {
        Self {
            value: Some(value),
            source: FactSource::Declared,
        }
    }

    pub fn unknown() -> Self {
        Self {
            value: None,
            source: FactSource::Unknown,
        }
    }

    /// The value, unless its source says that nobody knows it.
    pub fn known(&self) -> Option<&T> {
        match self.source {
            FactSource::Unknown => None,
            FactSource::Observed | FactSource::Declared => self.value.as_ref(),
        }
    }

    pub fn source(&self) -> FactSource {
        self.source
    }
}

/// Shape of the attention whose keys and values are kept.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Attention {
    pub layers: u32,
    pub kv_heads: u32,
    /// Values per head.
    pub head_size: u32,
    /// `Full`, `SlidingWindow`, `Mla`, `StateSpace`.
    pub kind: String,
}

impl fmt::Display for Attention {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            formatter,
            "{} {} layers x {} KV heads x {}",
            self.kind, self.layers, self.kv_heads, self.head_size
        )
    }
}

/// Rotary position embedding. The base is kept as its exact decimal text: it is compared, never computed with.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Rope {
    pub base: String,
    pub dimensions: u32,
    /// `None`, or the scaling rule with its parameters.
    pub scaling: String,
}

impl fmt::Display for Rope {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            formatter,
            "base {} over {} dimensions, scaling {}",
            self.base, self.dimensions, self.scaling
        )
    }
}

/// Equal, or the KV means something else.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SemanticIdentity {
    /// Digest of the weights really loaded, not of their name.
    pub weights: Fact<String>,
    pub kv_dtype: Fact<String>,
    /// Scheme and digest of the scales; `None` where KV is not quantised.
    pub quantization: Fact<String>,
    pub attention: Fact<Attention>,
    pub rope: Fact<Rope>,
    /// Tokens; 0 is no window.
    pub sliding_window: Fact<u32>,
    /// `None` for a text model.
    pub processor: Fact<String>,
    /// Tokens per block: it bounds the hashes.
    pub block_size: Fact<u32>,
}

impl SemanticIdentity {
    /// 64 hexadecimal digits: salt of the block hashes and the label on pods.
    ///
    /// Sources are left out: a declared fact and an observed one that agree are the same identity.
    pub fn digest(&self) -> String {
        let canonical = serde_json::json!([
            "baton.kv-identity.v1",
            self.weights.known(),
            self.kv_dtype.known(),
            self.quantization.known(),
            self.attention.known(),
            self.rope.known(),
            self.sliding_window.known(),
            self.processor.known(),
            self.block_size.known(),
        ]);
        digest(&canonical)
    }
}

/// Equal, or the same request would give other tokens. Does not touch KV already made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RouteFilter {
    /// Digest of the artifact, which the router fetches by it.
    pub tokenizer: Fact<String>,
    pub chat_template: Fact<String>,
    /// Each request's adapter must be on both sides.
    #[serde(default)]
    pub adapters: Vec<Adapter>,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Adapter {
    pub name: String,
    pub revision: String,
}

/// Equal, or convertible by a rule. No rule exists yet: layouts must be equal.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Layout {
    /// Dimensions of a block from the slowest to the fastest, such as `layer,kv,token,head,dim`.
    pub order: Fact<String>,
    pub bytes_per_token: Fact<u64>,
    pub tensor: Fact<u32>,
    pub pipeline: Fact<u32>,
    /// The engine's own compatibility hash; `None` where it has none.
    pub engine_hash: Fact<String>,
}

impl Layout {
    /// 64 hexadecimal digits.
    pub fn digest(&self) -> String {
        digest(&serde_json::json!([
            "baton.layout.v1",
            self.order.known(),
            self.bytes_per_token.known(),
            self.tensor.known(),
            self.pipeline.known(),
            self.engine_hash.known(),
        ]))
    }

    /// First eight bytes of the digest, as block headers carry it.
    pub fn tag(&self) -> u64 {
        u64::from_str_radix(&self.digest()[..16], 16).unwrap_or_default()
    }
}

fn digest(canonical: &serde_json::Value) -> String {
    blake3::hash(canonical.to_string().as_bytes())
        .to_hex()
        .to_string()
}

/// How blocks of the prefill worker become blocks of the decode worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mapping {
    /// Byte for byte.
    Identical,
}

/// One field in which two workers differ, with both values as a person reads them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Difference {
    pub field: String,
    pub prefill: String,
    pub decode: String,
}

impl fmt::Display for Difference {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            formatter,
            "{}: prefill has {}, decode has {}",
            self.field, self.prefill, self.decode
        )
    }
}

/// Whether KV made by `prefill` may be used by `decode`; otherwise every difference, not only the first.
pub fn compatible(prefill: &Card, decode: &Card) -> Result<Mapping, Vec<Difference>> {
    let mut found = Differences::default();
    let (left, right) = (&prefill.identity, &decode.identity);
    found.compare("identity.weights", &left.weights, &right.weights);
    found.compare("identity.kvDtype", &left.kv_dtype, &right.kv_dtype);
    found.compare(
        "identity.quantization",
        &left.quantization,
        &right.quantization,
    );
    found.compare("identity.attention", &left.attention, &right.attention);
    found.compare("identity.rope", &left.rope, &right.rope);
    found.compare(
        "identity.slidingWindow",
        &left.sliding_window,
        &right.sliding_window,
    );
    found.compare("identity.processor", &left.processor, &right.processor);
    found.compare("identity.blockSize", &left.block_size, &right.block_size);

    let (left, right) = (&prefill.route_filter, &decode.route_filter);
    found.compare("routeFilter.tokenizer", &left.tokenizer, &right.tokenizer);
    found.compare(
        "routeFilter.chatTemplate",
        &left.chat_template,
        &right.chat_template,
    );

    let (left, right) = (&prefill.layout, &decode.layout);
    found.compare("layout.order", &left.order, &right.order);
    found.compare(
        "layout.bytesPerToken",
        &left.bytes_per_token,
        &right.bytes_per_token,
    );
    found.compare("layout.tensor", &left.tensor, &right.tensor);
    found.compare("layout.pipeline", &left.pipeline, &right.pipeline);
    found.compare("layout.engineHash", &left.engine_hash, &right.engine_hash);

    let (left, right) = (&prefill.dispatch, &decode.dispatch);
    let mut differ = |field: &str, left: &str, right: &str| {
        found.0.push(Difference {
            field: field.to_owned(),
            prefill: left.to_owned(),
            decode: right.to_owned(),
        });
    };
    if left.word() != right.word() {
        differ("dispatch.type", left.word(), right.word());
    } else if left.split_word() != right.split_word() || left.split_word() == Split::None.word() {
        // Engines that cannot hand over are alike in that, and still do not pair.
        differ("dispatch.split", left.split_word(), right.split_word());
    }

    let (left, right) = (&prefill.wire_versions, &decode.wire_versions);
    if left.lowest > right.highest || right.lowest > left.highest {
        found.0.push(Difference {
            field: "wireVersions".to_owned(),
            prefill: format!("{}..{}", left.lowest, left.highest),
            decode: format!("{}..{}", right.lowest, right.highest),
        });
    }
    if found.0.is_empty() {
        Ok(Mapping::Identical)
    } else {
        Err(found.0)
    }
}

#[derive(Default)]
struct Differences(Vec<Difference>);

impl Differences {
    fn compare<T: PartialEq + fmt::Display>(
        &mut self,
        field: &str,
        left: &Fact<T>,
        right: &Fact<T>,
    ) {
        let (left, right) = (left.known(), right.known());
        if left.is_none() || left != right {
            let text = |value: Option<&T>| value.map_or("unknown".to_owned(), T::to_string);
            self.0.push(Difference {
                field: field.to_owned(),
                prefill: text(left),
                decode: text(right),
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::card::Dispatch;
    use crate::samples::card;

    fn fields(result: Result<Mapping, Vec<Difference>>) -> Vec<String> {
        result
            .err()
            .unwrap_or_default()
            .into_iter()
            .map(|difference| difference.field)
            .collect()
    }

    #[test]
    fn equal_cards_pair() {
        assert_eq!(compatible(&card("p"), &card("d")), Ok(Mapping::Identical));
    }

    #[test]
    fn each_differing_field_is_named_alone() {
        type Change = fn(&mut Card);
        let table: [(&str, Change); 12] = [
            ("identity.weights", |card| {
                card.identity.weights = Fact::observed("other".into());
            }),
            ("identity.kvDtype", |card| {
                card.identity.kv_dtype = Fact::observed("F32".into());
            }),
            ("identity.quantization", |card| {
                card.identity.quantization = Fact::observed("Fp8".into());
            }),
            ("identity.rope", |card| {
                card.identity.rope = Fact::observed(Rope {
                    base: "500000".into(),
                    dimensions: 64,
                    scaling: "None".into(),
                });
            }),
            ("identity.slidingWindow", |card| {
                card.identity.sliding_window = Fact::observed(4096);
            }),
            ("identity.blockSize", |card| {
                card.identity.block_size = Fact::observed(32);
            }),
            ("identity.processor", |card| {
                card.identity.processor = Fact::observed("clip".into());
            }),
            ("routeFilter.tokenizer", |card| {
                card.route_filter.tokenizer = Fact::observed("other".into());
            }),
            ("routeFilter.chatTemplate", |card| {
                card.route_filter.chat_template = Fact::observed("other".into());
            }),
            ("layout.tensor", |card| {
                card.layout.tensor = Fact::observed(2);
            }),
            ("dispatch.type", |card| {
                card.dispatch = Dispatch::OpenAiHttp {
                    url: "http://h:1".into(),
                    model: String::new(),
                    split: Split::None,
                };
            }),
            ("wireVersions", |card| {
                card.wire_versions.lowest = 7;
                card.wire_versions.highest = 8;
            }),
        ];
        for (field, change) in table {
            let mut other = card("d");
            change(&mut other);
            assert_eq!(fields(compatible(&card("p"), &other)), [field]);
            assert_eq!(fields(compatible(&other, &card("p"))), [field]);
        }
    }

    #[test]
    fn engines_pair_only_where_they_hand_over_in_the_same_way() {
        let split = |split| {
            let mut card = card("w");
            card.dispatch = Dispatch::OpenAiHttp {
                url: "http://h:1".into(),
                model: String::new(),
                split,
            };
            card
        };
        let nixl = |lease_milliseconds| split(Split::NixlPull { lease_milliseconds });
        let baton = split(Split::Baton {
            lease_milliseconds: 1,
        });
        assert!(compatible(&nixl(1), &nixl(2)).is_ok());
        assert_eq!(fields(compatible(&nixl(1), &baton)), ["dispatch.split"]);
        // Neither can, so neither may.
        let whole = split(Split::None);
        assert_eq!(fields(compatible(&whole, &whole)), ["dispatch.split"]);
    }

    #[test]
    fn unknown_equals_nothing() {
        let mut left = card("p");
        let mut right = card("d");
        left.identity.rope = Fact::unknown();
        right.identity.rope = Fact::unknown();
        let differences = compatible(&left, &right).unwrap_err();
        assert_eq!(
            differences[0].to_string(),
            "identity.rope: prefill has unknown, decode has unknown"
        );
        // A pool that declares the fact makes the pair possible.
        left.identity.rope = Fact::declared(card("p").identity.rope.known().unwrap().clone());
        right.identity.rope = left.identity.rope.clone();
        assert!(compatible(&left, &right).is_ok());
    }

    #[test]
    fn the_digest_follows_meaning_not_source() {
        let observed = card("p").identity;
        let mut declared = observed.clone();
        declared.weights = Fact::declared(observed.weights.known().unwrap().clone());
        assert_eq!(observed.digest(), declared.digest());
        let mut other = observed.clone();
        other.block_size = Fact::observed(32);
        assert_ne!(observed.digest(), other.digest());
        assert_eq!(observed.digest().len(), 64);
    }
}
