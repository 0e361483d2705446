//! Batches as a real server published them, and one of each event in both forms.

use crate::engine_events::frame;

/// One of each, as maps and as arrays, and stretches of what a server sent.
pub fn seeds() -> Vec<(String, Vec<u8>)> {
    let maps: &[u8] = b"\x93\xcb\x3f\xf8\0\0\0\0\0\0\x93\xde\0\x04\xa4type\xabBlockStored\xacblock_hashes\x91\xc4\x04\x01\x01\x01\x01\xa9token_ids\x92\x01\x02\xaablock_size\x02\x83\xa4type\xacBlockRemoved\xacblock_hashes\x91\xc4\x04\x01\x01\x01\x01\xa6medium\xa3GPU\x81\xa4type\xb0AllBlocksCleared\0";
    let arrays: &[u8] = b"\x93\xcb\x3f\xf8\0\0\0\0\0\0\x93\x9a\xabBlockStored\x91\xc4\x04\x01\x01\x01\x01\xc0\x92\x01\x02\x02\xc0\xa3GPU\xc0\x91\xc0\0\x94\xacBlockRemoved\x91\xc4\x04\x01\x01\x01\x01\xa3GPU\0\x91\xb0AllBlocksCleared\0";
    let mut both = Vec::new();
    frame(&mut both, maps);
    frame(&mut both, arrays);
    let captured = |file: &[u8], from: usize, count: usize| {
        let mut input = Vec::new();
        for batch in batches(file).into_iter().skip(from).take(count) {
            frame(&mut input, batch);
        }
        input
    };
    let aggregated = include_bytes!("../../../worker/tests/frames/aggregated.bin");
    let decode = include_bytes!("../../../worker/tests/frames/decode.bin");
    vec![
        ("forms".to_owned(), both),
        ("prompts".to_owned(), captured(aggregated, 0, 4)),
        ("evictions".to_owned(), captured(aggregated, 10, 3)),
        ("decode".to_owned(), captured(decode, 0, 9)),
    ]
}

/// The last frame of each message of a file of `worker/tests/frames`.
fn batches(mut file: &[u8]) -> Vec<&[u8]> {
    let mut found = Vec::new();
    while let Some(frames) = number(&mut file) {
        let mut last: &[u8] = &[];
        for _ in 0..frames {
            let length = number(&mut file).unwrap_or_default();
            (last, file) = file.split_at(length.min(file.len()));
        }
        found.push(last);
    }
    found
}

fn number(file: &mut &[u8]) -> Option<usize> {
    let (head, rest) = file.split_first_chunk::<4>()?;
    *file = rest;
    Some(u32::from_be_bytes(*head) as usize)
}
