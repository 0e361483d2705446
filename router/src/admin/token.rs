//! The bearer token of the admin port.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::{StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use super::problem;
use crate::front::keys::bearer;

/// A token file that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TokenFileError {
    #[error("admin token file {path} is not readable: {source}")]
    Read {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error("admin token file {path} is empty: write a secret into it")]
    Empty { path: PathBuf },
}

/// Kept as a digest: comparing digests takes the same time wherever they differ, and nothing can print it.
#[derive(Clone, Debug)]
pub struct Token(blake3::Hash);

impl Token {
    /// Reads the file's contents without surrounding white space.
    pub fn read(path: &Path) -> Result<Self, TokenFileError> {
        let text = std::fs::read_to_string(path).map_err(|source| TokenFileError::Read {
            path: path.to_owned(),
            source,
        })?;
        match text.trim() {
            "" => Err(TokenFileError::Empty {
                path: path.to_owned(),
            }),
            secret => Ok(Self(blake3::hash(secret.as_bytes()))),
        }
    }

    fn opens(&self, request: &Request) -> bool {
        request
            .headers()
            .get(header::AUTHORIZATION)
            .and_then(|value| bearer(value.as_bytes()))
            // `blake3::Hash` compares in constant time.
            .is_some_and(|secret| blake3::hash(secret) == self.0)
    }
}

/// Lets a request pass that carries the token, if there is one.
pub async fn require(
    State(token): State<Option<Arc<Token>>>,
    request: Request,
    next: Next,
) -> Response {
    match token {
        Some(token) if !token.opens(&request) => {
            let body = problem(
                StatusCode::UNAUTHORIZED,
                "this endpoint wants the admin token: send authorization: Bearer …",
            );
            ([(header::WWW_AUTHENTICATE, "Bearer")], body).into_response()
        }
        _ => next.run(request).await,
    }
}

#[cfg(test)]
mod tests {
    use axum::body::Body;

    use super::*;

    #[test]
    fn only_the_secret_opens() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("token");
        std::fs::write(&path, "secret\n").unwrap();
        let token = Token::read(&path).unwrap();
        let request = |value: &str| {
            Request::builder()
                .header("authorization", value)
                .body(Body::empty())
                .unwrap()
        };
        assert!(token.opens(&request("Bearer secret")));
        for value in ["Bearer other", "Bearer ", "secret", "Basic secret"] {
            assert!(!token.opens(&request(value)), "{value}");
        }
        std::fs::write(&path, " \n").unwrap();
        assert!(Token::read(&path).is_err());
    }
}
