//! Files that go beside bytes over a Unix socket.

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use tokio::io::Interest;
use tokio::net::UnixStream;
use tokio::time::timeout;

/// Sends `file` beside the first of `bytes`, and returns how many of them went.
///
/// # Errors
/// What the system says; `TimedOut` when the other side took nothing for that long.
pub(crate) async fn send(
    stream: &UnixStream,
    bytes: &[u8],
    file: BorrowedFd<'_>,
    patience: Duration,
) -> io::Result<usize> {
    let send = stream.async_io(Interest::WRITABLE, || {
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut beside = SendAncillaryBuffer::new(&mut space);
        let files = [file];
        if !beside.push(SendAncillaryMessage::ScmRights(&files)) {
            return Err(io::ErrorKind::OutOfMemory.into());
        }
        let sent = sendmsg(
            stream,
            &[IoSlice::new(bytes)],
            &mut beside,
            SendFlags::NOSIGNAL,
        )?;
        Ok(sent)
    });
    timeout(patience, send)
        .await
        .map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?
}

/// What came, and the last file of those beside it.
///
/// # Errors
/// What the system says, `WouldBlock` when nothing has come.
pub(crate) fn receive(
    stream: BorrowedFd<'_>,
    piece: &mut [u8],
) -> io::Result<(usize, Option<OwnedFd>)> {
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut beside = RecvAncillaryBuffer::new(&mut space);
    let message = recvmsg(
        stream,
        &mut [IoSliceMut::new(piece)],
        &mut beside,
        RecvFlags::CMSG_CLOEXEC,
    )?;
    let mut file = None;
    for beside in beside.drain() {
        if let RecvAncillaryMessage::ScmRights(files) = beside {
            // Those before the last are closed.
            file = files.last();
        }
    }
    Ok((message.bytes, file))
}
