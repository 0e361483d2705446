//! A router's front over a real dispatcher, and what a client sees.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use axum::body::Body;
use baton_placement::policy::Policy;
use baton_placement::record::DecisionRecord;
use baton_router::clock::Clock;
use baton_router::front::access::Access;
use baton_router::front::{Front, FrontConfig};
use http::{HeaderMap, Request};
use http_body_util::BodyExt;
use tokio::task::JoinHandle;
use tower::ServiceExt;

use crate::engine::Engine;
use crate::router::{Router, SOON};

pub(crate) struct Served {
    pub(crate) router: Router,
    pub(crate) routes: axum::Router,
}

/// What a client has read.
#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) status: u16,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Vec<u8>,
    /// The body broke off.
    pub(crate) broken: bool,
}

impl Reply {
    pub(crate) fn text(&self) -> String {
        String::from_utf8(self.body.clone()).unwrap()
    }

    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name)?.to_str().ok()
    }

    pub(crate) fn run(&self) -> String {
        self.header("x-baton-run").unwrap().to_owned()
    }
}

impl Served {
    pub(crate) async fn start(policy: &Policy, engines: &[&Engine]) -> Self {
        let doubles: Vec<_> = engines.iter().map(|engine| &engine.daemon).collect();
        let router = Router::start(policy, &doubles);
        router.ready(engines.len()).await;
        let front = Front::new(
            Arc::new(router.dispatcher.clone()),
            FrontConfig::default(),
            Access::default(),
            Clock::start(),
            [3; 32],
            baton_router::front::counts::Counts::default(),
        );
        Self {
            routes: front.routes(),
            router,
        }
    }

    /// Sends a request; the answer is read to its end.
    pub(crate) fn post(&self, mode: &str, path: &str, body: impl Into<Body>) -> JoinHandle<Reply> {
        self.post_read(mode, path, body).0
    }

    /// The same, and how many bytes of the answer have been read so far.
    pub(crate) fn post_read(
        &self,
        mode: &str,
        path: &str,
        body: impl Into<Body>,
    ) -> (JoinHandle<Reply>, Arc<AtomicUsize>) {
        let request = Request::post(path)
            .header("x-baton-mode", mode)
            .body(body.into())
            .unwrap();
        let routes = self.routes.clone();
        let read = Arc::new(AtomicUsize::new(0));
        let counted = read.clone();
        let reply = tokio::spawn(async move {
            let response = routes.oneshot(request).await.unwrap();
            let (head, mut body) = response.into_parts();
            let mut reply = Reply {
                status: head.status.as_u16(),
                headers: head.headers,
                body: Vec::new(),
                broken: false,
            };
            while let Some(frame) = body.frame().await {
                match frame {
                    Ok(frame) => reply.body.extend_from_slice(&frame.into_data().unwrap()),
                    Err(_) => reply.broken = true,
                }
                counted.store(reply.body.len(), Ordering::Relaxed);
            }
            reply
        });
        (reply, read)
    }

    pub(crate) async fn record(&self, run: &str) -> DecisionRecord {
        self.router.record(run).await
    }
}

pub(crate) async fn end(reply: JoinHandle<Reply>) -> Reply {
    tokio::time::timeout(SOON, reply)
        .await
        .expect("the client has its answer")
        .unwrap()
}
