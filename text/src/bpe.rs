//! Byte-level BPE over bytes: the same tokens as the `tokenizers` crate makes, at a fraction of its cost. Pure.
//!
//! `tokenizers` keeps, for every character, where it came from, and makes a string of every word and token: some 2,600 instructions
//! a character, nearly all that the router did for a request. None of it is needed here. This is for tokenizers of the kind that
//! GPT-2, Llama 3, Qwen 2 and SmolLM have; [`file`] says which, and every other one stays with the crate. Equality is held by
//! property tests, and looked at once more on a sample when a model is compiled.
//!
//! What is kept from one text for the next are whole [`segments`](super::segments), by salt: what other tenants have asked before does
//! not show in the time that a text takes.

mod file;

use std::collections::HashMap;
use std::fmt;
use std::hash::{BuildHasherDefault, Hasher};
use std::thread;

use tokenizers::{Model as _, Tokenizer};

use super::segments::{Segments, Shared};
use super::vocabulary::byte_of;
use super::words::Cut;
use file::Outline;
pub use file::Unfit;

/// Words longer than this, in bytes, go to the crate: its heap is for them, the scan here is for short ones.
const LONGEST_WORD: usize = 256;

/// Keys are of the model's file, not of a client: a hash needs no secret.
#[derive(Default)]
struct Folded(u64);

impl Hasher for Folded {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        let (words, rest) = bytes.as_chunks::<8>();
        for word in words {
            self.write_u64(u64::from_le_bytes(*word));
        }
        let mut last = [0; 8];
        last[..rest.len()].copy_from_slice(rest);
        self.write_u64(u64::from_le_bytes(last));
    }

    fn write_u64(&mut self, word: u64) {
        // Two factors of 64 bits.
        let product = u128::from(self.0 ^ word) * 0x9e37_79b9_7f4a_7c15;
        self.0 = (product >> 64) as u64 ^ product as u64;
    }

    fn write_usize(&mut self, word: usize) {
        self.write_u64(word as u64);
    }
}

type ByFolded = BuildHasherDefault<Folded>;

/// What two neighbours become, and how early.
#[derive(Clone, Copy)]
struct Merge {
    rank: u32,
    id: u32,
}

/// A byte-level BPE tokenizer.
pub struct BytePairs {
    /// Every numeral is a text of its own.
    single_numerals: bool,
    cut: Cut,
    /// The token of each byte. One that has none is left out of the text, as the crate does.
    bytes: [Option<u32>; 256],
    /// Words that are one token.
    whole: HashMap<Box<[u8]>, u32, ByFolded>,
    /// By both ids.
    merges: HashMap<u64, Merge, ByFolded>,
    /// Tokens found in text before anything else.
    added: HashMap<Box<[u8]>, u32, ByFolded>,
    /// Lengths of these, longest first.
    added_lengths: Vec<usize>,
    /// Bytes that these begin with.
    added_begin: [bool; 256],
    /// For words that are long.
    model: tokenizers::ModelWrapper,
}

impl fmt::Debug for BytePairs {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("BytePairs")
            .field("cut", &self.cut)
            .field("whole", &self.whole.len())
            .field("merges", &self.merges.len())
            .finish_non_exhaustive()
    }
}

/// The tokens of one word while they are merged.
#[derive(Debug, Default)]
struct Word {
    ids: Vec<u32>,
    /// Of each with the one after it; `u32::MAX`: they do not merge.
    ranks: Vec<u32>,
    merged: Vec<u32>,
}

