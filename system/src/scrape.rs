//! The answer to a scrape of a process's metrics.

use std::fmt;

use axum::response::{IntoResponse as _, Response};
use http::{StatusCode, header};

/// The text of the metrics, as OpenMetrics.
pub fn answer(text: Result<String, fmt::Error>) -> Response {
    match text {
        Ok(text) => {
            let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
            ([(header::CONTENT_TYPE, kind)], text).into_response()
        }
        Err(error) => {
            let message = format!("metrics cannot be written: {error}\n");
            (StatusCode::INTERNAL_SERVER_ERROR, message).into_response()
        }
    }
}
