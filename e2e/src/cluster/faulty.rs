//! Stands between a client and the API server and fails as it is told: writes that are refused, not answered, or done without an answer;
//! watches that are cut, fall silent, or are told that what they know is too old.
//!
//! Behind it is `kubectl proxy`, which speaks TLS to the API server with the client's own token. So all is plain HTTP here.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Result, ensure};
use bytes::Bytes;
use futures::stream;
use http::{Method, Request, Response, StatusCode, header};
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt as _, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::service::service_fn;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::task::AbortOnDropHandle;

use super::kubectl::Kubectl;
use crate::process::Process;
use crate::wait;

const STARTED: Duration = Duration::from_secs(20);

/// What becomes of one write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Nothing is done; with `Retry-After`, in seconds.
    Refused { status: u16, again: Option<u32> },
    /// Nothing is done, and nothing is said for as long as the client waits.
    Unanswered,
    /// It is done, and the connection is cut before the answer.
    Lost,
    /// It is done, and the answer is 504: clients send such a request again.
    Overdue,
}

/// One write that came by.
#[derive(Clone, Debug)]
pub struct Passed {
    pub method: Method,
    pub path: String,
    pub fault: Option<Fault>,
}

impl Passed {
    /// It is about a lease: who leads.
    pub fn is_of_a_lease(&self) -> bool {
        self.path.contains("/leases")
    }

    /// The API server was told to delete a pod, and what it said did not arrive.
    pub fn is_an_unheard_deletion_of(&self, pod: &str) -> bool {
        let path = self.path.split('?').next().unwrap_or_default();
        self.method == Method::DELETE
            && path.ends_with(&format!("/pods/{pod}"))
            && matches!(self.fault, Some(Fault::Lost | Fault::Overdue))
    }
}

type Decide = Box<dyn FnMut(&Passed) -> Option<Fault> + Send>;
type Body = BoxBody<Bytes, io::Error>;

/// A way to the API server. It ends when the value is dropped.
#[derive(Debug)]
pub struct Faulty {
    /// For the client: its own rights, this way.
    pub kubeconfig: PathBuf,
    shared: Arc<Shared>,
    _proxy: Process,
    _server: AbortOnDropHandle<()>,
}

struct Shared {
    upstream: SocketAddr,
    client: Client<HttpConnector, Full<Bytes>>,
    decide: Mutex<Decide>,
    passed: Mutex<Vec<Passed>>,
    /// Watches that were opened so far.
    born: AtomicU64,
    ends: watch::Sender<Ends>,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Shared").finish_non_exhaustive()
    }
}

/// Watches up to these numbers have met their end.
#[derive(Clone, Copy, Debug, Default)]
struct Ends {
    cut: u64,
    silent: u64,
    too_old: u64,
}

impl Faulty {
    /// Stands before the API server for a client with this kubeconfig; `folder` takes what the programs write.
    ///
    /// # Errors
    /// `kubectl proxy` does not start, or no port is free.
    pub async fn before(kubectl: &Kubectl, kubeconfig: &Path, folder: &Path) -> Result<Self> {
        std::fs::create_dir_all(folder)?;
        let mut command = kubectl.command(&["proxy", "--port=0"]);
        command.env("KUBECONFIG", kubeconfig);
        let proxy = Process::start_command("kubectl-proxy", folder, command)?;
        let upstream = wait::until_blocking("kubectl proxy listens", STARTED, || {
            let said = proxy.output();
            let address = said.trim().rsplit(' ').next().unwrap_or_default();
            address
                .parse()
                .map_err(|_| format!("{said}{}", proxy.errors()))
        })?;
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let own = folder.join("kubeconfig");
        std::fs::copy(kubeconfig, &own)?;
        let server = format!("--server=http://{}", listener.local_addr()?);
        let cluster = kubectl.run(&["config", "view", "--output=jsonpath={.clusters[0].name}"])?;
        let change = ["config", "set-cluster", cluster.trim(), &server];
        let changed = kubectl.command(&change).env("KUBECONFIG", &own).output()?;
        ensure!(changed.status.success(), "{changed:?}");

        let shared = Arc::new(Shared {
            upstream,
            client: Client::builder(TokioExecutor::new()).build_http(),
            decide: Mutex::new(Box::new(|_| None)),
            passed: Mutex::default(),
            born: AtomicU64::new(0),
            ends: watch::Sender::new(Ends::default()),
        });
        Ok(Self {
            kubeconfig: own,
            _server: AbortOnDropHandle::new(tokio::spawn(serve(listener, shared.clone()))),
            shared,
            _proxy: proxy,
        })
    }

    /// From now on what becomes of each write is asked of `decide`.
    pub fn decide(&self, decide: impl FnMut(&Passed) -> Option<Fault> + Send + 'static) {
        *lock(&self.shared.decide) = Box::new(decide);
    }

    /// Every write that came by so far, with what became of it.
    pub fn passed(&self) -> Vec<Passed> {
        lock(&self.shared.passed).clone()
    }

    /// Ends every watch that is open, in the middle of its answer. Returns how many there were ever.
    pub fn cut_watches(&self) -> u64 {
        self.end(|ends, born| ends.cut = born)
    }

    /// Every watch that is open says nothing more, and stays open.
    pub fn silence_watches(&self) -> u64 {
        self.end(|ends, born| ends.silent = born)
    }

