//! Which workers' KV means the same on which other ones, and why not.

use std::collections::HashMap;
use std::sync::Arc;

use baton_protocol::card::Card;
use baton_protocol::identity::{Difference, compatible};

/// Verdict on a pair of classes: the differences, none if they pair.
pub type Verdict = Arc<Vec<Difference>>;

/// Everything that [`compatible`] reads of a card, as a key: cards of one key pair alike.
pub fn compatibility_key(card: &Card) -> String {
    let read = serde_json::json!([
        card.identity,
        card.route_filter,
        card.layout,
        card.wire_versions,
        card.dispatch.word(),
        card.dispatch.split_word(),
    ]);
    blake3::hash(read.to_string().as_bytes()).to_hex()[..32].to_owned()
}

/// Verdicts by pair of classes. There are as many classes as revisions of pools, a handful; entries of classes that are gone are
/// dropped when the cards change.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pairs {
    verdicts: HashMap<(String, String), Verdict>,
}

impl Pairs {
    /// Judges every ordered pair of these classes ([`compatibility_key`]), each with a card of it.
    pub fn of<'a>(cards: impl Iterator<Item = (&'a str, &'a Card)>) -> Self {
        let classes: HashMap<&str, &Card> = cards.collect();
        let mut verdicts = HashMap::new();
        for (prefill_class, prefill) in &classes {
            for (decode_class, decode) in &classes {
                let differences = compatible(prefill, decode).err().unwrap_or_default();
                let key = ((*prefill_class).to_owned(), (*decode_class).to_owned());
                verdicts.insert(key, Arc::new(differences));
            }
        }
        Self { verdicts }
    }

    pub fn differences(&self, prefill_class: &str, decode_class: &str) -> Option<Verdict> {
        self.verdicts
            .get(&(prefill_class.to_owned(), decode_class.to_owned()))
            .cloned()
    }

    /// Pairs of classes that are compatible.
    pub fn compatible(&self) -> impl Iterator<Item = (&str, &str)> {
        self.verdicts
            .iter()
            .filter(|(_, differences)| differences.is_empty())
            .map(|((prefill, decode), _)| (prefill.as_str(), decode.as_str()))
    }
}

#[cfg(test)]
mod tests {
    use baton_protocol::identity::Fact;

    use super::*;
    use crate::fleet::samples;

    #[test]
    fn a_card_with_another_dtype_does_not_pair_and_the_field_is_named() {
        let prefill = samples::card("p");
        let mut other = samples::card("d");
        other.identity.kv_dtype = Fact::observed("F32".into());
        let cards = [
            (compatibility_key(&prefill), &prefill),
            (compatibility_key(&other), &other),
        ];
        let pairs = Pairs::of(cards.iter().map(|(class, card)| (class.as_str(), *card)));
        let [(prefill, _), (decode, _)] = cards;
        let differences = pairs.differences(&prefill, &decode).unwrap();
        assert_eq!(differences[0].field, "identity.kvDtype");
        assert!(pairs.differences(&prefill, &prefill).unwrap().is_empty());
        assert_eq!(pairs.compatible().count(), 2, "each class with itself");
    }

    #[test]
    fn the_key_ignores_what_pairing_does_not_read() {
        let mut first = samples::card("a");
        let second = samples::card("b");
        assert_eq!(compatibility_key(&first), compatibility_key(&second));
        first.route_filter.tokenizer = Fact::observed("other".into());
        assert_ne!(compatibility_key(&first), compatibility_key(&second));
    }
}
