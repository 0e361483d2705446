//! Server-sent events out of the pieces in which a stream arrives: the reading half of every OpenAI-compatible server's streams.
//!
//! After WHATWG HTML, "Parsing an event stream": lines end with CR, LF or both, a leading byte-order mark is dropped, `data`
//! lines of one event are joined by line feeds, an event without data is none, and what follows the last blank line is
//! dropped. `id` and `retry` are for clients that reconnect, which nobody here does: they are read over.

use std::collections::VecDeque;

/// One event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// `message` where the stream names none.
    pub name: String,
    pub data: String,
}

impl Event {
    /// Appends the event as a stream holds it.
    pub fn write(&self, out: &mut Vec<u8>) {
        if self.name != MESSAGE {
            out.extend_from_slice(b"event: ");
            out.extend_from_slice(self.name.as_bytes());
            out.push(b'\n');
        }
        for line in self.data.split('\n') {
            out.extend_from_slice(b"data: ");
            out.extend_from_slice(line.as_bytes());
            out.push(b'\n');
        }
        out.push(b'\n');
    }
}

/// The name of an event that has none.
pub const MESSAGE: &str = "message";

/// An event longer than the reader allows: the stream cannot be read on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "an event of the stream is longer than {0} bytes: the server is none that streams tokens, or needs a larger limit"
)]
pub struct TooLong(pub usize);

/// Puts events together from pieces.
#[derive(Clone, Debug)]
pub struct Decoder {
    /// Bytes of one event, its unfinished line included.
    limit: usize,
    line: Vec<u8>,
    /// Bytes until the event is whole: what is no UTF-8 grows when it is replaced.
    name: Vec<u8>,
    data: Vec<u8>,
    /// An empty `data` line counts as one.
    has_data: bool,
    /// The last line ended with CR: an LF right after it ends no other.
    after_return: bool,
    /// No line has ended yet, so that the mark of the byte order may come.
    at_start: bool,
    too_long: bool,
    /// Bounded by the pieces: an event takes at least six bytes of them.
    ready: VecDeque<Event>,
}

impl Decoder {
    /// `limit` is the most bytes that one event may have.
    pub fn new(limit: usize) -> Self {
        Self {
            limit,
            line: Vec::new(),
            name: Vec::new(),
            data: Vec::new(),
            has_data: false,
            after_return: false,
            at_start: true,
            too_long: false,
            ready: VecDeque::new(),
        }
    }

    /// Takes a piece; [`Self::next_event`] then gives the events that it completed.
    ///
    /// # Errors
    /// An event is longer than the limit. The events before it are still given; no piece is taken any more.
    pub fn push(&mut self, piece: &[u8]) -> Result<(), TooLong> {
        let mut rest = piece;
        while !self.too_long {
            if self.after_return && !rest.is_empty() {
                self.after_return = false;
                rest = rest.strip_prefix(b"\n").unwrap_or(rest);
            }
            let end = rest.iter().position(|byte| matches!(byte, b'\n' | b'\r'));
            let (part, after) = rest.split_at(end.unwrap_or(rest.len()));
            if self.held() + part.len() > self.limit {
                self.too_long = true;
                break;
            }
            self.line.extend_from_slice(part);
            let Some((ending, after)) = after.split_first() else {
                return Ok(());
            };
            self.after_return = *ending == b'\r';
            rest = after;
            self.end_line();
        }
        Err(TooLong(self.limit))
    }

    /// The next event that is complete.
    pub fn next_event(&mut self) -> Option<Event> {
        self.ready.pop_front()
    }

    /// Bytes of the event that is not complete yet: never above the limit.
    pub fn held(&self) -> usize {
        self.line.len() + self.name.len() + self.data.len()
    }

    fn end_line(&mut self) {
        let mut line = std::mem::take(&mut self.line);
        if std::mem::take(&mut self.at_start) && line.starts_with("\u{feff}".as_bytes()) {
            line.drain(.."\u{feff}".len());
        }
        if line.is_empty() {
            self.end_event();
        } else {
            let (field, value) = match line.iter().position(|byte| *byte == b':') {
                // A comment has an empty field name.
                Some(colon) => (&line[..colon], &line[colon + 1..]),
                None => (&line[..], &[][..]),
            };
            let value = value.strip_prefix(b" ").unwrap_or(value);
            match field {
                b"data" => {
                    if self.has_data {
                        self.data.push(b'\n');
                    }
                    self.has_data = true;
                    self.data.extend_from_slice(value);
                }
                b"event" => value.clone_into(&mut self.name),
                _ => {}
            }
        }
        line.clear();
        // Its memory serves the next line.
        self.line = line;
    }

    fn end_event(&mut self) {
        let name = std::mem::take(&mut self.name);
        let data = std::mem::take(&mut self.data);
        if std::mem::take(&mut self.has_data) {
            let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
            self.ready.push_back(Event {
                name: if name.is_empty() {
                    MESSAGE.to_owned()
                } else {
                    text(&name)
                },
                data: text(&data),
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn decode(pieces: &[&[u8]]) -> Vec<Event> {
        let mut decoder = Decoder::new(1 << 16);
        for piece in pieces {
            decoder.push(piece).unwrap();
        }
        std::iter::from_fn(|| decoder.next_event()).collect()
    }

    fn event(name: &str, data: &str) -> Event {
        Event {
            name: name.to_owned(),
            data: data.to_owned(),
        }
    }

    #[test]
    fn lines_end_in_three_ways_and_data_is_joined() {
        let stream = b"\xef\xbb\xbfdata: a\r\ndata:b\r\n\r\n: alive\n\nevent: error\rdata:  c\r\rid: 7\nretry: 1\ndata\n\ndata: cut off";
        let events = [
            event("message", "a\nb"),
            event("error", " c"),
            event("message", ""),
        ];
        assert_eq!(decode(&[stream]), events);
        // Whatever the pieces, also between CR and LF.
        for at in 0..stream.len() {
            assert_eq!(
                decode(&[&stream[..at], &stream[at..]]),
                events,
                "cut at {at}"
            );
        }
    }

    #[test]
    fn a_name_without_data_is_no_event_and_names_no_later_one() {
        assert_eq!(
            decode(&[b"event: error\n\ndata: a\n\n"]),
            [event("message", "a")]
        );
    }

    #[test]
    fn an_event_beyond_the_limit_ends_the_reading_and_holds_no_memory() {
        let mut decoder = Decoder::new(16);
        assert_eq!(
            decoder.push(b"data: a\n\ndata: 0123456789a"),
            Err(TooLong(16))
        );
        assert_eq!(decoder.next_event(), Some(event("message", "a")));
        assert!(decoder.held() <= 16);
        assert_eq!(decoder.push(b"\n\n"), Err(TooLong(16)));
        assert_eq!(decoder.next_event(), None);
        // Also in many short lines.
        let mut decoder = Decoder::new(16);
        let lines = b"data: a\n".repeat(40);
        assert_eq!(decoder.push(&lines), Err(TooLong(16)));
        assert!(decoder.held() <= 16);
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(events in proptest::collection::vec(("[a-z]{1,5}", "[ -~\n\u{e9}\u{1f600}]{0,20}"), 0..6), at in 0_usize..200) {
            let events: Vec<Event> = events.iter().map(|(name, data)| event(name, data)).collect();
            let mut stream = Vec::new();
            for event in &events {
                event.write(&mut stream);
            }
            let at = at.min(stream.len());
            prop_assert_eq!(decode(&[&stream[..at], &stream[at..]]), events);
        }
    }
}
