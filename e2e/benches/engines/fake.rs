//! A stand-in for vLLM that computes nothing and answers at once: one thread, the frames of a stream each written by itself, as an
//! engine's are. What routers and Baton's daemon ask of a server is answered in vLLM's shape (SGLang's where its router asks).
//!
//! It is a process of its own, this program with `fake FILE`, so that its processor time is nobody else's.

use std::cell::RefCell;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use anyhow::Result;
use baton_e2e::stand_in::answers;
use baton_e2e::stand_in::events::Events;
use baton_e2e::stand_in::handshake::{Handshakes, Teller};
use baton_e2e::stand_in::serving::serve as accept;
use baton_e2e::stand_in::text::Text;
use bytes::Bytes;
use http::{Method, Request, Response, StatusCode};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use serde::{Deserialize, Serialize};
use tokio::net::TcpListener;
use tokio::task::{JoinSet, LocalSet};

use crate::MODEL;
use crate::answers::{self as own, Asked, Body};
use crate::events;

/// Of every server. A prompt of 32,000 bytes in a vocabulary of bytes has to fit.
pub(crate) const MAX_LENGTH: u32 = 65_536;
pub(crate) const BLOCK_SIZE: u32 = 16;
pub(crate) const BLOCKS: u32 = 100_000;

/// What it is started with.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Settings {
    /// Of the tokenizer, for `/tokenize` and for the blocks that servers say they hold.
    pub(crate) model: PathBuf,
    pub(crate) servers: Vec<Kind>,
}

/// One server.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Kind {
    /// Answers `/tokenize`, without which nobody can check its tokens.
    pub(crate) tokenizes: bool,
    /// Of the texts that all clients share: those that it says it holds, as a place among that many.
    pub(crate) holds: Option<(usize, usize)>,
}

/// Where a server listens.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Listening {
    pub(crate) http: SocketAddr,
    /// For handshakes of NIXL.
    pub(crate) side_channel: SocketAddr,
}

/// Requests that a server has answered.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Counts {
    pub(crate) whole: u64,
    /// Answered with `kv_transfer_params`.
    pub(crate) prefills: u64,
    /// With `kv_transfer_params` that a prefill was answered with, or a bootstrap room.
    pub(crate) pulls: u64,
    pub(crate) rooms: u64,
}

struct Server {
    kind: Kind,
    address: SocketAddr,
    text: Rc<Text>,
    events: Option<Events>,
    _handshakes: Handshakes,
    started: f64,
    counts: RefCell<Counts>,
}

/// Serves until the process is ended. Says where on the first line of standard output.
pub(crate) fn run(file: &Path) -> Result<()> {
    let settings: Settings = serde_json::from_slice(&std::fs::read(file)?)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    LocalSet::new().block_on(&runtime, serve(settings))
}

async fn serve(settings: Settings) -> Result<()> {
    let text = Rc::new(Text::read(&settings.model)?);
    let mut listening = Vec::new();
    let mut servers = JoinSet::new();
    for kind in settings.servers {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let events = match kind.holds {
            Some(share) => {
                let free = "tcp://127.0.0.1:0";
                Some(Events::open(free, free, events::held(&text, share)?).await?)
            }
            None => None,
        };
        let teller = Teller {
            engine_id: &own::engine_id(address),
            block_size: BLOCK_SIZE,
            blocks: BLOCKS,
        };
        let handshakes = Handshakes::open("127.0.0.1:0", teller).await?;
        listening.push(Listening {
            http: address,
            side_channel: handshakes.address,
        });
        let server = Rc::new(Server {
            kind,
            address,
            text: text.clone(),
            events,
            _handshakes: handshakes,
            started: answers::seconds_since_epoch(),
            counts: RefCell::default(),
        });
        servers.spawn_local(accept(listener, move |request| {
            let server = server.clone();
            async move { server.answer(request).await }
        }));
    }
    println!("{}", serde_json::to_string(&listening)?);
    while servers.join_next().await.is_some() {}
    Ok(())
}

impl Server {
    async fn answer(&self, request: Request<Incoming>) -> Response<Body> {
        let (parts, body) = request.into_parts();
        let path = parts.uri.path();
        if parts.method == Method::GET {
            return self.get(path);
        }
        let Ok(body) = body.collect().await.map(|body| body.to_bytes()) else {
            return answers::failed(StatusCode::BAD_REQUEST, "the body broke off");
        };
        match path {
            "/v1/chat/completions" => self.chat(&body),
            "/tokenize" if self.kind.tokenizes => match self.text.tokenize(&body) {
                Ok(tokens) => answers::json(&answers::tokenized(&tokens, MAX_LENGTH)),
                Err(error) => answers::failed(StatusCode::BAD_REQUEST, &error.to_string()),
            },
            _ => answers::failed(StatusCode::NOT_FOUND, "Not Found"),
        }
    }

    fn chat(&self, body: &Bytes) -> Response<Body> {
        let asked: Asked = match serde_json::from_slice(body) {
            Ok(asked) => asked,
            Err(error) => return answers::failed(StatusCode::BAD_REQUEST, &error.to_string()),
        };
        let mut counts = self.counts.borrow_mut();
        let remote = asked.kv_transfer_params.as_ref();
        let hands_over = remote.is_some_and(|remote| remote.do_remote_decode);
        if hands_over {
            counts.prefills += 1;
        } else if remote.is_some_and(|remote| remote.remote_engine_id.is_some()) {
            counts.pulls += 1;
        } else if asked.bootstrap_room.is_some() {
            counts.rooms += 1;
        } else {
            counts.whole += 1;
        }
        if asked.stream {
            return own::streamed(&asked);
        }
        let handed_over = hands_over.then(|| own::handed_over(self.address, body.len()));
        own::whole(&asked, handed_over.as_ref())
    }

    fn get(&self, path: &str) -> Response<Body> {
        let counts = *self.counts.borrow();
        match path {
            "/health" | "/health_generate" | "/ping" => answers::empty(),
            "/version" => answers::json(&own::version()),
            "/v1/models" => answers::json(&answers::models(MODEL, MAX_LENGTH)),
            "/metrics" => answers::text(own::metrics(self.started, &counts)),
            "/kv_event_sources" => answers::json(&answers::event_sources(self.events.as_ref())),
            "/get_model_info" | "/model_info" => answers::json(&own::model_info()),
            // Of SGLang's servers. Here because its router asks; vLLM's own is closed unless it runs for development.
            "/get_server_info" => answers::json(&own::server_info()),
            "/counts" => answers::json(&serde_json::to_value(counts).unwrap_or_default()),
            _ => answers::failed(StatusCode::NOT_FOUND, "Not Found"),
        }
    }
}
