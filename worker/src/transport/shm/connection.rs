//! Frames over a Unix socket, and the file that may come with them.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};
use tokio::io::Interest;
use tokio::net::UnixStream;
use tokio::time::timeout;

use crate::transport::ancillary;
use crate::transport::tcp::frame::{Frame, PREAMBLE};

/// Bytes read at once: some sixty frames. Whatever is read is kept until it is understood.
const READ: usize = 4096;
/// Looks for an answer before its reader goes to sleep, each a system call or two. Together they take about as long as a source
/// that sleeps needs to be woken and to answer; being woken in turn takes the reader as long as the copy of half a megabyte.
const LOOKS: usize = 128;

/// One side's end. What is to be written is collected until [`Self::flush`].
#[derive(Debug)]
pub(super) struct Connection {
    stream: UnixStream,
    read: Vec<u8>,
    /// So much of it is understood.
    taken: usize,
    out: Vec<u8>,
    greeted: bool,
}

impl Connection {
    pub(super) fn new(stream: UnixStream) -> Self {
        Self {
            stream,
            read: Vec::with_capacity(READ),
            taken: 0,
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

    /// Reads what the other side says within a few looks, without going to sleep; others get their turn between them. Whatever is
    /// not seen now, also that it has closed, is seen by the next [`Self::frame`].
    pub(super) async fn listen(&mut self) {
        let mut piece = [0; READ];
        for _ in 0..LOOKS {
            // Not through the runtime: it may be another thread of it, asleep, that hears of this socket.
            match recv(&self.stream, &mut piece, RecvFlags::DONTWAIT) {
                Ok((read, _)) => return self.heard(&piece[..read]),
                Err(Errno::AGAIN) => tokio::task::yield_now().await,
                Err(_) => return,
            }
        }
    }

    fn heard(&mut self, bytes: &[u8]) {
        self.read.drain(..self.taken);
        self.taken = 0;
        self.read.extend_from_slice(bytes);
    }

    /// The next frame; `None` when the other side has closed between two.
    pub(super) async fn frame(&mut self) -> io::Result<Option<Frame>> {
        loop {
            if let Some(frame) = self.ready()? {
                return Ok(Some(frame));
            }
            self.stream.readable().await?;
            let mut piece = [0; READ];
            match self.stream.try_read(&mut piece) {
                Ok(0) if self.taken == self.read.len() => return Ok(None),
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(read) => self.heard(&piece[..read]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// As [`Self::frame`] for the first frame of an answer, which may bring a file.
    pub(super) async fn frame_and_file(&mut self) -> io::Result<Option<(Frame, Option<OwnedFd>)>> {
        let mut file = None;
        loop {
            if let Some(frame) = self.ready()? {
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
                return match self.taken == self.read.len() {
                    true => Ok(None),
                    false => Err(io::ErrorKind::UnexpectedEof.into()),
                };
            }
            self.heard(&piece[..read]);
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

    /// The next frame of what has been read already.
    pub(super) fn ready(&mut self) -> io::Result<Option<Frame>> {
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
            self.taken = begun;
            self.greeted = true;
        }
        match Frame::decode(&self.read[self.taken..]) {
            Ok(None) => Ok(None),
            Ok(Some((frame, used))) => {
                self.taken += used;
                Ok(Some(frame))
            }
            Err(error) => Err(malformed(&error.to_string())),
        }
    }

    /// Whether it can serve another hand-off: the other side is there, and has said nothing since.
    pub(super) fn is_quiet(&self) -> bool {
        let silent = matches!(self.stream.try_read(&mut [0; 1]), Err(error) if error.kind() == io::ErrorKind::WouldBlock);
        silent && self.taken == self.read.len() && self.out.is_empty()
    }
}

/// An error for words that make no sense.
pub(super) fn malformed(message: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, message)
}
