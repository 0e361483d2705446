//! Faults on purpose, for tests of whole processes: a source that lies about one block, as a broken link or a reused block would.
//!
//! `BATON_FAULT=flip-byte:N` flips one byte of the Nth block that this process sends (counted from 1), `reuse:N` shows another
//! generation after its bytes. The worker's own memory stays right. `BATON_FAULT=@FILE` takes what the file holds when the worker starts,
//! and nothing where that is empty: of one that is started again, a test chooses when. Never set it in production; the worker warns when
//! it has a fault.

use std::io;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use baton_protocol::header::BlockHeader;
use baton_protocol::ids::{Generation, LeaseId, TransferId};
use parking_lot::Mutex;
use thiserror::Error;
use tokio::sync::watch;

use super::BlockSource;
use crate::kv::lease::{Gone, Next};
use crate::kv::store::BlockId;

/// One fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// A byte of the Nth block sent is another.
    FlipByte(u64),
    /// The Nth block sent is another one when its bytes have been read.
    Reuse(u64),
}

/// Not a fault that can be made.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error(
    "BATON_FAULT: {0:?} is no fault: write flip-byte:N or reuse:N with N counted from 1, or @ and a file that has one"
)]
pub struct UnknownFault(String);

impl Fault {
    /// What the variable asks for.
    ///
    /// # Errors
    /// It, or what its file holds, is no fault; or the file cannot be read.
    pub fn of_variable(value: &str) -> Result<Option<Self>, UnknownFault> {
        let Some(file) = value.strip_prefix('@') else {
            return value.parse().map(Some);
        };
        let text = std::fs::read_to_string(file)
            .map_err(|error| UnknownFault(format!("{value}: {error}")))?;
        let text = text.trim();
        (!text.is_empty()).then(|| text.parse()).transpose()
    }
}

impl FromStr for Fault {
    type Err = UnknownFault;

    fn from_str(text: &str) -> Result<Self, UnknownFault> {
        let unknown = || UnknownFault(text.to_owned());
        let (kind, number) = text.split_once(':').ok_or_else(unknown)?;
        let number: u64 = number.parse().map_err(|_| unknown())?;
        match kind {
            "flip-byte" if number > 0 => Ok(Self::FlipByte(number)),
            "reuse" if number > 0 => Ok(Self::Reuse(number)),
            _ => Err(unknown()),
        }
    }
}

/// A source with a fault.
#[derive(Debug)]
pub struct FaultySource {
    inner: Arc<dyn BlockSource>,
    fault: Fault,
    sent: AtomicU64,
    // The block the fault hits, until its bytes are all read.
    hit: Mutex<Option<BlockId>>,
}

impl FaultySource {
    /// Serves what `inner` serves, but for the fault.
    pub fn new(inner: Arc<dyn BlockSource>, fault: Fault) -> Self {
        Self {
            inner,
            fault,
            sent: AtomicU64::new(0),
            hit: Mutex::new(None),
        }
    }
}

impl BlockSource for FaultySource {
    fn block_bytes(&self) -> usize {
        self.inner.block_bytes()
    }

    fn layout(&self) -> u64 {
        self.inner.layout()
    }

    fn watch(
        &self,
        lease: LeaseId,
        generation: Generation,
        transfer: &TransferId,
    ) -> Result<watch::Receiver<u64>, Gone> {
        self.inner.watch(lease, generation, transfer)
    }

    fn next(
        &self,
        lease: LeaseId,
        generation: Generation,
        transfer: &TransferId,
        index: u32,
    ) -> Next {
        self.inner.next(lease, generation, transfer, index)
    }

    fn header_before(&self, block: BlockId) -> BlockHeader {
        let sent = self.sent.fetch_add(1, Ordering::SeqCst) + 1;
        let (Fault::FlipByte(number) | Fault::Reuse(number)) = self.fault;
        if sent == number {
            *self.hit.lock() = Some(block);
        }
        self.inner.header_before(block)
    }

    fn header_after(&self, block: BlockId) -> BlockHeader {
        let mut header = self.inner.header_after(block);
        let mut hit = self.hit.lock();
        if *hit == Some(block) {
            *hit = None;
            if matches!(self.fault, Fault::Reuse(_)) {
                header.generation.0 += 1;
            }
        }
        header
    }

    fn bytes(
        &self,
        block: BlockId,
        read: &mut dyn FnMut(&[u8]) -> io::Result<usize>,
    ) -> io::Result<usize> {
        let flip = matches!(self.fault, Fault::FlipByte(_)) && *self.hit.lock() == Some(block);
        if !flip {
            return self.inner.bytes(block, read);
        }
        self.inner.bytes(block, &mut |bytes| {
            let mut flipped = bytes.to_vec();
            if let Some(byte) = flipped.last_mut() {
                *byte ^= 1;
            }
            read(&flipped)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_is_read_or_refused_by_name() {
        assert_eq!("flip-byte:3".parse(), Ok(Fault::FlipByte(3)));
        assert_eq!("reuse:1".parse(), Ok(Fault::Reuse(1)));
        for text in ["", "flip-byte", "flip-byte:0", "flip-byte:x", "melt:1"] {
            let error = text.parse::<Fault>().expect_err(text);
            assert!(error.to_string().contains("flip-byte:N"), "{error}");
        }
    }

    #[test]
    fn a_file_says_which_fault_a_start_has() -> io::Result<()> {
        let folder = tempfile::tempdir()?;
        let file = folder.path().join("fault");
        let value = format!("@{}", file.display());
        let missing = Fault::of_variable(&value).expect_err("no file");
        assert!(missing.to_string().contains(&value), "{missing}");
        for (text, fault) in [
            ("", Ok(None)),
            ("\n", Ok(None)),
            ("flip-byte:3\n", Ok(Some(Fault::FlipByte(3)))),
            ("melt:1", Err(UnknownFault("melt:1".to_owned()))),
        ] {
            std::fs::write(&file, text)?;
            assert_eq!(Fault::of_variable(&value), fault, "{text:?}");
        }
        assert_eq!(Fault::of_variable("reuse:1"), Ok(Some(Fault::Reuse(1))));
        Ok(())
    }
}
