//! Which revisions of prefill pools can hand KV to which revisions of decode pools.

use baton_crds::status::{Difference, MOST_PAIRS, PairStatus, RevisionStatus};
use baton_crds::{PoolRole, differences};
use baton_protocol::identity;

use super::observed::{Cards, PoolView};
use super::references::Sides;

/// Differences of a pair that a status has room for; there are not as many fields.
const DIFFERENCES: usize = 16;
/// Longest value of a difference, in characters.
const LONGEST_VALUE: usize = 512;

/// All pairs of a policy.
#[derive(Clone, Debug)]
pub struct Pairs<'a> {
    /// By declaration.
    pub pools: Vec<Declared<'a>>,
    /// By what workers have said. A pair of revisions of which one is not known yet is not among them, unless the declarations
    /// differ.
    pub revisions: Vec<PairStatus>,
}

/// Two pools and in what their declarations differ.
#[derive(Clone, Debug)]
pub struct Declared<'a> {
    pub prefill: &'a PoolView,
    pub decode: &'a PoolView,
    pub differences: Vec<Difference>,
}

impl<'a> Pairs<'a> {
    /// `known`: the pairs of the status as it stands, for differences whose cards are not at hand.
    #[must_use]
    pub fn of(sides: &Sides<'a>, cards: &Cards, known: &[PairStatus]) -> Self {
        let mut pools = Vec::new();
        let mut revisions = Vec::new();
        for prefill in &sides.prefill {
            for decode in &sides.decode {
                let pair = Declared {
                    prefill,
                    decode,
                    differences: differences::of(&prefill.spec, &decode.spec),
                };
                revisions.extend(pair.revisions(cards, known));
                pools.push(pair);
            }
        }
        revisions.truncate(MOST_PAIRS);
        Self { pools, revisions }
    }

    /// Is there a pair at all whose declarations agree?
    #[must_use]
    pub fn some_agree(&self) -> bool {
        self.pools.iter().any(|pair| pair.differences.is_empty())
    }

    /// Every pair of pools whose declarations differ, in words.
    #[must_use]
    pub fn disagreements(&self) -> String {
        let said: Vec<String> = self
            .pools
            .iter()
            .filter(|pair| !pair.differences.is_empty())
            .map(|pair| {
                let differences = differences::sentence(&pair.differences);
                let (prefill, decode) = (pair.prefill.title(), pair.decode.title());
                format!("{prefill} and {decode} cannot be paired: {differences}")
            })
            .collect();
        said.join("; ")
    }
}

impl Declared<'_> {
    fn revisions(&self, cards: &Cards, known: &[PairStatus]) -> Vec<PairStatus> {
        let mut pairs = Vec::new();
        for prefill in present(self.prefill) {
            for decode in present(self.decode) {
                let pair = PairStatus {
                    prefill_pool: self.prefill.name.clone(),
                    prefill_revision: prefill.hash.clone(),
                    decode_pool: self.decode.name.clone(),
                    decode_revision: decode.hash.clone(),
                    ..PairStatus::default()
                };
                if !self.differences.is_empty() {
                    pairs.push(PairStatus {
                        differences: self.differences.iter().map(short).collect(),
                        ..pair
                    });
                    continue;
                }
                let (Some(left), Some(right)) = (&prefill.kv_identity, &decode.kv_identity) else {
                    continue;
                };
                pairs.push(judged(pair, left, right, cards, known));
            }
        }
        pairs
    }
}

/// The cards decide where both are at hand: they know the layout too, and name the fields.
fn judged(
    pair: PairStatus,
    left: &str,
    right: &str,
    cards: &Cards,
    known: &[PairStatus],
) -> PairStatus {
    let card =
        |role, pool: &str, revision: &str| cards.get(&(role, pool.to_owned(), revision.to_owned()));
    let prefill = card(
        PoolRole::Prefill,
        &pair.prefill_pool,
        &pair.prefill_revision,
    );
    let decode = card(PoolRole::Decode, &pair.decode_pool, &pair.decode_revision);
    if let (Some(prefill), Some(decode)) = (prefill, decode) {
        let differences = match identity::compatible(prefill, decode) {
            Ok(_) => Vec::new(),
            Err(differences) => differences
                .into_iter()
                .take(DIFFERENCES)
                .map(said)
                .collect(),
        };
        return PairStatus {
            compatible: differences.is_empty(),
            differences,
            ..pair
        };
    }
    let same = |known: &&PairStatus| {
        known.prefill_pool == pair.prefill_pool
            && known.prefill_revision == pair.prefill_revision
            && known.decode_pool == pair.decode_pool
            && known.decode_revision == pair.decode_revision
    };
    // After a restart the cards are read again within moments; until then what was found before stands.
    if let Some(known) = known.iter().find(same) {
        return known.clone();
    }
    let compatible = left == right;
    let differences = if compatible {
        Vec::new()
    } else {
        vec![Difference {
            field: "kvIdentity".to_owned(),
            prefill: left.to_owned(),
            decode: right.to_owned(),
        }]
    };
    PairStatus {
        compatible,
        differences,
        ..pair
    }
}

fn said(difference: identity::Difference) -> Difference {
    short(&Difference {
        field: difference.field,
        prefill: difference.prefill,
        decode: difference.decode,
    })
}

/// As a status has room for: an API server would refuse the whole of it.
fn short(difference: &Difference) -> Difference {
    let cut = |text: &str| text.chars().take(LONGEST_VALUE).collect();
    Difference {
        field: difference.field.clone(),
        prefill: cut(&difference.prefill),
        decode: cut(&difference.decode),
    }
}

/// Revisions of which there are pods that serve, or that may: a pool's status lists no other, but for the current one.
fn present(pool: &PoolView) -> impl Iterator<Item = &RevisionStatus> {
    pool.status.revisions.iter()
}
