//! Frames that a real server sent (`tests/frames`), for tests.

use bytes::Bytes;

/// Published batches of a server that served prompts, was reset and evicted blocks.
pub(crate) const AGGREGATED: &[u8] = include_bytes!("../../tests/frames/aggregated.bin");
pub(crate) const PREFILL: &[u8] = include_bytes!("../../tests/frames/prefill.bin");
pub(crate) const DECODE: &[u8] = include_bytes!("../../tests/frames/decode.bin");
/// The answer to a replay from 0.
pub(crate) const REPLAY: &[u8] = include_bytes!("../../tests/frames/replay.bin");

/// Messages of a file, each a list of frames.
pub(crate) fn messages(file: &'static [u8]) -> Vec<Vec<Bytes>> {
    let mut rest = file;
    let mut messages = Vec::new();
    while !rest.is_empty() {
        let frames = number(&mut rest);
        let message = (0..frames).map(|_| {
            let length = number(&mut rest);
            let (frame, after) = rest.split_at(length);
            rest = after;
            Bytes::from_static(frame)
        });
        messages.push(message.collect());
    }
    messages
}

fn number(rest: &mut &'static [u8]) -> usize {
    let (head, after) = rest.split_first_chunk::<4>().unwrap();
    *rest = after;
    u32::from_be_bytes(*head) as usize
}

/// The payloads of published batches.
pub(crate) fn payloads(file: &'static [u8]) -> Vec<Bytes> {
    messages(file)
        .into_iter()
        .map(|frames| frames.last().unwrap().clone())
        .filter(|payload| !payload.is_empty())
        .collect()
}
