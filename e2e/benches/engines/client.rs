//! The clients: all on one thread, each with one connection that it keeps and one request at a time.

use std::cell::RefCell;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use bytes::Bytes;
use http::Request;
use http_body_util::{BodyExt as _, Full};
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio_util::task::AbortOnDropHandle;

use crate::prompts::{Draws, Prompts};
use crate::{MODEL, TOKENS};

/// No request takes longer on a machine that works.
const PATIENCE: Duration = Duration::from_secs(30);
const CONTENT: &[u8] = b"\"content\":\"";

/// Who is asked, and how.
#[derive(Clone, Debug)]
pub(crate) struct Target {
    /// Clients are spread over them.
    pub(crate) addresses: Vec<SocketAddr>,
    /// Sent with each request.
    pub(crate) headers: Vec<(&'static str, &'static str)>,
}

/// What the clients saw.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    /// From sending a request to the first event with text, of requests that ended within the counted time.
    pub(crate) first_tokens: Vec<Duration>,
}

/// How long.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Window {
    /// Connections are made and caches filled; nothing is counted.
    pub(crate) warm: Duration,
    pub(crate) counted: Duration,
}

/// Asks for as long as the window says. `at_edges` is called as the counted time begins and as it ends.
///
/// # Errors
/// The first request that was not answered in full.
pub(crate) async fn ask(
    target: &Target,
    prompts: &Rc<Prompts>,
    clients: usize,
    seed: u64,
    window: Window,
    mut at_edges: impl FnMut() -> Result<()>,
) -> Result<Seen> {
    let seen = Rc::new(RefCell::new(Seen::default()));
    let began = Instant::now();
    let from = began + window.warm;
    let until = from + window.counted;
    let mut running = JoinSet::new();
    for client in 0..clients {
        let address = target.addresses[client % target.addresses.len()];
        let headers = target.headers.clone();
        let (prompts, seen) = (prompts.clone(), seen.clone());
        running.spawn_local(async move {
            let mut draws = Draws::new(seed << 16 | client as u64);
            let mut connection = Connection::open(address).await?;
            let mut text = Vec::new();
            while Instant::now() < until {
                let prompt = prompts.draw(&mut draws);
                let request = connection.request(&prompt, &headers)?;
                let answer = connection.first_token(request, &mut text);
                let first = tokio::time::timeout(PATIENCE, answer)
                    .await
                    .with_context(|| format!("no answer within {PATIENCE:?}"))??;
                let ended = Instant::now();
                if (from..=until).contains(&ended) {
                    seen.borrow_mut().first_tokens.push(first);
                }
            }
            anyhow::Ok(())
        });
    }
    tokio::time::sleep_until(from.into()).await;
    at_edges()?;
    tokio::time::sleep_until(until.into()).await;
    at_edges()?;
    while let Some(ended) = running.join_next().await {
        ended??;
    }
    Ok(std::mem::take(&mut seen.borrow_mut()))
}

/// One request, for looking at its whole answer: `x-baton-run` of its headers, where there is one.
///
/// # Errors
/// It was not answered in full.
pub(crate) async fn once(target: &Target, prompt: &str) -> Result<Option<String>> {
    let mut connection = Connection::open(target.addresses[0]).await?;
    let request = connection.request(prompt, &target.headers)?;
    let mut text = Vec::new();
    tokio::time::timeout(PATIENCE, connection.first_token(request, &mut text)).await??;
    let pieces = find_all(&text, CONTENT).filter(|at| text.get(at + CONTENT.len()) != Some(&b'"'));
    let pieces = pieces.count();
    ensure!(
        pieces == TOKENS,
        "{pieces} pieces of text instead of {TOKENS}: {}",
        String::from_utf8_lossy(&text)
    );
    Ok(connection.run)
}

struct Connection {
    sender: SendRequest<Full<Bytes>>,
    host: String,
    /// Of the last answer.
    run: Option<String>,
    _driver: AbortOnDropHandle<()>,
}

impl Connection {
    async fn open(address: SocketAddr) -> Result<Self> {
        let stream = TcpStream::connect(address)
            .await
            .with_context(|| format!("connect {address}"))?;
        stream.set_nodelay(true)?;
        let (sender, connection) = handshake(TokioIo::new(stream)).await?;
        let driver = tokio::task::spawn_local(async move {
            // An error of the connection shows as one of the request.
            let _ = connection.await;
        });
        Ok(Self {
            sender,
            host: address.to_string(),
            run: None,
            _driver: AbortOnDropHandle::new(driver),
        })
    }

    fn request(&self, prompt: &str, headers: &[(&str, &str)]) -> Result<Request<Full<Bytes>>> {
        // Words, digits and spaces: nothing to escape.
        let body = format!(
            r#"{{"model":"{MODEL}","messages":[{{"role":"user","content":"{prompt}"}}],"max_tokens":{TOKENS},"stream":true,"temperature":0,"ignore_eos":true}}"#
        );
        let mut request = Request::post("/v1/chat/completions")
            .header("host", &self.host)
            .header("content-type", "application/json");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        Ok(request.body(Full::new(body.into()))?)
    }

    /// The whole answer is left in `text`.
    async fn first_token(
        &mut self,
        request: Request<Full<Bytes>>,
        text: &mut Vec<u8>,
    ) -> Result<Duration> {
        text.clear();
        self.sender.ready().await?;
        let began = Instant::now();
        let mut answer = self.sender.send_request(request).await?;
        let status = answer.status();
        let run = answer.headers().get("x-baton-run");
        self.run = run.and_then(|run| Some(run.to_str().ok()?.to_owned()));
        let mut first = None;
        let mut looked = 0;
        while let Some(frame) = answer.frame().await {
            let frame = frame?;
            let Some(data) = frame.data_ref() else {
                continue;
            };
            text.extend_from_slice(data);
            if first.is_none() {
                let shown = find_all(&text[looked..], CONTENT).any(|at| {
                    let next = text.get(looked + at + CONTENT.len());
                    next.is_some_and(|next| *next != b'"')
                });
                if shown {
                    first = Some(began.elapsed());
                }
                // A name may have come in two parts.
                looked = text.len().saturating_sub(CONTENT.len());
            }
        }
        if status != 200 || !text.ends_with(b"data: [DONE]\n\n") {
            let said = String::from_utf8_lossy(&text[..text.len().min(400)]).into_owned();
            bail!("status {status}: {said}");
        }
        first.context("an answer without text")
    }
}

fn find_all<'a>(text: &'a [u8], what: &'a [u8]) -> impl Iterator<Item = usize> + 'a {
    let starts = text.windows(what.len()).enumerate();
    starts.filter_map(move |(at, part)| (part == what).then_some(at))
}
