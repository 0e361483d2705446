//! Block hashes: they find KV, they never prove it.
//!
//! `hash[0] = H(root, tokens[0], extra[0])`, `hash[i] = H(hash[i-1], tokens[i], extra[i])`, over full blocks only, with tokens as
//! little-endian `u32`. The root is derived from the KV identity and the client's cache salt, so that KV that means something
//! else, or belongs to another tenant, is never even looked up. `H` is 128-bit XXH3 keyed by a secret of the deployment: fast,
//! and without the key nobody can craft a collision. A cache that is hit still compares the tokens.

use std::fmt;

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_128_with_secret;

/// Name of a block's contents and of everything before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockHash(pub u128);

impl BlockHash {
    /// Bytes on the wire, little-endian.
    pub const WIRE_BYTES: usize = 16;

    pub fn to_wire(self) -> [u8; Self::WIRE_BYTES] {
        self.0.to_le_bytes()
    }

    /// Concatenates for `BlocksStored` and `BlocksRemoved`.
    pub fn pack(hashes: &[Self]) -> Vec<u8> {
        hashes.iter().flat_map(|hash| hash.to_wire()).collect()
    }

    /// Reads what [`Self::pack`] wrote; a length that is no multiple of 16 is an error.
    pub fn unpack(bytes: &[u8]) -> Result<Vec<Self>, MalformedHashes> {
        let (chunks, rest) = bytes.as_chunks::<{ Self::WIRE_BYTES }>();
        if rest.is_empty() {
            Ok(chunks
                .iter()
                .map(|chunk| Self(u128::from_le_bytes(*chunk)))
                .collect())
        } else {
            Err(MalformedHashes(bytes.len()))
        }
    }
}

impl fmt::Display for BlockHash {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{:032x}", self.0)
    }
}

impl Serialize for BlockHash {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for BlockHash {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        u128::from_str_radix(&text, 16)
            .map(Self)
            .map_err(serde::de::Error::custom)
    }
}

/// A packed list of hashes whose length is off.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("malformed block hashes: {0} bytes are no multiple of 16")]
pub struct MalformedHashes(pub usize);

/// Secret of a deployment, shared by its routers and workers.
#[derive(Clone, PartialEq, Eq)]
pub struct HashKey {
    // XXH3 wants at least 136 bytes of secret; 192 is its own default length.
    secret: [u8; 192],
}

impl HashKey {
    pub fn from_bytes(key: &[u8; 32]) -> Self {
        let mut secret = [0; 192];
        blake3::Hasher::new_keyed(key)
            .update(b"baton block hash v1")
            .finalize_xof()
            .fill(&mut secret);
        Self { secret }
    }

    /// Reads 64 hexadecimal digits, surrounding white space allowed: the form of a key file.
    pub fn from_hex(text: &str) -> Result<Self, MalformedKey> {
        let text = text.trim();
        let mut key = [0; 32];
        // Digits only: the parser below would take a sign for one.
        if text.len() != 64 || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err(MalformedKey);
        }
        for (byte, pair) in key.iter_mut().zip(text.as_bytes().chunks(2)) {
            let pair = std::str::from_utf8(pair).map_err(|_| MalformedKey)?;
            *byte = u8::from_str_radix(pair, 16).map_err(|_| MalformedKey)?;
        }
        Ok(Self::from_bytes(&key))
    }

    /// A key for another purpose, which `purpose` names. Says nothing of this one.
    pub fn derived(&self, purpose: &str) -> [u8; 32] {
        blake3::derive_key(purpose, &self.secret)
    }
}

impl fmt::Debug for HashKey {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("HashKey(secret)")
    }
}

/// A key file that does not hold a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("malformed hash key: expected 64 hexadecimal digits (32 random bytes)")]
pub struct MalformedKey;

/// Hashes blocks of one (KV identity, cache salt).
#[derive(Clone, Debug)]
pub struct BlockHasher {
    key: HashKey,
    root: BlockHash,
}

impl BlockHasher {
    pub fn new(key: &HashKey, kv_identity: &str, cache_salt: &str) -> Self {
        let mut input = Vec::with_capacity(8 + kv_identity.len() + cache_salt.len());
        // The length keeps ("ab", "c") and ("a", "bc") apart.
        input.extend_from_slice(&(kv_identity.len() as u64).to_le_bytes());
        input.extend_from_slice(kv_identity.as_bytes());
        input.extend_from_slice(cache_salt.as_bytes());
        Self {
            root: BlockHash(xxh3_128_with_secret(&input, &key.secret)),
            key: key.clone(),
        }
    }

