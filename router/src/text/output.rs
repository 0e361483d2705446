//! Generated tokens into what a client may see: text, stop strings, log-probabilities in step with the text.

use std::collections::VecDeque;

use baton_protocol::wire;

use super::stop::StopMatcher;
use super::unicode::Utf8Stream;
use super::vocabulary::Vocabulary;

/// The text of one answer while it is generated. Constant time per token, amortised.
#[derive(Debug)]
pub struct Output {
    unicode: Utf8Stream,
    stop: StopMatcher,
    /// Stop strings do not count in the text of this many tokens.
    min_tokens: u32,
    /// Tokens whose text is left out: the run ends with them.
    stop_token_ids: Vec<u32>,
    with_logprobs: bool,
    tokens: u32,
    /// Bytes and characters of text, shown or held back.
    produced: usize,
    produced_characters: u32,
    shown: usize,
    /// Tokens whose text is held back, with the place in bytes where it begins.
    waiting: VecDeque<(usize, TokenEntry)>,
}

/// A token with its place in the answer.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenEntry {
    pub id: u32,
    /// Characters of text before it.
    pub text_offset: u32,
    pub logprobs: Option<wire::Logprobs>,
}

/// What may be shown after a token.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Piece {
    pub text: String,
    /// Tokens to report with the text; only where log-probabilities were asked for.
    pub tokens: Vec<TokenEntry>,
    /// A stop string was found: the answer ends here.
    pub stopped: bool,
}

impl Piece {
    /// Nothing to show.
    pub fn is_empty(&self) -> bool {
        self.text.is_empty() && self.tokens.is_empty()
    }
}

impl Output {
    /// `stop_token_ids` as the client gave them; `with_logprobs`: report tokens beside the text.
    pub fn new(
        stops: &[String],
        stop_token_ids: Vec<u32>,
        min_tokens: u32,
        with_logprobs: bool,
    ) -> Self {
        Self {
            unicode: Utf8Stream::default(),
            stop: StopMatcher::new(stops),
            min_tokens,
            stop_token_ids,
            with_logprobs,
            tokens: 0,
            produced: 0,
            produced_characters: 0,
            shown: 0,
            waiting: VecDeque::new(),
        }
    }

    /// Takes a generated token.
    pub fn push(
        &mut self,
        vocabulary: &Vocabulary,
        id: u32,
        logprobs: Option<wire::Logprobs>,
    ) -> Piece {
        self.tokens = self.tokens.saturating_add(1);
        if self.with_logprobs {
            let entry = TokenEntry {
                id,
                text_offset: self.produced_characters,
                logprobs,
            };
            self.waiting.push_back((self.produced, entry));
        }
        let ends_the_run = self.tokens >= self.min_tokens && self.stop_token_ids.contains(&id);
        let mut text = String::new();
        if !ends_the_run {
            self.unicode.push(vocabulary.text(id), &mut text);
        }
        self.produce(&text)
    }

    /// The run has ended: shows what was held back.
    pub fn finish(&mut self) -> Piece {
        let mut text = String::new();
        self.unicode.finish(&mut text);
        let mut piece = self.produce(&text);
        if !piece.stopped {
            self.stop.finish(&mut piece.text);
            piece
                .tokens
                .extend(self.waiting.drain(..).map(|(_, entry)| entry));
        }
        piece
    }

