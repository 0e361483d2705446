//! Who may come in: nobody while the router ends, and only known keys where there are keys.

use std::fmt;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::Response;
use http::HeaderValue;
use http::header::{CONNECTION, WWW_AUTHENTICATE};

use super::keys::{ApiKey, KeyFile};
use super::tls::IdentityFiles;
use super::{Front, HEALTH, reply};
use crate::openai::error::ApiError;

/// What guards the public port. Nothing, by default.
#[derive(Debug, Default)]
pub struct Access {
    /// Requests need one of these keys.
    pub keys: Option<Arc<KeyFile>>,
    /// Connections are TLS under this certificate.
    pub identity: Option<Arc<IdentityFiles>>,
}

/// For the start-up line: to whom the public port is open.
#[derive(Clone, Copy, Debug)]
pub struct Open {
    /// How many there are; `None`: none is needed.
    keys: Option<usize>,
    tls: bool,
}

impl Open {
    pub fn of(access: &Access) -> Self {
        Self {
            keys: access.keys.as_ref().map(|file| file.in_force().len()),
            tls: access.identity.is_some(),
        }
    }
}

impl fmt::Display for Open {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.keys {
            Some(keys) => write!(formatter, "with one of {keys} API keys")?,
            None => formatter.write_str("open to all")?,
        }
        formatter.write_str(if self.tls { ", TLS" } else { ", without TLS" })
    }
}

/// The key under which a request is served, in its extensions.
#[derive(Clone, Debug)]
pub struct Client(pub Arc<ApiKey>);

/// Lets a request pass, or says why not. Health is open to all.
pub(super) async fn admit(
    State(front): State<Arc<Front>>,
    mut request: Request,
    next: Next,
) -> Response {
    if request.uri().path() == HEALTH {
        return next.run(request).await;
    }
    if front.shutdown.is_cancelled() {
        let mut response = reply::error(&ApiError::shutting_down());
        response
            .headers_mut()
            .insert(CONNECTION, HeaderValue::from_static("close"));
        return response;
    }
    if let Some(keys) = &front.access.keys {
        match keys.in_force().of(request.headers()) {
            Ok(key) => request.extensions_mut().insert(Client(key)),
            Err(error) => {
                let mut response = reply::error(&error);
                response
                    .headers_mut()
                    .insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
                return response;
            }
        };
    }
    next.run(request).await
}