    /// What the first block chains from.
    pub fn root(&self) -> BlockHash {
        self.root
    }

    /// Hash of a full block after `parent`. `extra` is what else shaped it (adapter revision, digests of images); empty if nothing.
    pub fn child(&self, parent: BlockHash, tokens: &[u32], extra: &[u8]) -> BlockHash {
        self.child_into(&mut Vec::new(), parent, tokens, extra)
    }

    fn child_into(
        &self,
        input: &mut Vec<u8>,
        parent: BlockHash,
        tokens: &[u32],
        extra: &[u8],
    ) -> BlockHash {
        input.clear();
        input.extend_from_slice(&parent.to_wire());
        input.extend(tokens.iter().flat_map(|token| token.to_le_bytes()));
        // A block has a fixed number of tokens, so what follows them is unambiguous.
        input.extend_from_slice(extra);
        BlockHash(xxh3_128_with_secret(input, &self.key.secret))
    }

    /// Hashes of all full blocks of a prompt without extras; the partly filled last block has none.
    pub fn chain(&self, tokens: &[u32], block_size: usize) -> Vec<BlockHash> {
        let mut parent = self.root;
        let mut input = Vec::with_capacity(BlockHash::WIRE_BYTES + 4 * block_size);
        tokens
            .chunks_exact(block_size)
            .map(|block| {
                parent = self.child_into(&mut input, parent, block, &[]);
                parent
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn hasher(key: u8, identity: &str, salt: &str) -> BlockHasher {
        BlockHasher::new(&HashKey::from_bytes(&[key; 32]), identity, salt)
    }

    #[test]
    fn identity_salt_and_key_each_change_every_hash() {
        let tokens: Vec<u32> = (0..64).collect();
        let chains = [
            hasher(1, "a", "").chain(&tokens, 16),
            hasher(2, "a", "").chain(&tokens, 16),
            hasher(1, "b", "").chain(&tokens, 16),
            hasher(1, "a", "s").chain(&tokens, 16),
            hasher(1, "", "as").chain(&tokens, 16),
        ];
        for (index, chain) in chains.iter().enumerate() {
            assert_eq!(chain.len(), 4);
            for other in &chains[index + 1..] {
                assert!(chain.iter().zip(other).all(|(left, right)| left != right));
            }
        }
    }

    #[test]
    fn extra_tells_equal_tokens_apart() {
        let hasher = hasher(1, "a", "");
        let block = [7; 16];
        assert_ne!(
            hasher.child(hasher.root(), &block, b"image 1"),
            hasher.child(hasher.root(), &block, b"image 2")
        );
    }

    #[test]
    fn a_key_file_with_anything_but_a_key_is_refused() {
        assert!(HashKey::from_hex(&format!(" {}\n", "0f".repeat(32))).is_ok());
        for text in [
            "",
            "abcd",
            &"0g".repeat(32),
            &"+f".repeat(32),
            &"0f".repeat(33),
            &"é".repeat(32),
        ] {
            assert_eq!(HashKey::from_hex(text), Err(MalformedKey), "{text:?}");
        }
    }

    proptest! {
        #[test]
        fn a_change_shows_from_its_block_on(tokens in prop::collection::vec(any::<u32>(), 1..200), at in any::<prop::sample::Index>()) {
            let hasher = hasher(1, "a", "");
            let before = hasher.chain(&tokens, 16);
            let mut changed = tokens.clone();
            let at = at.index(changed.len());
            changed[at] ^= 1;
            let after = hasher.chain(&changed, 16);
            prop_assert_eq!(before.len(), tokens.len() / 16);
            for block in 0..before.len() {
                prop_assert_eq!(before[block] == after[block], block < at / 16);
            }
        }

        #[test]
        fn packing_round_trips(hashes in prop::collection::vec(any::<u128>(), 0..50)) {
            let hashes: Vec<_> = hashes.into_iter().map(BlockHash).collect();
            let packed = BlockHash::pack(&hashes);
            prop_assert_eq!(BlockHash::unpack(&packed), Ok(hashes));
            if !packed.is_empty() {
                prop_assert!(BlockHash::unpack(&packed[1..]).is_err());
            }
        }
    }
}
