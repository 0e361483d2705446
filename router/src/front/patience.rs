//! A connection whose writes fail when the client does not take them: a reader that has stopped, or dribbles, must not hold a run.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep_until};

/// What a client takes at least, on average since its backlog began and after the patience has passed. Slower than any network that
/// a person would use, and above one that is meant to hold memory.
const LEAST_BYTES_PER_SECOND: u64 = 1024;

/// A stream with a bound on how long its peer may leave what is written.
#[derive(Debug)]
pub struct Patient<S> {
    inner: S,
    patience: Duration,
    backlog: Option<Backlog>,
}

/// Something could not be written at once. Ends when everything is.
#[derive(Debug)]
struct Backlog {
    since: Instant,
    written: u64,
    until: Pin<Box<Sleep>>,
}

impl<S> Patient<S> {
    pub fn new(inner: S, patience: Duration) -> Self {
        Self {
            inner,
            patience,
            backlog: None,
        }
    }

    /// What became of a write.
    fn written(
        &mut self,
        written: Poll<io::Result<usize>>,
        context: &mut Context<'_>,
    ) -> Poll<io::Result<usize>> {
        match written {
            Poll::Ready(Ok(bytes)) => {
                if let Some(backlog) = &mut self.backlog {
                    backlog.written += bytes as u64;
                }
                written
            }
            Poll::Ready(Err(_)) => written,
            Poll::Pending => {
                ready!(self.wait(context));
                Poll::Ready(Err(io::Error::new(
                    io::ErrorKind::TimedOut,
                    "the client does not read its answer",
                )))
            }
        }
    }

    /// Ready when the peer has had time enough.
    fn wait(&mut self, context: &mut Context<'_>) -> Poll<()> {
        let patience = self.patience;
        let backlog = self.backlog.get_or_insert_with(|| {
            let since = Instant::now();
            Backlog {
                since,
                written: 0,
                until: Box::pin(sleep_until(since + patience)),
            }
        });
        loop {
            ready!(backlog.until.as_mut().poll(context));
            let earned = Duration::from_secs(backlog.written / LEAST_BYTES_PER_SECOND);
            let until = backlog.since + patience + earned;
            if until <= Instant::now() {
                return Poll::Ready(());
            }
            backlog.until.as_mut().reset(until);
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Patient<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_read(context, into)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Patient<S> {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = Pin::new(&mut this.inner).poll_write(context, bytes);
        this.written(written, context)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = Pin::new(&mut this.inner).poll_write_vectored(context, pieces);
        this.written(written, context)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    /// Called when all has been written: the backlog is gone.
    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        ready!(Pin::new(&mut this.inner).poll_flush(context))?;
        this.backlog = None;
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().inner).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(10);

    /// A client's end, and the server's with room for 4 KiB on the way.
    fn ends() -> (DuplexStream, Patient<DuplexStream>) {
        let (client, server) = duplex(4096);
        (client, Patient::new(server, PATIENCE))
    }

    /// Writes `bytes`, as hyper does, until all is flushed.
    async fn send(server: &mut Patient<DuplexStream>, bytes: usize) -> io::Result<()> {
        server.write_all(&vec![7; bytes]).await?;
        server.flush().await
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_stops_reading_is_waited_for_as_long_as_said() {
        let (_client, mut server) = ends();
        let began = Instant::now();
        send(&mut server, 4096).await.unwrap();
        let error = send(&mut server, 1).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert_eq!(began.elapsed().as_secs(), PATIENCE.as_secs());
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_reader_is_served_and_one_that_dribbles_is_not() {
        for (bytes_per_second, served) in [(2048, true), (100, false)] {
            let (mut client, mut server) = ends();
            let reading = tokio::spawn(async move {
                let mut piece = vec![0; bytes_per_second];
                while client.read_exact(&mut piece).await.is_ok() {
                    tokio::time::sleep(Duration::from_secs(1)).await;
                }
            });
            let sent = send(&mut server, 200 << 10).await;
            assert_eq!(sent.is_ok(), served, "{bytes_per_second}: {sent:?}");
            drop(server);
            reading.await.unwrap();
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_reader_that_catches_up_has_all_its_time_again() {
        let (mut client, mut server) = ends();
        for _ in 0..5 {
            let mut sending = Box::pin(send(&mut server, 5000));
            let stalled = tokio::time::timeout(PATIENCE * 9 / 10, &mut sending).await;
            assert!(stalled.is_err(), "it waits for the client");
            let mut piece = vec![0; 5000];
            let (sent, read) = tokio::join!(sending, client.read_exact(&mut piece));
            sent.unwrap();
            read.unwrap();
        }
    }
}
