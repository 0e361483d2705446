//! The events of a stream with their bytes: each is passed on as it came, and read beside that.

use baton_protocol::sse::{Decoder, Event};
use bytes::{Bytes, BytesMut};

/// An event longer than this is none of an engine's: a token's event is some hundred bytes, with log-probabilities some thousand. The
/// first event may hold the ids of the whole prompt (`return_token_ids`), of up to eight bytes each: this is a prompt of two million.
pub const LONGEST: usize = 16 << 20;

/// An event that is longer than [`LONGEST`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("an event of its stream is longer than {LONGEST} bytes")]
pub struct TooLong;

/// Cuts a stream after each blank line.
#[derive(Debug)]
pub struct Frames {
    held: BytesMut,
    /// Where the search goes on.
    searched: usize,
    decoder: Decoder,
}

impl Default for Frames {
    fn default() -> Self {
        Self {
            held: BytesMut::new(),
            searched: 0,
            decoder: Decoder::new(LONGEST),
        }
    }
}

impl Frames {
    /// Takes what came. Returns all whole frames that there are now, as one piece of bytes, and their events.
    ///
    /// # Errors
    /// The stream is none that this reads.
    pub fn push(&mut self, bytes: &[u8]) -> Result<(Bytes, Vec<Event>), TooLong> {
        self.held.extend_from_slice(bytes);
        let mut whole = 0;
        while let Some(end) = end_of_frame(&self.held, self.searched) {
            whole = end;
            self.searched = end;
        }
        let ready = self.held.split_to(whole).freeze();
        // A line end may lie across what came and what comes.
        self.searched = self.held.len().saturating_sub(3);
        if self.held.len() > LONGEST {
            return Err(TooLong);
        }
        self.decoder.push(&ready).map_err(|_| TooLong)?;
        let events = std::iter::from_fn(|| self.decoder.next_event()).collect();
        Ok((ready, events))
    }

    /// The stream is over: what no blank line has ended is part of no event, and is passed on all the same.
    pub fn rest(&mut self) -> Bytes {
        self.held.split().freeze()
    }
}

/// The end of the first blank line that ends at or after `from`.
fn end_of_frame(bytes: &[u8], from: usize) -> Option<usize> {
    // A line end is CR, LF or both; two of them are a blank line.
    let mut at = from;
    while at < bytes.len() {
        let rest = &bytes[at..];
        let next = rest.iter().position(|byte| matches!(byte, b'\n' | b'\r'))?;
        let first = at + next;
        let after = line_end(bytes, first)?;
        match bytes.get(after) {
            Some(b'\n' | b'\r') => return line_end(bytes, after),
            Some(_) => at = after,
            None => return None,
        }
    }
    None
}

/// Where the line end that begins at `at` is over; `None` where the next byte would tell.
fn line_end(bytes: &[u8], at: usize) -> Option<usize> {
    match (bytes[at], bytes.get(at + 1)) {
        (b'\n', _) => Some(at + 1),
        (_, Some(b'\n')) => Some(at + 2),
        (_, Some(_)) => Some(at + 1),
        // CR at the end: LF may follow. Servers that end lines with CR alone are not known to stream tokens.
        (_, None) => None,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const STREAM: &str = "data: {\"a\":\"é\"}\n\n: alive\n\ndata: b\r\n\r\nevent: error\ndata: c\n\ndata: [DONE]\n\n";

    fn cut(pieces: &[&[u8]]) -> (Vec<Vec<u8>>, Vec<String>, Bytes) {
        let mut frames = Frames::default();
        let (mut ready, mut events) = (Vec::new(), Vec::new());
        for piece in pieces {
            let (bytes, found) = frames.push(piece).unwrap();
            if !bytes.is_empty() {
                ready.push(bytes.to_vec());
            }
            events.extend(found.into_iter().map(|event| event.data));
        }
        (ready, events, frames.rest())
    }

    #[test]
    fn only_whole_frames_are_passed_on_however_the_stream_is_cut() {
        for at in 0..=STREAM.len() {
            let (one, two) = STREAM.as_bytes().split_at(at);
            let (ready, events, rest) = cut(&[one, two]);
            assert_eq!(events, ["{\"a\":\"é\"}", "b", "c", "[DONE]"], "cut at {at}");
            assert_eq!(ready.concat(), STREAM.as_bytes(), "cut at {at}");
            assert!(rest.is_empty());
            for piece in ready {
                assert!(piece.ends_with(b"\n\n") || piece.ends_with(b"\r\n\r\n"));
            }
        }
    }

    #[test]
    fn half_a_frame_is_held_back() {
        let (ready, events, rest) = cut(&[b"data: a\n\ndata: \xc3"]);
        assert_eq!(
            (ready.concat(), events),
            (b"data: a\n\n".to_vec(), vec!["a".to_owned()])
        );
        assert_eq!(&rest[..], b"data: \xc3");
    }

    #[test]
    fn a_frame_without_an_end_is_given_up() {
        let mut frames = Frames::default();
        assert_eq!(frames.push(&vec![b'a'; LONGEST + 1]), Err(TooLong));
    }

    #[test]
    fn the_ids_of_a_long_prompt_are_one_event() {
        let ids = "151643,".repeat(600_000);
        let event = format!("data: {{\"prompt_token_ids\":[{ids}7]}}\n\n");
        assert!(event.len() > 4 << 20);
        let (ready, events, rest) = cut(&event.as_bytes().chunks(1 << 16).collect::<Vec<_>>());
        assert!(ready.concat() == event.as_bytes() && events.len() == 1 && rest.is_empty());
    }

    proptest! {
        #[test]
        fn not_a_byte_is_lost(pieces in proptest::collection::vec("[a\n\r:]{0,9}", 0..8)) {
            let mut frames = Frames::default();
            let mut out = Vec::new();
            for piece in &pieces {
                out.extend_from_slice(&frames.push(piece.as_bytes()).unwrap().0);
            }
            out.extend_from_slice(&frames.rest());
            prop_assert_eq!(String::from_utf8(out).unwrap(), pieces.concat());
        }
    }
}