    /// Every watch that is open is told that what it knows is too old to go on from: 410.
    pub fn outdate_watches(&self) -> u64 {
        self.end(|ends, born| ends.too_old = born)
    }

    fn end(&self, change: impl FnOnce(&mut Ends, u64)) -> u64 {
        let born = self.watches();
        self.shared.ends.send_modify(|ends| change(ends, born));
        born
    }

    /// Watches that were opened so far.
    pub fn watches(&self) -> u64 {
        self.shared.born.load(Ordering::SeqCst)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn serve(listener: TcpListener, shared: Arc<Shared>) {
    // Dropped with this task, and with them what they wait for.
    let mut connections = JoinSet::new();
    while let Ok((socket, _)) = listener.accept().await {
        let shared = shared.clone();
        connections.spawn(async move {
            let service = service_fn(move |request| answer(shared.clone(), request));
            let served = hyper::server::conn::http1::Builder::new()
                .serve_connection(TokioIo::new(socket), service);
            // Cut on purpose, or by a client that went away.
            let _ = served.await;
        });
        while connections.try_join_next().is_some() {}
    }
}

/// An error cuts the connection.
async fn answer(shared: Arc<Shared>, request: Request<Incoming>) -> io::Result<Response<Body>> {
    let (mut parts, body) = request.into_parts();
    let body = body.collect().await.map_err(io::Error::other)?.to_bytes();
    let fault = (parts.method != Method::GET)
        .then(|| shared.meets(&parts.method, parts.uri.path()))
        .flatten();
    match fault {
        Some(Fault::Refused { status, again }) => return Ok(refusal(status, again)),
        Some(Fault::Unanswered) => std::future::pending().await,
        Some(Fault::Lost | Fault::Overdue) | None => {}
    }
    let is_watch = parts
        .uri
        .query()
        .is_some_and(|query| query.contains("watch=true"));
    let path = parts
        .uri
        .path_and_query()
        .map_or("/", |path| path.as_str())
        .to_owned();
    parts.uri = format!("http://{}{path}", shared.upstream)
        .parse()
        .map_err(io::Error::other)?;
    let upstream = shared
        .client
        .request(Request::from_parts(parts, Full::new(body)))
        .await
        .map_err(io::Error::other)?;
    let (parts, body) = upstream.into_parts();
    if fault.is_some() {
        body.collect().await.map_err(io::Error::other)?;
        if fault == Some(Fault::Overdue) {
            return Ok(refusal(504, None));
        }
        return Err(io::Error::other("the answer is lost, as told"));
    }
    let body = if is_watch && parts.status.is_success() {
        shared.watched(body)
    } else {
        body.map_err(io::Error::other).boxed()
    };
    Ok(Response::from_parts(parts, body))
}

impl Shared {
    fn meets(&self, method: &Method, path: &str) -> Option<Fault> {
        let mut passed = Passed {
            method: method.clone(),
            path: path.to_owned(),
            fault: None,
        };
        passed.fault = lock(&self.decide)(&passed);
        let fault = passed.fault;
        lock(&self.passed).push(passed);
        fault
    }

    /// The body of a watch, until it meets its end.
    fn watched(&self, body: Incoming) -> Body {
        let number = self.born.fetch_add(1, Ordering::SeqCst) + 1;
        let state = Some((body, self.ends.subscribe()));
        let frames = stream::unfold(state, move |state| async move {
            let (mut body, mut ends) = state?;
            loop {
                let now = *ends.borrow_and_update();
                if number <= now.cut {
                    return Some((Err(io::Error::other("the watch is cut, as told")), None));
                }
                if number <= now.too_old {
                    return Some((Ok(Frame::data(Bytes::from_static(TOO_OLD))), None));
                }
                tokio::select! {
                    // Its sender lives as long as the server that polls this.
                    _ = ends.changed() => {}
                    frame = body.frame(), if number > now.silent => {
                        let frame = frame?.map_err(io::Error::other);
                        return Some((frame, Some((body, ends))));
                    }
                }
            }
        });
        StreamBody::new(frames).boxed()
    }
}

const TOO_OLD: &[u8] = b"{\"type\":\"ERROR\",\"object\":{\"kind\":\"Status\",\"apiVersion\":\"v1\",\"metadata\":{},\"status\":\"Failure\",\
\"message\":\"too old resource version\",\"reason\":\"Expired\",\"code\":410}}\n";

/// As an API server says it.
fn refusal(status: u16, again: Option<u32>) -> Response<Body> {
    let reason = match status {
        429 => "TooManyRequests",
        503 => "ServiceUnavailable",
        504 => "Timeout",
        _ => "InternalError",
    };
    let text = serde_json::json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "message": "refused, as told", "reason": reason, "code": status,
    });
    let full = Full::new(Bytes::from(text.to_string()));
    let body = full.map_err(|never: Infallible| match never {}).boxed();
    let mut response = Response::new(body);
    *response.status_mut() =
        StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let headers = response.headers_mut();
    headers.insert(
        header::CONTENT_TYPE,
        header::HeaderValue::from_static("application/json"),
    );
    if let Some(seconds) = again {
        headers.insert(header::RETRY_AFTER, seconds.into());
    }
    response
}
