//! Turns bytes that come in pieces into text. A character that is split over pieces is never shown broken.

/// The bytes of a character that has not ended: at most three.
#[derive(Clone, Debug, Default)]
pub struct Utf8Stream {
    tail: Vec<u8>,
}

const REPLACEMENT: char = char::REPLACEMENT_CHARACTER;

impl Utf8Stream {
    /// Appends to `text` what is certain after these bytes. Over all calls, `finish` included, the text is what
    /// [`String::from_utf8_lossy`] makes of all bytes together.
    pub fn push(&mut self, bytes: &[u8], text: &mut String) {
        if self.tail.is_empty() {
            self.decode(bytes, text);
        } else {
            let mut joined = std::mem::take(&mut self.tail);
            joined.extend_from_slice(bytes);
            self.decode(&joined, text);
        }
    }

    /// A character that never ended shows as one U+FFFD.
    pub fn finish(&mut self, text: &mut String) {
        if !self.tail.is_empty() {
            self.tail.clear();
            text.push(REPLACEMENT);
        }
    }

    fn decode(&mut self, mut bytes: &[u8], text: &mut String) {
        for chunk in bytes.utf8_chunks() {
            text.push_str(chunk.valid());
            bytes = &bytes[chunk.valid().len()..];
            if chunk.invalid().is_empty() {
                return;
            }
            let may_go_on = chunk.invalid().len() == bytes.len()
                && std::str::from_utf8(bytes).is_err_and(|error| error.error_len().is_none());
            if may_go_on {
                self.tail.extend_from_slice(bytes);
                return;
            }
            text.push(REPLACEMENT);
            bytes = &bytes[chunk.invalid().len()..];
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn pieces(pieces: &[&[u8]]) -> Vec<String> {
        let mut stream = Utf8Stream::default();
        let mut shown: Vec<String> = pieces
            .iter()
            .map(|piece| {
                let mut text = String::new();
                stream.push(piece, &mut text);
                text
            })
            .collect();
        let mut rest = String::new();
        stream.finish(&mut rest);
        shown.push(rest);
        shown
    }

    #[test]
    fn a_split_character_is_shown_when_it_is_whole() {
        assert_eq!(
            pieces(&[b"a\xf0\x9f", b"\x98", b"\x80b"]),
            ["a", "", "😀b", ""]
        );
    }

    #[test]
    fn bytes_that_are_no_text_show_as_replacements_at_once() {
        assert_eq!(
            pieces(&[b"\xff", b"a\xe2\x82", b"b"]),
            ["\u{fffd}", "a", "\u{fffd}b", ""]
        );
        assert_eq!(pieces(&[b"\xe2\x82"]), ["", "\u{fffd}"]);
    }

    /// Bytes that are mostly pieces of characters, so that splits and damage are common.
    fn bytes() -> impl Strategy<Value = Vec<u8>> {
        let piece = prop_oneof![
            any::<char>().prop_map(|character| character.to_string().into_bytes()),
            proptest::collection::vec(any::<u8>(), 0..3),
            Just(vec![0xf0, 0x9f]),
            Just(vec![0x82]),
        ];
        proptest::collection::vec(piece, 0..12).prop_map(|pieces| pieces.concat())
    }

    proptest! {
        #[test]
        fn any_split_gives_the_text_of_the_whole(bytes in bytes(), cuts in proptest::collection::vec(0usize..40, 0..8)) {
            let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(bytes.len())).collect();
            cuts.sort_unstable();
            let mut start = 0;
            let mut split: Vec<&[u8]> = Vec::new();
            for cut in cuts.into_iter().chain([bytes.len()]) {
                split.push(&bytes[start..cut]);
                start = cut;
            }
            prop_assert_eq!(pieces(&split).concat(), String::from_utf8_lossy(&bytes));
        }
    }
}
