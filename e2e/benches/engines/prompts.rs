//! Prompts as many clients of one application send them: three quarters are one of a few shared beginnings, the rest is each one's own.

/// Shared beginnings of each length.
pub(crate) const SHARED: usize = 64;

const WORDS: [&str; 16] = [
    "amber ", "basket ", "candle ", "dune ", "ember ", "fern ", "granite ", "harbour ", "island ",
    "juniper ", "kettle ", "lantern ", "meadow ", "nettle ", "orchard ", "pebble ",
];

/// Draws that are the same each time (xorshift).
#[derive(Clone, Debug)]
pub(crate) struct Draws(u64);

impl Draws {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// Words up to that many bytes.
    fn fill(&mut self, text: &mut String, bytes: usize) {
        while text.len() < bytes {
            let word = self.next() as usize % WORDS.len();
            text.push_str(WORDS[word]);
        }
        text.truncate(bytes);
    }
}

/// The beginning of that number of prompts of that length.
pub(crate) fn shared(characters: usize, number: usize) -> String {
    let mut text = format!("{number:02} ");
    Draws::new(number as u64 + 1).fill(&mut text, characters * 3 / 4);
    text
}

/// Beginnings of one length, made once.
#[derive(Debug)]
pub(crate) struct Prompts {
    characters: usize,
    shared: Vec<String>,
}

impl Prompts {
    pub(crate) fn new(characters: usize) -> Self {
        let shared = (0..SHARED).map(|number| shared(characters, number));
        Self {
            characters,
            shared: shared.collect(),
        }
    }

    /// One that nobody has sent.
    pub(crate) fn draw(&self, draws: &mut Draws) -> String {
        let drawn = draws.next();
        let mut text = self.shared[drawn as usize % SHARED].clone();
        text.push_str(&format!(" {drawn:016x} "));
        draws.fill(&mut text, self.characters);
        text
    }
}
