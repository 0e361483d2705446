//! Finds stop strings in text that comes in pieces, and holds back only what may still become one.

/// A stop string with its failure function (Knuth, Morris, Pratt 1977): for each length matched so far, the longest
/// shorter one to go on from.
#[derive(Clone, Debug)]
struct Pattern {
    bytes: Vec<u8>,
    failure: Vec<usize>,
    /// Bytes of it that the text ends with.
    matched: usize,
}

/// Searches for any number of stop strings. The match that ends first counts; of several that end together, the longest.
#[derive(Clone, Debug, Default)]
pub struct StopMatcher {
    patterns: Vec<Pattern>,
    /// Text that is not shown yet, from `shown` on. Cleared up when more is shown than held, so each byte moves once.
    held: String,
    shown: usize,
    found: bool,
}

impl StopMatcher {
    /// `stops` holds no empty string; one would be left out.
    pub fn new(stops: &[String]) -> Self {
        Self {
            patterns: stops
                .iter()
                .filter(|stop| !stop.is_empty())
                .map(|stop| Pattern::new(stop.as_bytes()))
                .collect(),
            ..Self::default()
        }
    }

    /// Takes more text and appends to `visible` what can no longer be part of a stop string. True when one was found: `visible`
    /// then ends where it begins, and what follows is dropped.
    pub fn push(&mut self, text: &str, visible: &mut String) -> bool {
        if self.found {
            return true;
        }
        if self.patterns.is_empty() {
            visible.push_str(text);
            return false;
        }
        let before = self.held.len();
        self.held.push_str(text);
        for (index, byte) in text.bytes().enumerate() {
            let end = before + index + 1;
            let longest = self
                .patterns
                .iter_mut()
                .filter(|pattern| !pattern.bytes.is_empty())
                .filter_map(|pattern| pattern.step(byte).then_some(pattern.bytes.len()))
                .max();
            if let Some(length) = longest {
                self.show_until(end - length, visible);
                self.held.clear();
                self.shown = 0;
                self.found = true;
                return true;
            }
        }
        let may_become = self
            .patterns
            .iter()
            .map(|pattern| pattern.matched)
            .max()
            .unwrap_or(0);
        self.show_until(self.held.len() - may_become, visible);
        false
    }

    /// The text has ended: what was held back is no stop string.
    pub fn finish(&mut self, visible: &mut String) {
        self.show_until(self.held.len(), visible);
    }

    fn show_until(&mut self, end: usize, visible: &mut String) {
        visible.push_str(&self.held[self.shown..end]);
        self.shown = end;
        if self.shown > self.held.len() / 2 {
            self.held.drain(..self.shown);
            self.shown = 0;
        }
    }
}

impl Pattern {
    fn new(bytes: &[u8]) -> Self {
        let mut failure = vec![0; bytes.len()];
        let mut length = 0;
        for index in 1..bytes.len() {
            while length > 0 && bytes[index] != bytes[length] {
                length = failure[length - 1];
            }
            if bytes[index] == bytes[length] {
                length += 1;
            }
            failure[index] = length;
        }
        Self {
            bytes: bytes.to_vec(),
            failure,
            matched: 0,
        }
    }

    /// True when the byte completes the pattern. The search ends there, so it is never stepped further.
    fn step(&mut self, byte: u8) -> bool {
        while self.matched > 0 && self.bytes[self.matched] != byte {
            self.matched = self.failure[self.matched - 1];
        }
        if self.bytes[self.matched] == byte {
            self.matched += 1;
        }
        self.matched == self.bytes.len()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn matcher(stops: &[&str]) -> StopMatcher {
        StopMatcher::new(
            &stops
                .iter()
                .map(|&stop| stop.to_owned())
                .collect::<Vec<_>>(),
        )
    }

    fn push(matcher: &mut StopMatcher, text: &str) -> (String, bool) {
        let mut visible = String::new();
        let found = matcher.push(text, &mut visible);
        (visible, found)
    }

    #[test]
    fn a_stop_string_across_pieces_is_found_and_not_shown() {
        let mut matcher = matcher(&["\n\nEND"]);
        assert_eq!(push(&mut matcher, "one\n"), ("one".into(), false));
        assert_eq!(push(&mut matcher, "\nEN"), (String::new(), false));
        assert_eq!(push(&mut matcher, "D, more"), (String::new(), true));
        assert_eq!(push(&mut matcher, "after"), (String::new(), true));
    }

    #[test]
    fn what_turns_out_to_be_no_stop_string_is_shown_at_once() {
        let mut matcher = matcher(&["ababc"]);
        assert_eq!(push(&mut matcher, "xaba"), ("x".into(), false));
        // "aba" + "b" may go on to "ababc" from its third byte.
        assert_eq!(push(&mut matcher, "bab"), ("ab".into(), false));
        assert_eq!(push(&mut matcher, "d"), ("ababd".into(), false));
        assert_eq!(push(&mut matcher, "ab"), (String::new(), false));
        let mut rest = String::new();
        matcher.finish(&mut rest);
        assert_eq!(rest, "ab");
    }

    #[test]
    fn without_stop_strings_nothing_is_held() {
        assert_eq!(
            push(&mut matcher(&[]), "anything"),
            ("anything".into(), false)
        );
    }

    #[test]
    fn multi_byte_characters_are_not_cut() {
        let mut matcher = matcher(&["→é"]);
        assert_eq!(push(&mut matcher, "a→"), ("a".into(), false));
        // "→" and "⇒" share their first byte.
        assert_eq!(push(&mut matcher, "⇒"), ("→⇒".into(), false));
        assert_eq!(push(&mut matcher, "→é"), (String::new(), true));
    }

    /// Text before the stop string that ends first, the longest of those; `None`: there is none.
    fn naive(text: &str, stops: &[String]) -> Option<String> {
        (1..=text.len()).find_map(|end| {
            stops
                .iter()
                .filter(|stop| text.as_bytes()[..end].ends_with(stop.as_bytes()))
                .map(|stop| text[..end - stop.len()].to_owned())
                .min_by_key(String::len)
        })
    }

    /// Bytes at the end of a text that may become a stop string, and no more, are to be held back.
    fn held_back(text: &str, stops: &[String]) -> usize {
        (0..text.len())
            .map(|start| &text.as_bytes()[start..])
            .find(|tail| stops.iter().any(|stop| stop.as_bytes().starts_with(tail)))
            .map_or(0, <[u8]>::len)
    }

    proptest! {
        #[test]
        fn any_split_finds_what_a_search_of_the_whole_finds(
            pieces in proptest::collection::vec("[abé]{0,4}", 0..12),
            stops in proptest::collection::vec("[abé]{1,4}", 0..4),
        ) {
            let whole = pieces.concat();
            let mut matcher = StopMatcher::new(&stops);
            let mut visible = String::new();
            let mut found = false;
            let mut taken = String::new();
            for piece in &pieces {
                found = matcher.push(piece, &mut visible);
                if found {
                    break;
                }
                taken.push_str(piece);
                prop_assert_eq!(&visible, &taken[..taken.len() - held_back(&taken, &stops)]);
            }
            if !found {
                matcher.finish(&mut visible);
            }
            match naive(&whole, &stops) {
                Some(before) => prop_assert_eq!((found, visible), (true, before)),
                None => prop_assert_eq!((found, visible), (false, whole)),
            }
        }
    }
}
