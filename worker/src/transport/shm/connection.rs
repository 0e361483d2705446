//! Frames over a Unix socket, and the file that may come with them.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use tokio::io::Interest;
use tokio::net::UnixStream;
use tokio::time::timeout;

use crate::transport::ancillary;
use crate::transport::tcp::frame::{Frame, PREAMBLE};

/// Bytes read at once: some forty frames. Whatever is read is kept until it is understood.
const READ: usize = 4096;
/// Written when it has grown to this: the reader begins while the source still looks for the next blocks.
const WRITE: usize = 4096;

/// One side's end. What is to be written is collected until [`Self::flush`].
#[derive(Debug)]
pub(super) struct Connection {
    stream: UnixStream,
    read: Vec<u8>,
    out: Vec<u8>,
    greeted: bool,
}

impl Connection {
    pub(super) fn new(stream: UnixStream) -> Self {
        Self {
            stream,
            read: Vec::with_capacity(READ),
            out: PREAMBLE.to_vec(),
            greeted: false,
        }
    }

    /// Whose process the other one is.
    pub(super) fn user(&self) -> io::Result<u32> {
        Ok(self.stream.peer_cred()?.uid())
    }

    pub(super) fn write(&mut self, frame: &Frame) {
        frame.encode(&mut self.out);
    }

    /// Is it time to flush?
    pub(super) fn is_full(&self) -> bool {
        self.out.len() >= WRITE
    }

    pub(super) async fn flush(&mut self, patience: Duration) -> io::Result<()> {
        let mut written = 0;
        while written < self.out.len() {
            match self.stream.try_write(&self.out[written..]) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(taken) => written += taken,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    timeout(patience, self.stream.writable())
                        .await
                        .map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??;
                }
                Err(error) => return Err(error),
            }
        }
        self.out.clear();
        Ok(())
    }

    /// As [`Self::flush`], with `file` beside the first byte.
    pub(super) async fn flush_with(
        &mut self,
        file: BorrowedFd<'_>,
        patience: Duration,
    ) -> io::Result<()> {
        let sent = ancillary::send(&self.stream, &self.out, file, patience).await?;
        self.out.drain(..sent);
        self.flush(patience).await
    }

    /// The next frame; `None` when the other side has closed between two.
    pub(super) async fn frame(&mut self) -> io::Result<Option<Frame>> {
        loop {
            if let Some(frame) = self.decode()? {
                return Ok(Some(frame));
            }
            self.stream.readable().await?;
            let mut piece = [0; READ];
            match self.stream.try_read(&mut piece) {
                Ok(0) if self.read.is_empty() => return Ok(None),
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(read) => self.read.extend_from_slice(&piece[..read]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// As [`Self::frame`] for the first frame of an answer, which may bring a file.
    pub(super) async fn frame_and_file(&mut self) -> io::Result<Option<(Frame, Option<OwnedFd>)>> {
        let mut file = None;
        loop {
            if let Some(frame) = self.decode()? {
                return Ok(Some((frame, file)));
            }
            let stream = &self.stream;
            let mut piece = [0; READ];
            let (read, came) = stream
                .async_io(Interest::READABLE, || {
                    ancillary::receive(stream.as_fd(), &mut piece)
                })
                .await?;
            if read == 0 {
                return match self.read.is_empty() {
                    true => Ok(None),
                    false => Err(io::ErrorKind::UnexpectedEof.into()),
                };
            }
            self.read.extend_from_slice(&piece[..read]);
            file = came.or(file);
        }
    }

    /// Says that nothing more comes from here, and waits until the other side has closed, whatever it says meanwhile.
    pub(super) async fn until_closed(&self) {
        // A socket that cannot be shut down is closed already.
        let _ = rustix::net::shutdown(&self.stream, rustix::net::Shutdown::Write);
        loop {
            if self.stream.readable().await.is_err() {
                return;
            }
            match self.stream.try_read(&mut [0; READ]) {
                Ok(0) => return,
                Err(error) if error.kind() != io::ErrorKind::WouldBlock => return,
                _ => {}
            }
        }
    }

    fn decode(&mut self) -> io::Result<Option<Frame>> {
        if !self.greeted {
            let begun = self.read.len().min(PREAMBLE.len());
            if self.read[..begun] != PREAMBLE[..begun] {
                return Err(malformed(
                    "it does not speak this version of the KV transport",
                ));
            }
            if begun < PREAMBLE.len() {
                return Ok(None);
            }
            self.read.drain(..begun);
            self.greeted = true;
        }
        match Frame::decode(&self.read) {
            Ok(None) => Ok(None),
            Ok(Some((frame, used))) => {
                self.read.drain(..used);
                Ok(Some(frame))
            }
            Err(error) => Err(malformed(&error.to_string())),
        }
    }

    /// Whether it can serve another hand-off: the other side is there, and has said nothing since.
    pub(super) fn is_quiet(&self) -> bool {
        let silent = matches!(self.stream.try_read(&mut [0; 1]), Err(error) if error.kind() == io::ErrorKind::WouldBlock);
        silent && self.read.is_empty() && self.out.is_empty()
    }
}

/// An error for words that make no sense.
pub(super) fn malformed(message: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, message)
}
