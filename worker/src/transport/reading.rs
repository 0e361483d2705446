//! What readers over sockets share: the order in which blocks and the seal may come, and what a source's words mean to its reader.

use std::io;
use std::time::Duration;

use super::tcp::frame::{MAX_TRANSFER, Open, Why};
use super::{BlockSink, End, FetchRequest, Obstacle, TransportError};

/// A source, as errors name it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Source<'a> {
    pub(super) address: &'a str,
}

impl Source<'_> {
    pub(super) fn lost(self, cause: io::Error) -> TransportError {
        TransportError::Lost {
            address: self.address.to_owned(),
            cause,
        }
    }

    /// It closed in the middle.
    pub(super) fn closed(self) -> TransportError {
        self.lost(io::ErrorKind::UnexpectedEof.into())
    }

    pub(super) fn silent(self, waited: Duration) -> TransportError {
        TransportError::Silent {
            address: self.address.to_owned(),
            milliseconds: u64::try_from(waited.as_millis()).unwrap_or(u64::MAX),
        }
    }

    pub(super) fn protocol(self, message: &str) -> TransportError {
        TransportError::Protocol {
            address: self.address.to_owned(),
            message: message.to_owned(),
        }
    }

    /// It serves no more, and says why.
    pub(super) fn ended(self, why: Why) -> TransportError {
        let address = self.address.to_owned();
        match why {
            Why::Gone(gone) => TransportError::Gone(gone),
            Why::Layout => TransportError::Layout { address },
            Why::Busy => TransportError::Busy { address },
            Why::Forbidden => TransportError::Unusable {
                address,
                obstacle: Obstacle::Credentials,
                message: "it serves its own user only".to_owned(),
            },
        }
    }
}

/// The words that ask for what is wanted.
///
/// # Errors
/// The transfer's id is too long to be said.
pub(super) fn open(request: &FetchRequest) -> Result<Open, TransportError> {
    if request.transfer.0.len() > MAX_TRANSFER {
        let source = Source {
            address: &request.address,
        };
        let message = format!("the transfer id is longer than {MAX_TRANSFER} bytes");
        return Err(source.protocol(&message));
    }
    Ok(Open {
        lease: request.lease,
        generation: request.generation,
        transfer: request.transfer.clone(),
        first_block: request.first_block,
        layout: request.layout,
        block_bytes: request.block_bytes as u64,
    })
}

/// Blocks come one after the other, and the end is said once.
#[derive(Clone, Copy, Debug)]
pub(super) struct Order {
    next: u32,
    end: Option<u32>,
}

impl Order {
    pub(super) fn new(first: u32) -> Self {
        Self {
            next: first,
            end: None,
        }
    }

    /// A block comes, with the end if the source knows it.
    ///
    /// # Errors
    /// Another one is next, or the end was another.
    pub(super) fn block(
        &mut self,
        index: u32,
        sealed: Option<u32>,
        sink: &mut dyn BlockSink,
    ) -> Result<(), &'static str> {
        if index != self.next || sealed.is_some_and(|end| !self.ends_at(end, sink)) {
            return Err("its blocks are out of order");
        }
        self.next += 1;
        Ok(())
    }

    /// The last block has come. A source may have fewer blocks than its reader starts from, never one that did not come.
    ///
    /// # Errors
    /// Blocks are missing, or the end was another.
    pub(super) fn sealed(
        &mut self,
        end: u32,
        sink: &mut dyn BlockSink,
    ) -> Result<End, &'static str> {
        if end > self.next || !self.ends_at(end, sink) {
            return Err("its end does not fit the blocks that came");
        }
        Ok(End { end })
    }

    fn ends_at(&mut self, end: u32, sink: &mut dyn BlockSink) -> bool {
        if self.end.is_none() {
            sink.sealed(end);
        }
        *self.end.get_or_insert(end) == end
    }
}
