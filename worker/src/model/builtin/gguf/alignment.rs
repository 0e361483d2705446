//! `general.alignment` before the parser sees it: it divides by what it finds.
//!
//! Walks the fields as the format lays them out, so that the name inside another field's value is not taken for the field.

/// Arrays of arrays deeper than this are left to the parser, which refuses them: it must go no deeper than this.
const DEEPEST: usize = 65;

/// What is wrong with a field `general.alignment` of the file, if there is one. Of a file that is damaged in another way nothing is said
/// here.
pub(super) fn problem(bytes: &[u8]) -> Option<String> {
    let mut fields = Fields::new(bytes)?;
    for _ in 0..fields.count {
        let key = fields.text()?;
        let kind = u32::from_le_bytes(fields.take()?);
        let value = fields.value(kind, 0)?;
        // The parser leaves zeros at the end of a text out. Whole numbers of up to 4 bytes are what it heeds.
        let end = key
            .iter()
            .rposition(|byte| *byte != 0)
            .map_or(0, |last| last + 1);
        if &key[..end] == b"general.alignment" && kind < 6 {
            let number = value
                .iter()
                .rfold(0_u64, |number, byte| number << 8 | u64::from(*byte));
            if !number.is_power_of_two() {
                return Some(format!("{number} is not a power of two"));
            }
        }
    }
    None
}

struct Fields<'a> {
    rest: &'a [u8],
    /// Of a length: 4 bytes in the first version of the format, 8 since.
    length_bytes: usize,
    count: u64,
}

impl<'a> Fields<'a> {
    fn new(bytes: &'a [u8]) -> Option<Self> {
        let mut fields = Self {
            rest: bytes.strip_prefix(b"GGUF")?,
            length_bytes: 8,
            count: 0,
        };
        if u32::from_le_bytes(fields.take()?) == 1 {
            fields.length_bytes = 4;
        }
        let _tensors = fields.length()?;
        fields.count = fields.length()?;
        Some(fields)
    }

    fn skip(&mut self, count: u64) -> Option<&'a [u8]> {
        let (taken, rest) = self.rest.split_at_checked(usize::try_from(count).ok()?)?;
        self.rest = rest;
        Some(taken)
    }

    fn take<const COUNT: usize>(&mut self) -> Option<[u8; COUNT]> {
        let (taken, rest) = self.rest.split_first_chunk()?;
        self.rest = rest;
        Some(*taken)
    }

    fn length(&mut self) -> Option<u64> {
        if self.length_bytes == 4 {
            self.take().map(u32::from_le_bytes).map(u64::from)
        } else {
            self.take().map(u64::from_le_bytes)
        }
    }

    fn text(&mut self) -> Option<&'a [u8]> {
        let length = self.length()?;
        self.skip(length)
    }

    /// The bytes of a value of a type, by its number in the format.
    fn value(&mut self, kind: u32, depth: usize) -> Option<&'a [u8]> {
        match (kind, width(kind)) {
            (_, Some(width)) => self.skip(width),
            (8, _) => self.text(),
            (9, _) if depth < DEEPEST => {
                let kind = u32::from_le_bytes(self.take()?);
                let count = self.length()?;
                if let Some(width) = width(kind) {
                    return self.skip(count.checked_mul(width)?);
                }
                for _ in 0..count {
                    self.value(kind, depth + 1)?;
                }
                Some(&[])
            }
            _ => None,
        }
    }
}

/// Bytes of a value whose type says them.
fn width(kind: u32) -> Option<u64> {
    match kind {
        0 | 1 | 7 => Some(1),
        2 | 3 => Some(2),
        4..=6 => Some(4),
        10..=12 => Some(8),
        _ => None,
    }
}
