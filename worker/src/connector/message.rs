//! What is said between the daemon and an engine's plug-in: frames of a length (4 bytes, little endian) and that many of JSON.
//!
//! The other half is `baton_vllm/wire.py`. Pure.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use thiserror::Error;

/// Of the protocol. Another one is refused in words.
pub const VERSION: u32 = 1;
/// Bytes of a frame's body: a prompt of a million tokens takes half of it.
pub const LONGEST_FRAME: usize = 16 << 20;

const LENGTH: usize = size_of::<u32>();

/// What an engine's blocks look like.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Layout {
    /// Tokens in a block.
    pub block_size: usize,
    /// Bytes of a block over all layers.
    pub block_bytes: usize,
    /// SHA-256 of all that two ends must have in common, in hexadecimal digits. Goes into the card.
    pub digest: String,
}

/// Which half of the plug-in speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Half {
    /// In the engine's scheduler: which prompts are handed over.
    Scheduler,
    /// In the engine's worker: the blocks.
    Worker,
}

/// The first message of a connection. That of the worker's half brings the file of its inbox.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Hello {
    /// Of the protocol.
    pub version: u32,
    /// Who speaks.
    pub role: Half,
    /// The same for both halves of one engine.
    pub engine: String,
    /// Of the worker's half.
    pub layout: Option<Layout>,
    /// Of the worker's half.
    pub inbox_pieces: Option<u32>,
}

/// From an engine. `request` is the engine's own id of a request, never reused.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(
    tag = "type",
    rename_all = "camelCase",
    rename_all_fields = "camelCase"
)]
pub enum FromEngine {
    /// See [`Hello`].
    Hello(Hello),
    /// A prompt will be computed here and read elsewhere. Answered. `operation` is the router's id of it, which plug-ins of earlier
    /// releases do not give.
    Open {
        request: String,
        tokens: Vec<u32>,
        salt: String,
        operation: Option<String>,
    },
    /// Block `index` of its prompt lies in piece `piece` of the inbox. Answered with [`ToEngine::Taken`] when it does not any more.
    Publish {
        request: String,
        index: u32,
        piece: u32,
    },
    /// All blocks of its prompt have been published.
    Seal { request: String },
    /// A prompt was computed elsewhere.
    Take {
        request: String,
        tokens: Vec<u32>,
        salt: String,
        descriptor: Value,
    },
    /// The engine has blocks for it. Answered when its KV is proven, or will not be.
    Collect { request: String },
    /// The engine has copied what it was told of.
    Copied { request: String },
    /// Nobody needs it any more.
    Cancel { request: String },
    /// The engine has cleared its cache, as when its weights change: what it computed or took before is of no use to anybody.
    Reset,
}

/// To an engine.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(
    tag = "type",
    rename_all = "camelCase",
    rename_all_fields = "camelCase"
)]
pub enum ToEngine {
    /// The connection is served. To the worker's half the file of the pool's arena goes with it.
    Welcome { arena_pieces: u32 },
    /// Without `request` the connection is not served and closes.
    Refused {
        #[serde(skip_serializing_if = "Option::is_none")]
        request: Option<String>,
        why: String,
    },
    /// Blocks from `first_block` on are to be published; those before are there.
    Opened {
        request: String,
        first_block: u32,
        descriptor: Value,
    },
    /// The piece of the inbox may be filled again.
    Taken { piece: u32 },
    /// The blocks of the prompt from `first_block` on are proven and lie in these pieces of the arena until [`FromEngine::Copied`].
    Loaded {
        request: String,
        first_block: u32,
        pieces: Vec<u32>,
    },
    /// Its KV will not come.
    Failed { request: String, why: String },
    /// Theirs is still on its way: the engine may go on waiting. Said every so often (`COMING` in `taking`).
    Coming { requests: Vec<String> },
}

