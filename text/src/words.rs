//! How byte-level tokenizers cut text into words before tokens are made of it: the patterns of GPT-2, Llama 3 and Qwen 2, scanned by
//! hand. Pure.
//!
//! Each scanner gives what its regular expression gives to a backtracking engine, `(?!\S)` included; a property test compares them
//! on text that is made of the pattern's borders. Letters and numbers are those of the `regex-syntax` tables, which the tokenizers'
//! own expressions are compiled with, so both mean the same version of Unicode.

use std::sync::LazyLock;

use regex_syntax::hir::{Class as HirClass, HirKind};

/// How a text is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    /// Not at all.
    Whole,
    /// `'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+`
    Gpt2,
    /// `(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,D}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`
    Llama3 { digits: usize },
}

/// What the patterns tell apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Letter,
    Number,
    Space,
    Other,
}

const ASCII: [Kind; 128] = {
    let mut kinds = [Kind::Other; 128];
    let mut code = 0;
    while code < 128 {
        let byte = code as u8;
        if byte.is_ascii_alphabetic() {
            kinds[code] = Kind::Letter;
        } else if byte.is_ascii_digit() {
            kinds[code] = Kind::Number;
        } else if matches!(byte, b'\t'..=b'\r' | b' ') {
            kinds[code] = Kind::Space;
        }
        code += 1;
    }
    kinds
};

/// Ranges of characters beyond ASCII that are letters, numbers or spaces, in order.
static BEYOND: LazyLock<Vec<(char, char, Kind)>> = LazyLock::new(|| {
    let mut ranges = Vec::new();
    for (pattern, kind) in [
        (r"\p{L}", Kind::Letter),
        (r"\p{N}", Kind::Number),
        (r"\s", Kind::Space),
    ] {
        // Constant patterns: they parse, and are classes of characters.
        let Ok(hir) = regex_syntax::parse(pattern) else {
            continue;
        };
        if let HirKind::Class(HirClass::Unicode(class)) = hir.kind() {
            ranges.extend(class.iter().map(|range| (range.start(), range.end(), kind)));
        }
    }
    ranges.sort_unstable_by_key(|range| range.0);
    ranges
});

/// What a character is.
pub fn kind(character: char) -> Kind {
    if let Some(kind) = ASCII.get(character as usize) {
        return *kind;
    }
    let after = BEYOND.partition_point(|range| range.0 <= character);
    match after.checked_sub(1).map(|index| BEYOND[index]) {
        Some((_, end, kind)) if character <= end => kind,
        _ => Kind::Other,
    }
}

impl Cut {
    /// Where the word ends that begins at `start`, which is before the end of the text.
    pub fn end(self, text: &str, start: usize) -> usize {
        match self {
            Self::Whole => text.len(),
            Self::Gpt2 => gpt2(text, start),
            Self::Llama3 { digits } => llama3(text, start, digits),
        }
    }
}

fn at(text: &str, place: usize) -> Option<(char, Kind)> {
    let byte = *text.as_bytes().get(place)?;
    if byte < 128 {
        return Some((char::from(byte), ASCII[usize::from(byte)]));
    }
    let character = text[place..].chars().next()?;
    Some((character, kind(character)))
}

/// The end of the characters of one kind from `place` on.
fn run(text: &str, mut place: usize, wanted: Kind) -> usize {
    let bytes = text.as_bytes();
    loop {
        let ascii = |byte: &&u8| ASCII.get(usize::from(**byte)) == Some(&wanted);
        place += bytes[place..].iter().take_while(ascii).count();
        match at(text, place) {
            Some((character, kind)) if kind == wanted => place += character.len_utf8(),
            _ => return place,
        }
    }
}

/// `'s|'t|'re|'ve|'m|'ll|'d` at an apostrophe. `folded`: as `(?i)` has it, where the long s is an s.
fn contraction(text: &str, start: usize, folded: bool) -> Option<usize> {
    let mut rest = text[start + 1..].chars();
    let fold = |character: char| match character {
        'ſ' if folded => 's',
        other if folded => other.to_ascii_lowercase(),
        other => other,
    };
    let first = rest.next()?;
    let one = start + 1 + first.len_utf8();
    match (fold(first), rest.next().map(fold)) {
        ('s' | 't' | 'm' | 'd', _) => Some(one),
        ('r' | 'v', Some('e')) | ('l', Some('l')) => Some(one + 1),
        _ => None,
    }
}

/// `\s+(?!\S)|\s+`: spaces, but for the last one where a word follows and it is not the only one.
fn spaces(text: &str, start: usize, end: usize) -> usize {
    let last = text[start..end]
        .chars()
        .next_back()
        .map_or(end, |last| end - last.len_utf8());
    if end == text.len() || last == start {
        end
    } else {
        last
    }
}

fn gpt2(text: &str, start: usize) -> usize {
    let Some((first, kind)) = at(text, start) else {
        return text.len();
    };
    if first == '\''
        && let Some(end) = contraction(text, start, false)
    {
        return end;
    }
    match (first, at(text, start + first.len_utf8())) {
        (' ', Some((_, next))) if next != Kind::Space => run(text, start + 1, next),
        _ if kind == Kind::Space => spaces(text, start, run(text, start, kind)),
        _ => run(text, start, kind),
    }
}

