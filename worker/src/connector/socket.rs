//! The socket that engines connect to, and what is read from and written to a connection.

use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::process::geteuid;
use tokio::io::Interest;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::mpsc;
use tokio::time::timeout;

use super::message::{
    FromEngine, Half, Hello, Layout, Malformed, ToEngine, VERSION, decode, encode,
};
use super::{Service, session};
use crate::transport::ancillary;

/// From the connection to its first message, and for what is written to it to be taken.
const PATIENCE: Duration = Duration::from_secs(5);
/// Bytes read at once.
const READ: usize = 1 << 16;
/// Messages to a plug-in that wait to be written: it reads them on a thread of its own, between copies.
const OUT: usize = 4096;

/// The socket. Its file goes with it.
#[derive(Debug)]
pub struct Listener {
    listener: UnixListener,
    path: PathBuf,
}

impl Listener {
    /// Listens at `path`: for this user only in a folder of its own, for all that reach the folder where it is another's, as a volume
    /// is that containers of one pod share. A socket that an earlier process left there is removed.
    ///
    /// # Errors
    /// What the system says; anything but a socket at `path` is left alone.
    pub fn bind(path: &Path) -> io::Result<Self> {
        match fs::symlink_metadata(path) {
            Ok(found) if found.file_type().is_socket() => fs::remove_file(path)?,
            Ok(_) => return Err(io::ErrorKind::AlreadyExists.into()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
        let listener = UnixListener::bind(path)?;
        let folder = path.parent().map(fs::metadata).transpose()?;
        let own = folder.is_some_and(|folder| folder.uid() == geteuid().as_raw());
        let mode = if own { 0o600 } else { 0o666 };
        fs::set_permissions(path, fs::Permissions::from_mode(mode))?;
        Ok(Self {
            listener,
            path: path.to_owned(),
        })
    }

    /// What the blocks of the engine look like, once one has connected. Engines are told to ask again until then.
    ///
    /// # Errors
    /// What the system says of the socket.
    pub async fn layout(&self) -> io::Result<Layout> {
        loop {
            let mut caller = self.accept().await?;
            let greeted = timeout(PATIENCE, caller.hello()).await;
            let Ok(Ok((hello, _))) = greeted else {
                continue;
            };
            // It asks again either way.
            let why = "the daemon is about to start: ask again";
            let _ = caller.refuse(why.to_owned()).await;
            if let (VERSION, Half::Worker, Some(layout)) = (hello.version, hello.role, hello.layout)
            {
                return Ok(layout);
            }
        }
    }

    /// Serves one engine after the other until the service is stopped.
    pub async fn serve(&self, service: Service) {
        session::serve(self, service).await;
    }

    pub(super) async fn accept(&self) -> io::Result<Caller> {
        let (stream, _) = self.listener.accept().await?;
        Ok(Caller {
            stream,
            read: Vec::new(),
        })
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        // Whoever removed it first has done what is done here.
        let _ = fs::remove_file(&self.path);
    }
}

/// A connection that is not served yet.
#[derive(Debug)]
pub(super) struct Caller {
    stream: UnixStream,
    read: Vec<u8>,
}

impl Caller {
    /// Its first message, and the file beside it.
    pub(super) async fn hello(&mut self) -> io::Result<(Hello, Option<OwnedFd>)> {
        let mut file = None;
        loop {
            if let Some((message, used)) = decode(&self.read).map_err(malformed)? {
                self.read.drain(..used);
                let FromEngine::Hello(hello) = message else {
                    let message = "a connection begins with hello";
                    return Err(io::Error::new(io::ErrorKind::InvalidData, message));
                };
                return Ok((hello, file));
            }
            let mut piece = vec![0; READ];
            let stream = &self.stream;
            let (read, came) = stream
                .async_io(Interest::READABLE, || {
                    ancillary::receive(stream.as_fd(), &mut piece)
                })
                .await?;
            if read == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            self.read.extend_from_slice(&piece[..read]);
            file = came.or(file);
        }
    }

    /// As [`Self::hello`], with a deadline.
    pub(super) async fn greeted(mut self) -> Option<(Self, Hello, Option<OwnedFd>)> {
        let (hello, file) = timeout(PATIENCE, self.hello()).await.ok()?.ok()?;
        Some((self, hello, file))
    }

    /// Says why it is not served, and closes.
    pub(super) async fn refuse(mut self, why: String) -> io::Result<()> {
        let mut out = Vec::new();
        let refused = ToEngine::Refused { request: None, why };
        encode(&refused, &mut out).map_err(malformed)?;
        timeout(PATIENCE, self.stream.write_all(&out)).await?
    }

    /// Welcomes it, with `file`. Takes as long as it lets what is written lie, at most twice [`PATIENCE`].
    pub(super) async fn welcome(
        mut self,
        arena_pieces: u32,
        file: Option<BorrowedFd<'_>>,
    ) -> io::Result<Self> {
        let mut out = Vec::new();
        encode(&ToEngine::Welcome { arena_pieces }, &mut out).map_err(malformed)?;
        if let Some(file) = file {
            let sent = ancillary::send(&self.stream, &out, file, PATIENCE).await?;
            out.drain(..sent);
        }
        timeout(PATIENCE, self.stream.write_all(&out)).await??;
        Ok(self)
    }

    /// Serves it, once it is welcome: messages go to `heard` until it closes. Dropping [`Peer::out`] closes it from here.
    pub(super) fn serve<E: Send + 'static>(
        self,
        heard: mpsc::Sender<E>,
        event: impl Fn(Option<FromEngine>) -> E + Send + Sync + 'static,
    ) -> Peer {
        let (reading, writing) = self.stream.into_split();
        let (out, queued) = mpsc::channel(OUT);
        let writer = tokio::spawn(write(writing, queued));
        let read = self.read;
        let reader = tokio::spawn(async move {
            if let Err(error) = listen(reading, read, &heard, &event).await {
                tracing::warn!(%error, "an engine's connection has failed");
            }
            // Nobody hears it only when everything ends.
            let _ = heard.send(event(None)).await;
            writer.abort();
        });
        Peer { out, reader }
    }
}

/// A connection that is served.
#[derive(Debug)]
pub(super) struct Peer {
    out: mpsc::Sender<ToEngine>,
    reader: tokio::task::JoinHandle<()>,
}

impl Peer {
    /// Queues a message. False when it does not read any more.
    pub(super) fn say(&self, message: ToEngine) -> bool {
        self.out.try_send(message).is_ok()
    }

