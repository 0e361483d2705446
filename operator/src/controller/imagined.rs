//! An API server that answers as a test says, without a socket: time may be a test's own.

use http::{Request, Response};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Bytes;
use kube::Client;
use kube::client::Body;
use serde_json::{Value, json};

/// Answers to method, path and body: a status, and an object or what a refusal says.
pub(super) fn client(
    answer: impl Fn(&str, &str, &Value) -> (u16, Value) + Clone + Send + Sync + 'static,
) -> Client {
    let service = tower::service_fn(move |request: Request<Body>| {
        let answer = answer.clone();
        async move {
            let (head, body) = request.into_parts();
            let body = body.collect().await?.to_bytes();
            let body = serde_json::from_slice(&body).unwrap_or(Value::Null);
            let (status, mut said) = answer(head.method.as_str(), head.uri.path(), &body);
            if let Some(message) = said.as_str() {
                said = json!({
                    "kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "", "message": message, "code": status,
                });
            }
            let said = Full::new(Bytes::from(said.to_string()));
            let mut answered = Response::new(said);
            *answered.status_mut() = http::StatusCode::from_u16(status)?;
            Ok::<_, tower::BoxError>(answered)
        }
    });
    Client::new(service, "n")
}
