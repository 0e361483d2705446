//! A client of the router that keeps its connection, as clients do.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use bytes::Bytes;
use http::Request;
use http_body_util::{BodyExt as _, Full};
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper_util::rt::TokioIo;
use serde_json::json;
use tokio::net::TcpStream;
use tokio_util::task::AbortOnDropHandle;

pub(crate) struct Routed {
    sender: SendRequest<Full<Bytes>>,
    host: String,
    _connection: AbortOnDropHandle<()>,
}

impl Routed {
    pub(crate) async fn connect(address: SocketAddr) -> Result<Self> {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        let (sender, connection) = handshake(TokioIo::new(stream)).await?;
        let connection = tokio::spawn(async move {
            // An error of the connection shows as one of the request.
            let _ = connection.await;
        });
        Ok(Self {
            sender,
            host: address.to_string(),
            _connection: AbortOnDropHandle::new(connection),
        })
    }

    /// From the request to the first event with text; the rest is read to its end.
    pub(crate) async fn first_token(&mut self, prompt: &str, tokens: u32) -> Result<Duration> {
        let body = json!({
            "model": "m", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": true,
            "ignore_eos": true,
        });
        let request = Request::post("/v1/completions")
            .header("host", &self.host)
            .header("content-type", "application/json")
            .header("x-baton-mode", "Aggregated")
            .body(Full::new(Bytes::from(serde_json::to_vec(&body)?)))?;
        self.sender.ready().await?;
        let began = Instant::now();
        let mut answer = self.sender.send_request(request).await?;
        let status = answer.status();
        let mut first = None;
        let mut text = Vec::new();
        while let Some(frame) = answer.frame().await {
            if let Some(data) = frame?.data_ref() {
                first.get_or_insert_with(|| began.elapsed());
                text.extend_from_slice(data);
            }
        }
        let text = String::from_utf8_lossy(&text);
        ensure!(
            status == 200 && text.ends_with("[DONE]\n\n"),
            "{status}: {text}"
        );
        Ok(first.unwrap_or_default())
    }
}