    /// Queues a message that may be left out: it is, where it would have to wait. False when it does not read any more.
    pub(super) fn advise(&self, message: ToEngine) -> bool {
        let queued = self.out.try_send(message);
        !matches!(queued, Err(mpsc::error::TrySendError::Closed(_)))
    }

    /// Closes this end, and waits until the other one is closed: what it was doing then is over.
    pub(super) async fn closed(self) {
        let Self { out, reader } = self;
        drop(out);
        // A reader that has panicked has closed its half.
        let _ = reader.await;
    }
}

async fn listen<E>(
    mut reading: OwnedReadHalf,
    mut read: Vec<u8>,
    heard: &mpsc::Sender<E>,
    event: &impl Fn(Option<FromEngine>) -> E,
) -> io::Result<()> {
    loop {
        let mut begin = 0;
        while let Some((message, used)) = decode(&read[begin..]).map_err(malformed)? {
            begin += used;
            if heard.send(event(Some(message))).await.is_err() {
                return Ok(());
            }
        }
        read.drain(..begin);
        read.reserve(READ);
        if reading.read_buf(&mut read).await? == 0 {
            return Ok(());
        }
    }
}

async fn write(mut writing: OwnedWriteHalf, mut queued: mpsc::Receiver<ToEngine>) {
    let mut out = Vec::new();
    while let Some(message) = queued.recv().await {
        out.clear();
        let encoded = encode(&message, &mut out).map_err(malformed);
        let written = match encoded {
            Ok(()) => timeout(PATIENCE, writing.write_all(&out)).await,
            Err(error) => Ok(Err(error)),
        };
        if !matches!(written, Ok(Ok(()))) {
            tracing::warn!("an engine does not read what it is told: its connection is closed");
            return;
        }
    }
}

fn malformed(error: Malformed) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}