fn llama3(text: &str, start: usize, digits: usize) -> usize {
    let Some((first, kind)) = at(text, start) else {
        return text.len();
    };
    let second = start + first.len_utf8();
    if first == '\''
        && let Some(end) = contraction(text, start, true)
    {
        return end;
    }
    let next = at(text, second).map(|(_, kind)| kind);
    let newline = matches!(first, '\r' | '\n');
    if kind == Kind::Letter || (next == Some(Kind::Letter) && kind != Kind::Number && !newline) {
        return run(text, second, Kind::Letter);
    }
    if kind == Kind::Number {
        let numbers = text[start..]
            .chars()
            .take(digits)
            .take_while(|character| self::kind(*character) == Kind::Number);
        return start + numbers.map(char::len_utf8).sum::<usize>();
    }
    if kind == Kind::Other || (first == ' ' && next == Some(Kind::Other)) {
        let end = run(text, second, Kind::Other);
        let newlines = text.as_bytes()[end..]
            .iter()
            .take_while(|byte| matches!(byte, b'\r' | b'\n'));
        return end + newlines.count();
    }
    let end = run(text, start, Kind::Space);
    match text[start..end].rfind(['\r', '\n']) {
        Some(newline) => start + newline + 1,
        None => spaces(text, start, end),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;
    use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
    use tokenizers::tokenizer::{OffsetReferential, OffsetType, SplitDelimiterBehavior};
    use tokenizers::{PreTokenizedString, PreTokenizer as _};

    use super::*;

    const GPT2: &str =
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

    fn llama3(digits: &str) -> String {
        format!(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        )
    }

    fn scanned(cut: Cut, text: &str) -> Vec<&str> {
        let mut words = Vec::new();
        let mut start = 0;
        while start < text.len() {
            let end = cut.end(text, start);
            assert!(end > start, "{text:?} at {start}");
            words.push(&text[start..end]);
            start = end;
        }
        words
    }

    fn matched(splitter: &Split, text: &str) -> Vec<String> {
        let mut text = PreTokenizedString::from(text);
        splitter.pre_tokenize(&mut text).unwrap();
        text.get_splits(OffsetReferential::Original, OffsetType::Byte)
            .into_iter()
            .map(|(word, ..)| word.to_owned())
            .filter(|word| !word.is_empty())
            .collect()
    }

    fn splitter(pattern: &str) -> Split {
        let pattern = SplitPattern::Regex(pattern.to_owned());
        Split::new(pattern, SplitDelimiterBehavior::Isolated, false).unwrap()
    }

    /// What the patterns turn on, and characters of every kind, some of many bytes.
    pub(crate) fn text() -> impl Strategy<Value = String> {
        let piece = prop_oneof![
            4 => proptest::sample::select(vec![
                " ", "  ", "\n", "\r\n", "\t", "\u{a0}", "\u{3000}", "\u{2028}", "'", "'s", "'S", "'ſ", "'ll", "'LL", "'re", "'vE", "'x", "'l", "’s",
                "a", "Ab", "word", "é", "e\u{301}", "日本", "ß", "ǅ", "ª", "0", "12", "3456", "½", "Ⅷ", "٣", "x²", ".", ",", "--", "€", "(", "🙂",
                "\u{0}", "\u{7f}", "\u{feff}", "\u{ad}", "<", "|", "_", "\u{1885}", "\u{10ffff}", "\u{85}", "\u{1c}",
            ]).prop_map(str::to_owned),
            1 => any::<char>().prop_map(String::from),
            1 => "[ -~]{0,6}",
        ];
        proptest::collection::vec(piece, 0..24).prop_map(|pieces| pieces.concat())
    }

    #[test]
    fn words_are_those_of_the_patterns() {
        let patterns = [
            (Cut::Gpt2, splitter(GPT2)),
            (Cut::Llama3 { digits: 3 }, splitter(&llama3(r"\p{N}{1,3}"))),
            (Cut::Llama3 { digits: 1 }, splitter(&llama3(r"\p{N}"))),
        ];
        let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig::with_cases(4_000));
        runner
            .run(&text(), |text| {
                for (cut, pattern) in &patterns {
                    prop_assert_eq!(scanned(*cut, &text), matched(pattern, &text), "{:?}", cut);
                }
                Ok(())
            })
            .unwrap();
    }

    #[test]
    fn every_character_is_of_the_kind_that_the_patterns_say() {
        let splitters = [
            (Kind::Letter, splitter(r"\p{L}")),
            (Kind::Number, splitter(r"\p{N}")),
            (Kind::Space, splitter(r"\s")),
        ];
        // Each by its own, between characters that are none of these: what is cut off is of the kind.
        for first in (0..0x11_0000_u32).step_by(0x400) {
            let characters: Vec<char> = (first..first + 0x400).filter_map(char::from_u32).collect();
            let text: String = characters.iter().flat_map(|c| ['\u{0}', *c]).collect();
            for (wanted, splitter) in &splitters {
                let found = matched(splitter, &text).into_iter().filter(|word| {
                    let mut all = word.chars();
                    all.next().is_some_and(|c| c != '\u{0}') && all.next().is_none()
                });
                let expected = characters.iter().filter(|c| kind(**c) == *wanted);
                let expected: Vec<String> = expected.map(char::to_string).collect();
                assert_eq!(
                    found.collect::<Vec<_>>(),
                    expected,
                    "{wanted:?} from U+{first:04X}"
                );
            }
        }
    }

    #[test]
    fn an_uncut_text_is_one_word() {
        assert_eq!(scanned(Cut::Whole, "a b  c"), ["a b  c"]);
        assert_eq!(
            scanned(Cut::Gpt2, "I've  12x!?"),
            ["I", "'ve", " ", " 12", "x", "!?"]
        );
        let llama3 = Cut::Llama3 { digits: 3 };
        assert_eq!(
            scanned(llama3, "(a 12345!\n\n \nb"),
            ["(a", " ", "123", "45", "!\n\n", " \n", "b"]
        );
    }
}