/// Bytes that are no frame of this protocol.
#[derive(Debug, Error)]
pub enum Malformed {
    /// Longer than is read.
    #[error("a frame of {0} bytes, it has at most {LONGEST_FRAME}")]
    Long(usize),
    /// Not a message.
    #[error("no message: {0}")]
    Message(#[from] serde_json::Error),
}

/// Appends one frame.
///
/// # Errors
/// [`Malformed::Long`] for a message that the other end would not read.
pub fn encode(message: &ToEngine, out: &mut Vec<u8>) -> Result<(), Malformed> {
    let body = serde_json::to_vec(message)?;
    if body.len() > LONGEST_FRAME {
        return Err(Malformed::Long(body.len()));
    }
    out.extend_from_slice(&(body.len() as u32).to_le_bytes());
    out.extend_from_slice(&body);
    Ok(())
}

/// The message at the begin of `bytes` and the bytes that it takes. `None` while it is not whole.
///
/// # Errors
/// [`Malformed`]: nothing that follows can be understood.
pub fn decode(bytes: &[u8]) -> Result<Option<(FromEngine, usize)>, Malformed> {
    let Some((length, rest)) = bytes.split_first_chunk::<LENGTH>() else {
        return Ok(None);
    };
    let length = u32::from_le_bytes(*length) as usize;
    if length > LONGEST_FRAME {
        return Err(Malformed::Long(length));
    }
    let Some(body) = rest.get(..length) else {
        return Ok(None);
    };
    Ok(Some((serde_json::from_slice(body)?, LENGTH + length)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(body: &str) -> Vec<u8> {
        let mut bytes = (body.len() as u32).to_le_bytes().to_vec();
        bytes.extend_from_slice(body.as_bytes());
        bytes
    }

    #[test]
    fn what_the_plug_in_writes_is_read() {
        let bytes = frame(r#"{"type":"publish","request":"r-1","index":3,"piece":7}"#);
        for end in 0..bytes.len() {
            assert!(matches!(decode(&bytes[..end]), Ok(None)), "{end} bytes");
        }
        let (message, used) = decode(&bytes).expect("a frame").expect("whole");
        let published = FromEngine::Publish {
            request: "r-1".to_owned(),
            index: 3,
            piece: 7,
        };
        assert_eq!((message, used), (published, bytes.len()));
        let (message, _) = decode(&frame(r#"{"type":"reset"}"#))
            .expect("a frame")
            .expect("whole");
        assert_eq!(message, FromEngine::Reset);
        let opened = |more: &str| {
            let body = format!(r#"{{"type":"open","request":"r","tokens":[1],"salt":"s"{more}}}"#);
            decode(&frame(&body)).expect("a frame").expect("whole").0
        };
        for (more, operation) in [
            ("", None),
            (r#","operation":"o-01""#, Some("o-01".to_owned())),
        ] {
            let open = FromEngine::Open {
                request: "r".to_owned(),
                tokens: vec![1],
                salt: "s".to_owned(),
                operation,
            };
            assert_eq!(opened(more), open, "{more}");
        }
        let hello = frame(
            r#"{"type":"hello","version":1,"role":"worker","engine":"e","vllm":"0.32.0","inboxPieces":4,
                "layout":{"blockSize":32,"blockBytes":65536,"digest":"d","description":{}}}"#,
        );
        let Ok(Some((FromEngine::Hello(hello), _))) = decode(&hello) else {
            panic!("no hello");
        };
        assert_eq!((hello.role, hello.inbox_pieces), (Half::Worker, Some(4)));
        assert_eq!(hello.layout.expect("of a worker").block_bytes, 65536);
    }

    #[test]
    fn what_the_plug_in_reads_is_written() {
        let mut out = Vec::new();
        let loaded = ToEngine::Loaded {
            request: "r".to_owned(),
            first_block: 1,
            pieces: vec![5],
        };
        encode(&loaded, &mut out).expect("short");
        let body = r#"{"type":"loaded","request":"r","firstBlock":1,"pieces":[5]}"#;
        assert_eq!(out, frame(body));
        out.clear();
        let requests = vec!["r".to_owned()];
        encode(&ToEngine::Coming { requests }, &mut out).expect("short");
        assert_eq!(out, frame(r#"{"type":"coming","requests":["r"]}"#));
    }

    #[test]
    fn a_length_that_cannot_be_is_not_waited_for() {
        let error = decode(&[255; 8]).expect_err("4 GiB");
        assert!(error.to_string().contains("4294967295"), "{error}");
        assert!(decode(&frame(r#"{"type":"melt"}"#)).is_err());
        assert!(decode(&frame("[]")).is_err());
    }
}
