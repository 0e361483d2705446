//! Frames of the transports over sockets: pure encoding and decoding, little-endian, control frames of bounded length.
//!
//! A connection starts with [`PREAMBLE`] from both sides. The reader sends `Open`; the source answers `Accepted`, then for each
//! block `Block`, the block's bytes (their number is known to both sides), `Tail`; `Alive` while there is nothing to send;
//! `Sealed` or `Ended` last. After `Sealed` the reader may open its next lease. A frame is its body's length (u32), its kind (u8) and
//! its body.
//!
//! Where the reader maps the source's memory, `Arena` goes before the first `Accepted`, with the file beside it; `Located` stands
//! for `Block`, bytes and `Tail`; and `Done` is the reader's word that it reads no more under the lease.

use baton_protocol::header::BlockHeader;
use baton_protocol::ids::{Generation, LeaseId, TransferId};
use thiserror::Error;

use crate::kv::lease::Gone;

/// Magic, version, zero: eight bytes that no HTTP client, gRPC client or other version sends.
pub(crate) const PREAMBLE: [u8; 8] = *b"BatonKV\x01";
/// Longest body of a frame in bytes: an `Open` with the longest transfer id has less.
pub(crate) const MAX_BODY: usize = 1024;
/// Longest transfer id in bytes.
pub(crate) const MAX_TRANSFER: usize = 768;
/// Length and kind.
const HEAD: usize = 5;
/// On the wire for "not sealed yet".
const UNSEALED: u32 = u32::MAX;

/// What the reader wants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Open {
    pub(crate) lease: LeaseId,
    pub(crate) generation: Generation,
    pub(crate) transfer: TransferId,
    pub(crate) first_block: u32,
    pub(crate) layout: u64,
    pub(crate) block_bytes: u64,
}

/// Why the source sends no more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Why {
    Gone(Gone),
    Layout,
    Busy,
    /// The reader's process is another user's.
    Forbidden,
}

/// A frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Frame {
    Open(Open),
    Accepted,
    Block {
        index: u32,
        sealed: Option<u32>,
        promised: BlockHeader,
        before: BlockHeader,
    },
    Tail {
        after: BlockHeader,
    },
    Sealed {
        end: u32,
    },
    Alive,
    Ended(Why),
    Arena {
        blocks: u32,
        block_bytes: u64,
    },
    Located {
        index: u32,
        sealed: Option<u32>,
        promised: BlockHeader,
        block: u32,
    },
    Done,
}

/// Bytes that are no frame.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub(crate) enum FrameError {
    #[error("a frame of {0} bytes is longer than {MAX_BODY}")]
    TooLong(u32),
    #[error("unknown frame kind {0}")]
    Kind(u8),
    #[error("a frame of kind {0} has a malformed body of {1} bytes")]
    Body(u8, usize),
}

impl Why {
    fn code(self) -> u8 {
        match self {
            Self::Forbidden => 0xfd,
            Self::Layout => 0xfe,
            Self::Busy => 0xff,
            Self::Gone(gone) => Gone::ALL
                .iter()
                .position(|candidate| *candidate == gone)
                .map_or(0, |position| position as u8),
        }
    }

    fn from_code(code: u8) -> Option<Self> {
        match code {
            0xfd => Some(Self::Forbidden),
            0xfe => Some(Self::Layout),
            0xff => Some(Self::Busy),
            _ => Gone::ALL.get(usize::from(code)).copied().map(Self::Gone),
        }
    }
}

impl Frame {
    fn kind(&self) -> u8 {
        match self {
            Self::Open(_) => 1,
            Self::Accepted => 2,
            Self::Block { .. } => 3,
            Self::Tail { .. } => 4,
            Self::Sealed { .. } => 5,
            Self::Alive => 6,
            Self::Ended(_) => 7,
            Self::Arena { .. } => 8,
            Self::Located { .. } => 9,
            Self::Done => 10,
        }
    }

