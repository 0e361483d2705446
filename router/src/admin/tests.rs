//! The admin port's routes: what needs the token, and how errors are told.

use std::sync::Arc;

use axum::body::Body;
use axum::response::Response;
use baton_placement::policy::Policy;
use baton_protocol::hash::HashKey;
use http::Request;
use http_body_util::BodyExt;
use serde_json::Value;
use tempfile::TempDir;
use tower::ServiceExt;

use super::*;
use crate::fleet::artifacts::Artifacts;
use crate::policy::{InForce, PolicyHandle, PolicySet, Refusal};
use crate::run::{ModelListing, RunHandle, RunRequest, TextArtifacts};

/// A dispatch that is ready and does nothing.
#[derive(Debug)]
struct Ready;

impl Dispatch for Ready {
    fn policy(&self, _: &str) -> Option<Arc<PolicyHandle>> {
        None
    }

    fn models(&self) -> Vec<ModelListing> {
        Vec::new()
    }

    fn artifacts(&self, _: &PolicyHandle) -> Option<Arc<TextArtifacts>> {
        None
    }

    fn ready(&self) -> Result<(), String> {
        Ok(())
    }

    fn start(&self, _: RunRequest) -> RunHandle {
        panic!("the admin port starts nothing")
    }
}

struct Port {
    routes: Router,
    policies: Arc<Policies>,
    draining: CancellationToken,
    _folder: TempDir,
}

/// A port with the token `secret`, or none.
fn port(with_token: bool) -> Port {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    };
    let token = with_token.then(|| Arc::new(Token::read(&file("token", "secret\n")).unwrap()));
    let clock = Clock::start();
    let metrics = Arc::new(Metrics::new());
    let learning = Arc::new(Learning::default());
    let records = Records::start(
        folder.path(),
        clock,
        metrics.clone(),
        learning.clone(),
        Threads::Machine,
    );
    let workers = Workers::new(
        clock,
        1,
        HashKey::from_bytes(&[0; 32]),
        Artifacts::new(folder.path().join("artifacts")),
        learning.clone(),
        metrics.clone(),
    );
    let mut set = PolicySet::default();
    let policy = Policy::new("p", "m", &[], &["d"]);
    set.add(Arc::new(PolicyHandle::new(policy, clock.now())))
        .unwrap();
    let draining = CancellationToken::new();
    let admin = Admin {
        dispatch: Arc::new(Ready),
        workers: Arc::new(workers),
        policies: Arc::new(Policies::new(Arc::new(set))),
        readiness: Readiness::Serving,
        learning,
        records: Arc::new(records.unwrap()),
        metrics,
        clock,
        threads: Threads::Machine,
        draining: draining.clone(),
    };
    Port {
        policies: admin.policies.clone(),
        routes: routes(Arc::new(admin), token),
        draining,
        _folder: folder,
    }
}

impl Port {
    async fn ask(&self, method: &str, path: &str, authorization: Option<&str>) -> Response {
        let mut request = Request::builder().method(method).uri(path);
        if let Some(value) = authorization {
            request = request.header("authorization", value);
        }
        let request = request.body(Body::empty()).unwrap();
        self.routes.clone().oneshot(request).await.unwrap()
    }
}

async fn error(response: Response) -> Value {
    let bytes = response.into_body().collect().await.unwrap().to_bytes();
    let body: Value = serde_json::from_slice(&bytes).unwrap();
    assert_eq!(body["error"].as_object().unwrap().len(), 4, "{body}");
    body["error"].clone()
}

const GUARDED: [&str; 6] = [
    "/v1/fleet",
    "/v1/decisions",
    "/v1/decisions?last=1",
    "/v1/policies",
    "/v1/policies/0a",
    "/v1/coefficients/0a",
];

#[tokio::test]
async fn everything_but_health_metrics_and_generations_is_behind_the_token() {
    let port = port(true);
    for path in GUARDED.into_iter().chain(["/v1/decisions/r0-1"]) {
        for authorization in [None, Some("Bearer other"), Some("Basic secret")] {
            let response = port.ask("GET", path, authorization).await;
            assert_eq!(response.status(), 401, "{path} with {authorization:?}");
            assert_eq!(response.headers()["www-authenticate"], "Bearer");
            assert_eq!(error(response).await["type"], "authentication_error");
        }
    }
    for path in GUARDED {
        let response = port.ask("GET", path, Some("Bearer secret")).await;
        assert_ne!(response.status(), 401, "{path}");
    }
    for path in ["/healthz", "/readyz", "/metrics", "/policyz"] {
        assert_eq!(port.ask("GET", path, None).await.status(), 200, "{path}");
    }
}

#[tokio::test]
async fn without_a_token_everything_is_open() {
    let port = port(false);
    assert_eq!(port.ask("GET", "/v1/fleet", None).await.status(), 200);
}

#[tokio::test]
async fn every_error_has_the_public_ports_form() {
    let port = port(false);
    for (method, path, status) in [
        ("GET", "/v1/nothing", 404),
        ("GET", "/v1/policies/0a", 404),
        ("POST", "/v1/fleet", 405),
        ("DELETE", "/metrics", 405),
        ("GET", "/v1/decisions?last=x", 400),
        ("GET", "/v1/decisions/%ff", 400),
        ("GET", "/v1/policies/%ff", 400),
        ("GET", "/v1/coefficients/%ff", 400),
    ] {
        let response = port.ask(method, path, None).await;
        assert_eq!(response.status(), status, "{method} {path}");
        assert_eq!(error(response).await["type"], "invalid_request_error");
    }
}

#[tokio::test]
async fn a_router_that_drains_is_not_ready() {
    let port = port(false);
    assert_eq!(port.ask("GET", "/readyz", None).await.status(), 200);
    port.draining.cancel();
    assert_eq!(port.ask("GET", "/readyz", None).await.status(), 503);
    assert_eq!(port.ask("GET", "/healthz", None).await.status(), 200);
}

#[tokio::test]
async fn policies_are_listed_with_their_generation_and_what_is_refused_with_its_reason() {
    let port = port(false);
    let set = port.policies.in_force().set.clone();
    port.policies.put(InForce {
        set,
        refused: vec![Refusal {
            name: Some("p".to_owned()),
            generation: Some(4),
            models: Vec::new(),
            reason: "spec.decodePools: empty".to_owned(),
        }],
    });
    let answer = port.ask("GET", "/v1/policies", None).await;
    let bytes = answer.into_body().collect().await.unwrap().to_bytes();
    let body: Value = serde_json::from_slice(&bytes).unwrap();
    let policy = &body["policies"][0];
    assert_eq!(
        (&policy["name"], &policy["generation"]),
        (&json!("p"), &json!(1))
    );
    assert!(
        policy["digest"].is_string() && policy["since"].is_string(),
        "{body}"
    );
    let refused = json!([{"name": "p", "generation": 4, "reason": "spec.decodePools: empty"}]);
    assert_eq!(body["refused"], refused);

    // For the operator, which has no token: no policy itself.
    let answer = port.ask("GET", "/policyz", None).await;
    let bytes = answer.into_body().collect().await.unwrap().to_bytes();
    let body: Value = serde_json::from_slice(&bytes).unwrap();
    let served = json!([{"name": "p", "generation": 1}]);
    assert_eq!(body, json!({"policies": served, "refused": refused}));
}
