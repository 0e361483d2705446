//! A request whose body is sent piece by piece, while its answer is read.

use std::net::SocketAddr;

use anyhow::{Context, Result};
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::net::tcp::OwnedWriteHalf;
use tokio_util::task::AbortOnDropHandle;

use super::SOON;

/// The answer is read from the first: a router that has heard enough may close the connection under what is still sent.
#[derive(Debug)]
pub(crate) struct Sending {
    write: OwnedWriteHalf,
    answer: AbortOnDropHandle<Vec<u8>>,
}

impl Sending {
    /// Sends the head; `framing` is the field that says how long the body is.
    ///
    /// # Errors
    /// No connection.
    pub(crate) async fn begin(router: SocketAddr, framing: &str) -> Result<Self> {
        let (mut read, mut write) = TcpStream::connect(router).await?.into_split();
        let head = format!(
            "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{framing}\r\n\r\n"
        );
        write.write_all(head.as_bytes()).await?;
        let answer = tokio::spawn(async move {
            let mut answer = Vec::new();
            // What came before a reset counts.
            let _ = read.read_to_end(&mut answer).await;
            answer
        });
        Ok(Self {
            write,
            answer: AbortOnDropHandle::new(answer),
        })
    }

    /// False: the router takes no more.
    pub(crate) async fn send(&mut self, bytes: &[u8]) -> bool {
        self.write.write_all(bytes).await.is_ok()
    }

    /// Whether the connection has ended from the router's side.
    pub(crate) fn is_answered(&self) -> bool {
        self.answer.is_finished()
    }

    /// Status and body of the answer.
    ///
    /// # Errors
    /// There is none in time, or it is no HTTP with JSON.
    pub(crate) async fn answer(self) -> Result<(u16, Value)> {
        let Self { write, answer } = self;
        let answer = tokio::time::timeout(SOON, answer).await;
        let answer = answer.context("the router says nothing")??;
        // Not before: half a connection is a client that has gone.
        drop(write);
        let text = String::from_utf8_lossy(&answer);
        let told = || format!("no answer: {text:?}");
        let (head, body) = text.split_once("\r\n\r\n").with_context(told)?;
        let status = head.split(' ').nth(1).with_context(told)?;
        Ok((
            status.parse().with_context(told)?,
            serde_json::from_str(body).with_context(told)?,
        ))
    }
}
