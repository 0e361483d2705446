//! Event streams: any bytes read in any pieces, and what the router writes read back.
//!
//! The first byte of an input says how the rest is cut into pieces.

use baton_protocol::sse::{Decoder, Event, MESSAGE, TooLong};
use baton_router::dispatch::http::frames::Frames;
use baton_router::openai::answer::{Answer, Kind, error_event};
use baton_router::openai::error::ApiError;
use baton_router::run::Usage;
use serde_json::Value;

/// Bytes of an event that the reader takes. Small, so that inputs reach it.
const LIMIT: usize = 512;
/// More than any event that the router writes from an input.
const ROOMY: usize = 1 << 20;

/// Reads the input as a stream, then writes a stream with the input as its texts.
pub fn check(input: &[u8]) {
    let Some((cut, stream)) = input.split_first() else {
        return;
    };
    let (whole, end) = decode(&[stream], LIMIT);
    let (pieces, pieces_end) = decode(&cut_up(stream, *cut), LIMIT);
    assert_eq!(
        (&pieces, pieces_end),
        (&whole, end),
        "the pieces change what is read"
    );

    passed_on(stream, *cut, &whole, end);

    let mut again = Vec::new();
    for event in &whole {
        event.write(&mut again);
    }
    assert_eq!(
        decode(&[&again], ROOMY),
        (whole, Ok(())),
        "what is written reads differently"
    );
    answer(*cut, &String::from_utf8_lossy(stream));
}

/// It is read to its end, and there was something in it.
pub fn accepts(input: &[u8]) -> bool {
    input.split_first().is_some_and(|(_, stream)| {
        let (events, end) = decode(&[stream], LIMIT);
        end.is_ok() && !events.is_empty()
    })
}

/// A stream of an engine on its way to a client: not a byte is lost, and what is read beside is what a client reads.
fn passed_on(stream: &[u8], cut: u8, events: &[Event], end: Result<(), TooLong>) {
    let mut frames = Frames::default();
    let (mut bytes, mut found) = (Vec::new(), Vec::new());
    for piece in cut_up(stream, cut) {
        let (ready, read) = frames.push(piece).expect("no input is that long");
        bytes.extend_from_slice(&ready);
        found.extend(read);
    }
    let rest = frames.rest();
    bytes.extend_from_slice(&rest);
    assert_eq!(bytes, stream);
    // A line end at the very end of the input may be half of one.
    if end.is_ok() {
        assert!(
            events.starts_with(&found),
            "{found:?} is no part of {events:?}"
        );
        assert!(events.len() <= found.len() + 1);
    }
}

fn decode(pieces: &[&[u8]], limit: usize) -> (Vec<Event>, Result<(), TooLong>) {
    let mut decoder = Decoder::new(limit);
    let mut events = Vec::new();
    let mut end = Ok(());
    for piece in pieces {
        end = decoder.push(piece);
        events.extend(std::iter::from_fn(|| decoder.next_event()));
        assert!(decoder.held() <= limit, "{} bytes are held", decoder.held());
    }
    (events, end)
}

/// Pieces of 1 to 8 bytes, their sizes a function of `cut`.
fn cut_up(mut stream: &[u8], cut: u8) -> Vec<&[u8]> {
    let mut pieces = Vec::new();
    let mut state = u32::from(cut);
    while !stream.is_empty() {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let size = (state >> 29) as usize + 1;
        let (piece, rest) = stream.split_at(size.min(stream.len()));
        pieces.push(piece);
        stream = rest;
    }
    pieces
}

/// Writes an answer whose texts are the lines of `text`, and reads it as a client does.
fn answer(choice: u8, text: &str) {
    let kind = if choice & 1 == 0 {
        Kind::Chat
    } else {
        Kind::Completion
    };
    let include_usage = choice & 2 != 0;
    let answer = Answer::new(kind, "run", 0, text.to_owned(), include_usage);
    let mut stream = Vec::new();
    let write = |stream: &mut Vec<u8>| -> serde_json::Result<()> {
        answer.open(stream)?;
        for line in text.split_inclusive('\n') {
            answer.more(stream, line, None)?;
        }
        answer.close(stream, "stop", Usage::default())
    };
    write(&mut stream).expect("text can be written");

    let (mut events, end) = decode(&cut_up(&stream, choice), ROOMY);
    assert_eq!(end, Ok(()));
    let done = events.pop().expect("a stream has an end");
    assert_eq!(
        (done.name.as_str(), done.data.as_str()),
        (MESSAGE, "[DONE]")
    );
    let mut told = String::new();
    for event in &events {
        assert_eq!(event.name, MESSAGE);
        let chunk: Value = serde_json::from_str(&event.data).expect("a chunk is JSON");
        assert_eq!(chunk["model"], text);
        let choice = &chunk["choices"][0];
        let part = choice["delta"]["content"]
            .as_str()
            .or(choice["text"].as_str());
        told.push_str(part.unwrap_or_default());
    }
    assert_eq!(told, text, "the client reads another text");
    failure(text);
}

/// An error in the middle of a stream is one event, whatever it says.
fn failure(message: &str) {
    let mut stream = Vec::new();
    // A long message is cut when the error is made, not when it is written.
    let error = ApiError::internal(message);
    error_event(&mut stream, &error).expect("an error can be written");
    let (events, _) = decode(&[&stream], ROOMY);
    let [event] = events.as_slice() else {
        panic!("{} events", events.len());
    };
    assert_eq!(event.name, "error");
    let body: Value = serde_json::from_str(&event.data).expect("an error is JSON");
    assert_eq!(body["error"]["message"], error.message.as_str());
}