    fn produce(&mut self, text: &str) -> Piece {
        let characters = u32::try_from(text.chars().count()).unwrap_or(u32::MAX);
        self.produced += text.len();
        self.produced_characters = self.produced_characters.saturating_add(characters);
        let mut piece = Piece::default();
        if self.tokens <= self.min_tokens {
            piece.text.push_str(text);
        } else {
            piece.stopped = self.stop.push(text, &mut piece.text);
        }
        self.shown += piece.text.len();
        let told = self
            .waiting
            .iter()
            .take_while(|(start, _)| *start < self.shown)
            .count();
        piece
            .tokens
            .extend(self.waiting.drain(..told).map(|(_, entry)| entry));
        piece
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;
    use tokenizers::Tokenizer;

    use super::*;
    use baton_text::samples::tokenizer_json;

    const TOKENS: [&str; 8] = ["a", "Ġb", "âĤ", "¬", "<|end|>", "Ċ", "EN", "D"];

    fn model() -> (Tokenizer, Vocabulary) {
        let decoder = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false});
        let json = tokenizer_json(&TOKENS, &["<|end|>"], &decoder);
        let tokenizer = Tokenizer::from_bytes(&json).unwrap();
        let vocabulary = Vocabulary::new(&tokenizer, &json, &[]).unwrap();
        (tokenizer, vocabulary)
    }

    fn logprobs() -> Option<wire::Logprobs> {
        Some(wire::Logprobs {
            chosen: -1.0,
            top: Vec::new(),
        })
    }

    fn ids(piece: &Piece) -> Vec<(u32, u32)> {
        piece
            .tokens
            .iter()
            .map(|entry| (entry.id, entry.text_offset))
            .collect()
    }

    #[test]
    fn log_probabilities_wait_for_the_text_of_their_token() {
        let (_, vocabulary) = model();
        let mut output = Output::new(&["END".into()], Vec::new(), 0, true);
        let mut push = |id| output.push(&vocabulary, id, logprobs());
        let piece = push(0);
        assert_eq!((piece.text.as_str(), ids(&piece)), ("a", vec![(0, 0)]));
        // Half a character, then its other half.
        assert!(push(2).is_empty());
        let piece = push(3);
        assert_eq!(
            (piece.text.as_str(), ids(&piece)),
            ("€", vec![(2, 1), (3, 1)])
        );
        // The beginning of a stop string, then something else.
        assert!(push(6).is_empty());
        let piece = push(0);
        assert_eq!(
            (piece.text.as_str(), ids(&piece)),
            ("ENa", vec![(6, 2), (0, 4)])
        );
        // The end of the sequence has no text; it is reported when the run ends.
        assert!(push(4).is_empty());
        let piece = output.finish();
        assert_eq!((piece.text.as_str(), ids(&piece)), ("", vec![(4, 5)]));
    }

    #[test]
    fn a_stop_string_ends_the_answer_and_its_tokens_are_not_reported() {
        let (_, vocabulary) = model();
        let mut output = Output::new(&["END".into()], Vec::new(), 0, true);
        let mut push = |id| output.push(&vocabulary, id, logprobs());
        push(0);
        push(6);
        let piece = push(7);
        assert!(piece.stopped && piece.is_empty());
    }

    #[test]
    fn a_stop_string_in_the_first_least_tokens_does_not_count() {
        let (_, vocabulary) = model();
        let mut output = Output::new(&["END".into()], Vec::new(), 2, false);
        let mut push = |id| output.push(&vocabulary, id, None);
        assert_eq!(push(6).text, "EN");
        assert_eq!(push(7).text, "D");
        push(6);
        assert!(push(7).stopped);
    }

    #[test]
    fn a_stop_token_has_no_text_once_it_may_end_the_run() {
        let (_, vocabulary) = model();
        let mut output = Output::new(&[], vec![0], 2, false);
        assert_eq!(output.push(&vocabulary, 0, None).text, "a");
        assert_eq!(output.push(&vocabulary, 0, None).text, "");
    }

    #[test]
    fn what_was_held_back_comes_at_the_end() {
        let (_, vocabulary) = model();
        let mut output = Output::new(&["END".into()], Vec::new(), 0, false);
        output.push(&vocabulary, 6, None);
        assert_eq!(output.push(&vocabulary, 2, None).text, "");
        assert_eq!(output.finish().text, "EN\u{fffd}");
    }

    proptest! {
        #[test]
        fn the_pieces_are_the_text_that_the_tokenizer_decodes_at_once(ids in proptest::collection::vec(0u32..8, 0..40)) {
            let (tokenizer, vocabulary) = model();
            let mut output = Output::new(&["END".into()], Vec::new(), 0, true);
            let mut text = String::new();
            let mut reported = Vec::new();
            let mut stopped = false;
            for &id in &ids {
                let piece = output.push(&vocabulary, id, logprobs());
                text.push_str(&piece.text);
                reported.extend(piece.tokens.iter().map(|entry| entry.id));
                stopped = piece.stopped;
                if stopped {
                    break;
                }
            }
            if !stopped {
                let piece = output.finish();
                text.push_str(&piece.text);
                reported.extend(piece.tokens.iter().map(|entry| entry.id));
                stopped = piece.stopped;
            }
            let whole = tokenizer.decode(&ids, true).unwrap();
            match whole.find("END") {
                Some(place) => prop_assert_eq!((stopped, text.as_str()), (true, &whole[..place])),
                None => prop_assert_eq!((stopped, text, reported), (false, whole, ids)),
            }
        }
    }
}
