//! An engine that a test plays byte by byte: an HTTP/1.1 server whose every call is the test's to answer, beside a scripted daemon.

use std::io;
use std::time::Duration;

use baton_protocol::card::{Card, Dispatch, Split};
use baton_system::entropy::{Entropy, MachineEntropy};
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;

use crate::double::{ARTIFACT, Double};
use crate::router::SOON;

/// A worker whose engine is called over HTTP.
pub(crate) struct Engine {
    pub(crate) daemon: Double,
    calls: mpsc::UnboundedReceiver<Call>,
    /// Accepts nothing any more when dropped.
    _listening: tokio_util::task::AbortOnDropHandle<()>,
}

/// One request, and the connection that its answer goes to.
pub(crate) struct Call {
    pub(crate) path: String,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: Vec<u8>,
    /// Requests that came before on the same connection.
    pub(crate) earlier: u32,
    stream: TcpStream,
    again: mpsc::UnboundedSender<Call>,
}

impl Engine {
    pub(crate) async fn start(mut card: Card, split: Split) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        card.dispatch = Dispatch::OpenAiHttp {
            url: format!("http://{address}"),
            model: String::new(),
            split,
        };
        let mut bits = [0; 8];
        MachineEntropy.fill(&mut bits).unwrap();
        card.incarnation = baton_protocol::ids::Incarnation(u64::from_le_bytes(bits));
        let (sender, calls) = mpsc::unbounded_channel();
        let listening = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(take(stream, 0, sender.clone()));
            }
        });
        Self {
            daemon: Double::start(card, ARTIFACT).await,
            calls,
            _listening: tokio_util::task::AbortOnDropHandle::new(listening),
        }
    }

    /// The next request.
    pub(crate) async fn call(&mut self) -> Call {
        let call = tokio::time::timeout(SOON, self.calls.recv()).await;
        call.expect("the engine is called").unwrap()
    }

    /// Nothing more has come.
    pub(crate) fn is_idle(&mut self) -> bool {
        self.calls.try_recv().is_err()
    }
}

/// Reads one request; what is no request, or none at all, ends the connection.
async fn take(mut stream: TcpStream, earlier: u32, calls: mpsc::UnboundedSender<Call>) {
    let mut read = Vec::new();
    let head = loop {
        if let Some(end) = read.windows(4).position(|four| four == b"\r\n\r\n") {
            break end + 4;
        }
        match stream.read_buf(&mut read).await {
            Ok(1..) => {}
            _ => return,
        }
    };
    let text = String::from_utf8(read[..head].to_vec()).unwrap();
    let mut lines = text.lines();
    let path = lines.next().unwrap().split(' ').nth(1).unwrap().to_owned();
    let headers: Vec<(String, String)> = lines
        .filter_map(|line| line.split_once(": "))
        .map(|(name, value)| (name.to_ascii_lowercase(), value.to_owned()))
        .collect();
    let length = headers
        .iter()
        .find(|(name, _)| name == "content-length")
        .map_or(0, |(_, value)| value.parse::<usize>().unwrap());
    while read.len() < head + length {
        if !matches!(stream.read_buf(&mut read).await, Ok(1..)) {
            return;
        }
    }
    let _ = calls.send(Call {
        path,
        headers,
        body: read.split_off(head),
        earlier,
        stream,
        again: calls.clone(),
    });
}

impl Call {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap()
    }

    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        let found = self.headers.iter().find(|(known, _)| known == name)?;
        Some(&found.1)
    }

    /// A whole answer; the connection stays open for the next request.
    pub(crate) async fn answer(mut self, status: u16, kind: &str, body: &[u8]) {
        let head = format!(
            "HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {}\r\nx-engine: yes\r\nserver: uvicorn\r\nx-request-id: theirs\r\n\r\n",
            body.len()
        );
        self.bytes(head.as_bytes()).await;
        self.bytes(body).await;
        self.next();
    }

    /// Waits for the next request of the connection.
    fn next(self) {
        tokio::spawn(take(self.stream, self.earlier + 1, self.again));
    }

    pub(crate) async fn bytes(&mut self, bytes: &[u8]) {
        // The router may have left.
        let _ = self.stream.write_all(bytes).await;
        let _ = self.stream.flush().await;
    }

    /// The head of a stream of events.
    pub(crate) async fn begin(&mut self) {
        self.bytes(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n")
            .await;
    }

    /// A chunk of it, wherever it is cut.
    pub(crate) async fn chunk(&mut self, piece: &[u8]) {
        let head = format!("{:x}\r\n", piece.len());
        self.bytes(&[head.as_bytes(), piece, b"\r\n"].concat())
            .await;
    }

    /// The stream is whole.
    pub(crate) async fn end(mut self) {
        self.bytes(b"0\r\n\r\n").await;
        self.next();
    }

    /// Resolves when the router has closed the connection.
    pub(crate) async fn closed(mut self) {
        let mut byte = [0; 1];
        let gone = async {
            loop {
                match self.stream.read(&mut byte).await {
                    Ok(0) => return,
                    Err(error) if error.kind() != io::ErrorKind::Interrupted => return,
                    _ => {}
                }
            }
        };
        tokio::time::timeout(SOON, gone)
            .await
            .expect("the connection is closed");
    }

    /// The process dies: the connection is reset.
    pub(crate) fn dies(self) {
        drop(self.stream);
    }

    /// Closes the connection without an answer.
    pub(crate) async fn hang_up(mut self) {
        let _ = self.stream.shutdown().await;
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}