impl BytePairs {
    /// Reads a `tokenizer.json`, which `tokenizer` was made of.
    ///
    /// # Errors
    /// It is of another kind, or on a sample text its tokens would be others.
    pub fn new(json: &[u8], tokenizer: &Tokenizer) -> Result<Self, Unfit> {
        let outline = Outline::read(json)?;
        let vocabulary = &outline.vocabulary;
        let mut bytes = [None; 256];
        let mut names: Vec<(Box<[u8]>, u32)> = Vec::new();
        for (name, id) in vocabulary {
            let name: Option<Box<[u8]>> = name.chars().map(byte_of).collect();
            // No text can have a name of other characters.
            let Some(name) = name else { continue };
            if let [byte] = *name {
                bytes[usize::from(byte)] = Some(*id);
            }
            names.push((name, *id));
        }
        if outline.unknown && bytes.contains(&None) {
            return Err(Unfit("a token for what it does not know"));
        }
        let mut merges = HashMap::default();
        for (rank, (left, right)) in outline.merges.iter().enumerate() {
            let id = |name: &str| vocabulary.get(name).copied();
            let (Some(first), Some(second)) = (id(left), id(right)) else {
                return Err(Unfit("a merge of tokens that are not there"));
            };
            let Some(merged) = id(&format!("{left}{right}")) else {
                return Err(Unfit("a merge into a token that is not there"));
            };
            let rank = u32::try_from(rank).map_err(|_| Unfit("too many merges"))?;
            merges.insert(pair(first, second), Merge { rank, id: merged });
        }
        let mut added: HashMap<Box<[u8]>, u32, ByFolded> = HashMap::default();
        for (id, token) in tokenizer.get_added_tokens_decoder() {
            if token.lstrip || token.rstrip || token.single_word || token.normalized {
                return Err(Unfit("added tokens that take more than their own text"));
            }
            added.insert(token.content.into_bytes().into_boxed_slice(), id);
        }
        let mut added_lengths: Vec<usize> = added.keys().map(|name| name.len()).collect();
        added_lengths.sort_unstable_by(|one, other| other.cmp(one));
        added_lengths.dedup();
        let mut added_begin = [false; 256];
        for name in added.keys() {
            added_begin[usize::from(name[0])] = true;
        }
        let mut pairs = Self {
            single_numerals: outline.single_numerals,
            cut: outline.cut,
            bytes,
            whole: HashMap::default(),
            merges,
            added,
            added_lengths,
            added_begin,
            model: tokenizer.get_model().clone(),
        };
        let mut word = Word::default();
        for (name, id) in names {
            let is_whole = outline.ignore_merges || {
                name.len() <= LONGEST_WORD && {
                    pairs.merge(&name, &mut word);
                    word.ids == [id]
                }
            };
            if is_whole {
                pairs.whole.insert(name, id);
            }
        }
        // On a thread of its own: the crate keeps words of every tokenizer that a thread has used, until the thread ends.
        thread::scope(|scope| {
            let checking =
                thread::Builder::new().spawn_scoped(scope, || pairs.agrees_with(tokenizer));
            let checking = checking.map_err(|_| Unfit("no thread to check it on"))?;
            let checked = checking.join();
            checked.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })?;
        Ok(pairs)
    }

    /// The tokens of a text, without any before or after it.
    ///
    /// # Errors
    /// The crate's, for a long word.
    pub fn encode(&self, text: &str, shared: Shared<'_>) -> Result<Vec<u32>, tokenizers::Error> {
        // A token of English text covers about four bytes.
        let mut tokens = Vec::with_capacity(text.len() / 4 + 8);
        let mut word = Word::default();
        let mut start = 0;
        let mut place = 0;
        let mut segment = |text: &str, tokens: &mut Vec<u32>| {
            shared.tokens(text, tokens, |tokens| self.plain(text, &mut word, tokens))
        };
        while place < text.len() {
            match self.added_at(&text.as_bytes()[place..]) {
                Some((length, id)) => {
                    segment(&text[start..place], &mut tokens)?;
                    tokens.push(id);
                    place += length;
                    start = place;
                }
                None => place += 1,
            }
        }
        segment(&text[start..], &mut tokens)?;
        Ok(tokens)
    }

    /// The longest added token that a text begins with.
    fn added_at(&self, text: &[u8]) -> Option<(usize, u32)> {
        let first = text.first()?;
        if !self.added_begin[usize::from(*first)] {
            return None;
        }
        self.added_lengths.iter().find_map(|&length| {
            let id = self.added.get(text.get(..length)?)?;
            Some((length, *id))
        })
    }

