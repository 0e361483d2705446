//! Tokens of what prompts have in common: system prompts, earlier turns. In front of the tokenizer, exact, bounded, and private to
//! who has asked.
//!
//! A segment is the text between two of a model's added tokens, which is where a chat template puts the borders of messages. A
//! tokenizer makes the tokens of each by itself, so what it made once is what it makes again, whatever stands around it. A segment
//! is found by a keyed BLAKE3 hash of its text and of the request's salt: two that hash alike are the same text of the same tenant.
//! Requests of other salts never share, in the time that a prompt takes no more than in KV.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use parking_lot::Mutex;

/// Bytes of tokens of one model, and of what finds them.
pub const CAPACITY: usize = 8 << 20;
/// Shorter ones, in bytes of text, cost as little to make as to find.
pub const SHORTEST: usize = 256;
/// What an entry takes beside its tokens: hash, pointers, the map's spare room.
const ENTRY: usize = 128;

type Name = [u8; 32];

/// Two generations: what is not asked for while one fills is dropped with the next.
#[derive(Default)]
struct Kept {
    young: HashMap<Name, Arc<[u32]>>,
    old: HashMap<Name, Arc<[u32]>>,
    /// Bytes of the young ones.
    bytes: usize,
}

/// Segments of one model.
#[derive(Default)]
pub struct Segments {
    kept: Mutex<Kept>,
}

impl fmt::Debug for Segments {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Segments").finish_non_exhaustive()
    }
}

/// The segments that one request may find and leave.
#[derive(Clone, Copy, Debug)]
pub struct Shared<'a> {
    segments: &'a Segments,
    salt: &'a str,
}

impl Segments {
    /// For requests of this salt.
    pub fn of<'a>(&'a self, salt: &'a str) -> Shared<'a> {
        Shared {
            segments: self,
            salt,
        }
    }
}

impl Shared<'_> {
    /// Appends the tokens of a segment: kept ones, or what `make` appends.
    pub fn tokens<E>(
        self,
        text: &str,
        tokens: &mut Vec<u32>,
        make: impl FnOnce(&mut Vec<u32>) -> Result<(), E>,
    ) -> Result<(), E> {
        if text.len() < SHORTEST {
            return make(tokens);
        }
        let name = self.name(text);
        let found = self.segments.kept.lock().get(&name);
        if let Some(found) = found {
            tokens.extend_from_slice(&found);
            return Ok(());
        }
        let start = tokens.len();
        make(tokens)?;
        let made: Arc<[u32]> = tokens[start..].into();
        self.segments.kept.lock().put(name, made);
        Ok(())
    }

    fn name(self, text: &str) -> Name {
        let mut hasher = blake3::Hasher::new_derive_key("baton 2026 tokens of a segment");
        hasher.update(&self.salt.len().to_le_bytes());
        hasher.update(self.salt.as_bytes());
        hasher.update(text.as_bytes());
        *hasher.finalize().as_bytes()
    }
}

impl Kept {
    fn get(&mut self, name: &Name) -> Option<Arc<[u32]>> {
        if let Some(tokens) = self.young.get(name) {
            return Some(tokens.clone());
        }
        let tokens = self.old.remove(name)?;
        self.put(*name, tokens.clone());
        Some(tokens)
    }

    fn put(&mut self, name: Name, tokens: Arc<[u32]>) {
        let bytes = ENTRY + size_of_val::<[u32]>(&tokens);
        if bytes > CAPACITY / 2 {
            return;
        }
        if self.bytes + bytes > CAPACITY / 2 {
            self.old = std::mem::take(&mut self.young);
            self.bytes = 0;
        }
        // Two requests may have made the same at the same time.
        if self.young.insert(name, tokens).is_none() {
            self.bytes += bytes;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use super::*;

    /// Tokens of a text through the segments, and whether they were made.
    fn ask(segments: &Segments, salt: &str, text: &str) -> (Vec<u32>, bool) {
        let mut tokens = vec![7];
        let mut made = false;
        let result = segments.of(salt).tokens(text, &mut tokens, |tokens| {
            made = true;
            tokens.extend(text.bytes().map(u32::from));
            Ok::<_, Infallible>(())
        });
        let Ok(()) = result;
        (tokens, made)
    }

    fn tokens(text: &str) -> Vec<u32> {
        [7].into_iter().chain(text.bytes().map(u32::from)).collect()
    }

    #[test]
    fn a_segment_is_made_once_for_each_salt_and_a_short_one_each_time() {
        let segments = Segments::default();
        let long = "x".repeat(SHORTEST);
        for (salt, text, made) in [
            ("", &*long, true),
            ("", &long, false),
            ("a", &long, true),
            ("a", &long, false),
            ("", &long[1..], true),
            ("", &long[1..], true),
            // The border between salt and text does not move.
            ("ax", &long, true),
            ("a", &format!("x{long}"), true),
        ] {
            assert_eq!(ask(&segments, salt, text), (tokens(text), made), "{salt:?}");
        }
    }

    #[test]
    fn what_failed_is_not_kept() {
        let segments = Segments::default();
        let long = "x".repeat(SHORTEST);
        let failed = segments
            .of("")
            .tokens(&long, &mut Vec::new(), |_| Err("no"));
        assert_eq!(failed, Err("no"));
        assert!(ask(&segments, "", &long).1);
    }

    #[test]
    fn what_is_asked_for_stays_and_all_of_it_is_bounded() {
        let segments = Segments::default();
        let text = |number: usize| format!("{number:08}{}", "x".repeat(4_000));
        assert!(ask(&segments, "", &text(0)).1);
        for number in 1..3_000 {
            ask(&segments, "", &text(number));
            assert!(!ask(&segments, "", &text(0)).1, "after {number}");
            let kept = segments.kept.lock();
            let all = kept.young.values().chain(kept.old.values());
            let bytes: usize = all.map(|tokens| ENTRY + 4 * tokens.len()).sum();
            assert!(bytes <= CAPACITY, "{bytes}");
        }
        assert!(ask(&segments, "", &text(1)).1, "it was not asked for again");
        let huge = "x".repeat(CAPACITY / 8 + 1);
        assert!(ask(&segments, "", &huge).1 && ask(&segments, "", &huge).1);
    }
}
