//! Digests by which coefficient sets and policies are stored once beside the records that used them.

use serde::Serialize;

/// BLAKE3 over the canonical JSON (fields in declaration order, maps sorted, floats in their shortest exact form), the
/// first 16 bytes in hexadecimal. Equal values give equal digests in every process of one release.
pub(crate) fn of_json<T: Serialize>(value: &T) -> String {
    let mut hasher = blake3::Hasher::new();
    match serde_json::to_vec(value) {
        Ok(bytes) => hasher.update(&bytes),
        // Only a map with keys that are not strings can fail, and the types here have none; an error digests as its text.
        Err(error) => hasher.update(error.to_string().as_bytes()),
    };
    let digest = hasher.finalize();
    let mut text = String::with_capacity(32);
    for byte in &digest.as_bytes()[..16] {
        text.push(char::from_digit(u32::from(byte >> 4), 16).unwrap_or('0'));
        text.push(char::from_digit(u32::from(byte & 15), 16).unwrap_or('0'));
    }
    text
}