    /// Appends the frame.
    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        let start = out.len();
        out.extend_from_slice(&[0; 4]);
        out.push(self.kind());
        match self {
            Self::Open(open) => {
                out.extend_from_slice(&open.lease.0);
                out.extend_from_slice(&open.generation.0.to_le_bytes());
                out.extend_from_slice(&open.first_block.to_le_bytes());
                out.extend_from_slice(&open.layout.to_le_bytes());
                out.extend_from_slice(&open.block_bytes.to_le_bytes());
                out.extend_from_slice(open.transfer.0.as_bytes());
            }
            Self::Accepted | Self::Alive | Self::Done => {}
            Self::Block {
                index,
                sealed,
                promised,
                before,
            } => {
                out.extend_from_slice(&index.to_le_bytes());
                out.extend_from_slice(&sealed.unwrap_or(UNSEALED).to_le_bytes());
                out.extend_from_slice(&promised.encode());
                out.extend_from_slice(&before.encode());
            }
            Self::Tail { after } => out.extend_from_slice(&after.encode()),
            Self::Sealed { end } => out.extend_from_slice(&end.to_le_bytes()),
            Self::Ended(why) => out.push(why.code()),
            Self::Arena {
                blocks,
                block_bytes,
            } => {
                out.extend_from_slice(&blocks.to_le_bytes());
                out.extend_from_slice(&block_bytes.to_le_bytes());
            }
            Self::Located {
                index,
                sealed,
                promised,
                block,
            } => {
                out.extend_from_slice(&index.to_le_bytes());
                out.extend_from_slice(&sealed.unwrap_or(UNSEALED).to_le_bytes());
                out.extend_from_slice(&promised.encode());
                out.extend_from_slice(&block.to_le_bytes());
            }
        }
        let length = (out.len() - start - HEAD) as u32;
        out[start..start + 4].copy_from_slice(&length.to_le_bytes());
    }

    /// Reads one frame from the front of `bytes`; `None` when more bytes are needed. Returns how many it took.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Option<(Self, usize)>, FrameError> {
        let Some((head, rest)) = bytes.split_first_chunk::<HEAD>() else {
            return Ok(None);
        };
        let length = u32::from_le_bytes([head[0], head[1], head[2], head[3]]);
        let kind = head[4];
        if length as usize > MAX_BODY {
            return Err(FrameError::TooLong(length));
        }
        if !(1..=10).contains(&kind) {
            return Err(FrameError::Kind(kind));
        }
        let Some(body) = rest.get(..length as usize) else {
            return Ok(None);
        };
        let frame = Self::body(kind, body).ok_or(FrameError::Body(kind, body.len()))?;
        Ok(Some((frame, HEAD + body.len())))
    }

    fn body(kind: u8, body: &[u8]) -> Option<Self> {
        let mut fields = Fields(body);
        let frame = match kind {
            1 => Self::Open(Open {
                lease: LeaseId(fields.take()?),
                generation: Generation(u64::from_le_bytes(fields.take()?)),
                first_block: u32::from_le_bytes(fields.take()?),
                layout: u64::from_le_bytes(fields.take()?),
                block_bytes: u64::from_le_bytes(fields.take()?),
                transfer: TransferId(fields.text(MAX_TRANSFER)?),
            }),
            2 => Self::Accepted,
            3 => Self::Block {
                index: u32::from_le_bytes(fields.take()?),
                sealed: fields.sealed()?,
                promised: BlockHeader::decode(&fields.take()?),
                before: BlockHeader::decode(&fields.take()?),
            },
            4 => Self::Tail {
                after: BlockHeader::decode(&fields.take()?),
            },
            5 => Self::Sealed {
                end: u32::from_le_bytes(fields.take()?),
            },
            6 => Self::Alive,
            7 => Self::Ended(Why::from_code(u8::from_le_bytes(fields.take()?))?),
            8 => Self::Arena {
                blocks: u32::from_le_bytes(fields.take()?),
                block_bytes: u64::from_le_bytes(fields.take()?),
            },
            9 => Self::Located {
                index: u32::from_le_bytes(fields.take()?),
                sealed: fields.sealed()?,
                promised: BlockHeader::decode(&fields.take()?),
                block: u32::from_le_bytes(fields.take()?),
            },
            10 => Self::Done,
            _ => return None,
        };
        fields.0.is_empty().then_some(frame)
    }
}

/// What [`recode`] made of bytes.
#[derive(Debug)]
pub struct Recoded {
    /// Frames read.
    pub frames: usize,
    /// Bytes that they took.
    pub taken: usize,
    /// The frames, written again.
    pub again: Vec<u8>,
    /// What is wrong with the bytes after them; nothing where more bytes are needed.
    pub error: Option<String>,
}

/// Reads as many frames as there are and writes them again: all that a fuzz target has to see of this module.
#[doc(hidden)]
pub fn recode(bytes: &[u8]) -> Recoded {
    let mut recoded = Recoded {
        frames: 0,
        taken: 0,
        again: Vec::new(),
        error: None,
    };
    while let Some(rest) = bytes.get(recoded.taken..) {
        match Frame::decode(rest) {
            Ok(Some((frame, taken))) => {
                frame.encode(&mut recoded.again);
                recoded.frames += 1;
                recoded.taken += taken;
            }
            Ok(None) => break,
            Err(error) => {
                recoded.error = Some(error.to_string());
                break;
            }
        }
    }
    recoded
}

struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (field, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*field)
    }

    fn sealed(&mut self) -> Option<Option<u32>> {
        let end = u32::from_le_bytes(self.take()?);
        Some((end != UNSEALED).then_some(end))
    }

    fn text(&mut self, limit: usize) -> Option<String> {
        let text = std::str::from_utf8(self.0).ok()?;
        if text.len() > limit {
            return None;
        }
        self.0 = &[];
        Some(text.to_owned())
    }
}

#[cfg(test)]
mod tests {
    use baton_protocol::hash::BlockHash;
    use proptest::prelude::*;

    use super::*;

    fn header() -> impl Strategy<Value = BlockHeader> {
        any::<(u128, u64, u64, u64, u32)>().prop_map(
            |(hash, generation, layout, checksum, fill)| BlockHeader {
                hash: BlockHash(hash),
                generation: Generation(generation),
                layout,
                checksum,
                fill,
            },
        )
    }

    fn frame() -> impl Strategy<Value = Frame> {
        let why = prop_oneof![
            Just(Why::Layout),
            Just(Why::Busy),
            Just(Why::Forbidden),
            prop::sample::select(Gone::ALL.to_vec()).prop_map(Why::Gone),
        ];
        let open = (
            any::<([u8; 16], u64, u32, u64, u64)>(),
            prop::collection::vec(any::<char>(), 0..190),
        )
            .prop_map(
                |((lease, generation, first_block, layout, block_bytes), transfer)| {
                    Frame::Open(Open {
                        lease: LeaseId(lease),
                        generation: Generation(generation),
                        transfer: TransferId(transfer.into_iter().collect()),
                        first_block,
                        layout,
                        block_bytes,
                    })
                },
            );
        prop_oneof![
            open,
            Just(Frame::Accepted),
            Just(Frame::Alive),
            (
                any::<u32>(),
                prop::option::of(0..UNSEALED),
                header(),
                header()
            )
                .prop_map(|(index, sealed, promised, before)| Frame::Block {
                    index,
                    sealed,
                    promised,
                    before
                }),
            header().prop_map(|after| Frame::Tail { after }),
            Just(Frame::Done),
            any::<(u32, u64)>().prop_map(|(blocks, block_bytes)| Frame::Arena {
                blocks,
                block_bytes
            }),
            (
                any::<u32>(),
                prop::option::of(0..UNSEALED),
                header(),
                any::<u32>()
            )
                .prop_map(|(index, sealed, promised, block)| Frame::Located {
                    index,
                    sealed,
                    promised,
                    block
                }),
            any::<u32>().prop_map(|end| Frame::Sealed { end }),
            why.prop_map(Frame::Ended),
        ]
    }

    proptest! {
        #[test]
        fn frames_round_trip_in_any_split(frames in prop::collection::vec(frame(), 1..6)) {
            let mut bytes = Vec::new();
            for frame in &frames {
                frame.encode(&mut bytes);
            }
            let mut at = 0;
            for frame in &frames {
                let (decoded, used) = Frame::decode(&bytes[at..]).unwrap().unwrap();
                prop_assert_eq!(&decoded, frame);
                for cut in 0..used {
                    prop_assert_eq!(Frame::decode(&bytes[at..at + cut]), Ok(None), "cut at {}", cut);
                }
                at += used;
            }
            prop_assert_eq!(at, bytes.len());
        }

        #[test]
        fn no_bytes_make_it_panic_or_ask_for_more_than_a_frame(mut bytes in prop::collection::vec(any::<u8>(), 0..1100), plausible: bool) {
            if plausible && bytes.len() >= 5 {
                bytes[1..4].fill(0);
                bytes[4] %= 11;
            }
            match Frame::decode(&bytes) {
                Ok(Some((frame, used))) => {
                    let mut again = Vec::new();
                    frame.encode(&mut again);
                    // Not byte for byte: a header has four spare bytes that nobody reads.
                    prop_assert_eq!(again.len(), used);
                    prop_assert_eq!(Frame::decode(&again), Ok(Some((frame, used))));
                }
                Ok(None) => prop_assert!(bytes.len() < HEAD + MAX_BODY),
                Err(_) => {}
            }
        }
    }

    #[test]
    fn a_length_beyond_the_limit_is_refused_before_the_body_comes() {
        let mut bytes = u32::MAX.to_le_bytes().to_vec();
        bytes.push(1);
        assert_eq!(Frame::decode(&bytes), Err(FrameError::TooLong(u32::MAX)));
    }
}
