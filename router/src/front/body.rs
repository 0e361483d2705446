//! Reads a request body within its limits of size and time.

use std::error::Error;

use axum::body::Body;
use bytes::Bytes;
use http::HeaderMap;
use http::header::CONTENT_LENGTH;
use http_body_util::{BodyExt, LengthLimitError, Limited};

use super::FrontConfig;
use crate::openai::error::ApiError;

/// The whole body. A body that says that it is too large is not read at all.
pub async fn read(
    headers: &HeaderMap,
    body: Body,
    config: &FrontConfig,
) -> Result<Bytes, ApiError> {
    let limit = config.max_body_bytes;
    let announced = headers
        .get(CONTENT_LENGTH)
        .and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
    if announced.is_some_and(|length| usize::try_from(length).map_or(true, |length| length > limit))
    {
        return Err(ApiError::body_too_large(limit));
    }
    match tokio::time::timeout(config.body_timeout, Limited::new(body, limit).collect()).await {
        Ok(Ok(collected)) => Ok(collected.to_bytes()),
        Ok(Err(error)) if is_length_limit(error.as_ref()) => Err(ApiError::body_too_large(limit)),
        Ok(Err(error)) => Err(ApiError::bad_request(format!(
            "the request body broke off: {error}"
        ))),
        Err(_) => Err(ApiError::body_timeout(config.body_timeout.as_secs())),
    }
}

fn is_length_limit(mut error: &(dyn Error + 'static)) -> bool {
    loop {
        if error.is::<LengthLimitError>() {
            return true;
        }
        match error.source() {
            Some(source) => error = source,
            None => return false,
        }
    }
}