    /// Text without added tokens.
    fn plain(
        &self,
        text: &str,
        word: &mut Word,
        tokens: &mut Vec<u32>,
    ) -> Result<(), tokenizers::Error> {
        if !self.single_numerals {
            return self.words(text, word, tokens);
        }
        // Of most text no character but a digit has to be looked at.
        let perhaps = |byte: &u8| byte.is_ascii_digit() || !byte.is_ascii();
        let (mut start, mut place) = (0, 0);
        while let Some(passed) = text.as_bytes()[place..].iter().position(perhaps) {
            place += passed;
            let Some(character) = text[place..].chars().next() else {
                break;
            };
            let end = place + character.len_utf8();
            if character.is_numeric() {
                self.words(&text[start..place], word, tokens)?;
                self.words(&text[place..end], word, tokens)?;
                start = end;
            }
            place = end;
        }
        self.words(&text[start..], word, tokens)
    }

    fn words(
        &self,
        text: &str,
        word: &mut Word,
        tokens: &mut Vec<u32>,
    ) -> Result<(), tokenizers::Error> {
        let mut start = 0;
        while start < text.len() {
            let end = self.cut.end(text, start);
            let bytes = &text.as_bytes()[start..end];
            if let Some(id) = self.whole.get(bytes) {
                tokens.push(*id);
            } else if bytes.len() > LONGEST_WORD {
                let name: String = bytes.iter().map(|&byte| file::character_of(byte)).collect();
                let made = self.model.tokenize(&name)?;
                tokens.extend(made.into_iter().map(|token| token.id));
            } else {
                self.merge(bytes, word);
                tokens.extend_from_slice(&word.ids);
            }
            start = end;
        }
        Ok(())
    }

    /// Merges the two neighbours of the lowest rank, the first of equals, until none merge.
    fn merge(&self, bytes: &[u8], word: &mut Word) {
        let Word { ids, ranks, merged } = word;
        ids.clear();
        ids.extend(
            bytes
                .iter()
                .filter_map(|&byte| self.bytes[usize::from(byte)]),
        );
        ranks.clear();
        merged.clear();
        for index in 0..ids.len() {
            let merge = self.merge_at(ids, index);
            ranks.push(merge.rank);
            merged.push(merge.id);
        }
        while let Some((index, &rank)) = ranks.iter().enumerate().min_by_key(|(_, rank)| **rank)
            && rank != u32::MAX
        {
            ids[index] = merged[index];
            ids.remove(index + 1);
            ranks.remove(index + 1);
            merged.remove(index + 1);
            for changed in index.saturating_sub(1)..=index {
                let merge = self.merge_at(ids, changed);
                ranks[changed] = merge.rank;
                merged[changed] = merge.id;
            }
        }
    }

    /// What a token and the one after it become.
    fn merge_at(&self, ids: &[u32], index: usize) -> Merge {
        const NONE: Merge = Merge {
            rank: u32::MAX,
            id: 0,
        };
        let Some(&[left, right]) = ids.get(index..index + 2) else {
            return NONE;
        };
        self.merges.get(&pair(left, right)).copied().unwrap_or(NONE)
    }

    fn agrees_with(&self, tokenizer: &Tokenizer) -> Result<(), Unfit> {
        let failed = |_| Unfit("a sample that the tokenizer refuses");
        for sample in file::SAMPLES {
            let expected = tokenizer.encode_fast(*sample, false).map_err(failed)?;
            let segments = Segments::default();
            if self.encode(sample, segments.of("")).map_err(failed)? != expected.get_ids() {
                return Err(Unfit("other tokens on a sample"));
            }
        }
        Ok(())
    }
}

fn pair(left: u32, right: u32) -> u64 {
    u64::from(left) << 32 | u64::from(right)
}

#[cfg(test)]
mod tests;
