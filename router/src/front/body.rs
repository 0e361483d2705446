//! Reads a request body within its limits of size, time and memory.

use std::time::Duration;

use axum::body::Body;
use http::HeaderMap;
use http::header::CONTENT_LENGTH;
use http_body_util::BodyExt;

use super::limits::FrontConfig;
use super::memory::{Memory, Share};
use crate::openai::error::ApiError;

/// A whole body and its share of memory.
#[derive(Debug)]
pub struct Read {
    pub bytes: Vec<u8>,
    pub share: Share,
}

/// The whole body. A body that says that it is too large is not read at all.
pub async fn read(
    headers: &HeaderMap,
    body: Body,
    config: &FrontConfig,
    memory: &Memory,
) -> Result<Read, ApiError> {
    let limit = config.max_body_bytes;
    let announced = headers
        .get(CONTENT_LENGTH)
        .and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
    if announced.is_some_and(|length| usize::try_from(length).map_or(true, |length| length > limit))
    {
        return Err(ApiError::body_too_large(limit));
    }
    within(config.body_timeout, collect(body, limit, memory.body())).await
}

async fn within(
    limit: Duration,
    read: impl Future<Output = Result<Read, ApiError>>,
) -> Result<Read, ApiError> {
    tokio::time::timeout(limit, read)
        .await
        .unwrap_or_else(|_| Err(ApiError::body_timeout(limit.as_secs())))
}

async fn collect(mut body: Body, limit: usize, mut share: Share) -> Result<Read, ApiError> {
    // What was announced is not believed before it is there.
    let mut bytes = Vec::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| {
            ApiError::bad_request(format!("the request body broke off: {error}"))
        })?;
        // Trailers say nothing that counts.
        let Some(data) = frame.data_ref() else {
            continue;
        };
        let length = bytes.len() + data.len();
        if length > limit {
            return Err(ApiError::body_too_large(limit));
        }
        share.grow_to(length)?;
        bytes.extend_from_slice(data);
    }
    Ok(Read { bytes, share })
}
