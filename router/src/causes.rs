//! Errors with their causes. Many a library's own text says nothing: tonic's for a refused connection is "transport error".

use std::error::Error;

/// `text`, which `error` was told as, with the causes of `error` that it does not say already.
pub(crate) fn with_causes(text: &str, error: &dyn Error) -> String {
    let mut text = text.to_owned();
    let mut cause = error.source();
    while let Some(error) = cause {
        let next = error.to_string();
        if !text.contains(&next) {
            text = format!("{text}: {next}");
        }
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("{text}")]
    struct Layer {
        text: &'static str,
        source: Option<Box<Layer>>,
    }

    fn over(text: &'static str, cause: Layer) -> Layer {
        let source = Some(Box::new(cause));
        Layer { text, source }
    }

    #[test]
    fn each_cause_is_told_once() {
        let refused = Layer {
            text: "refused",
            source: None,
        };
        let error = over("transport error", over("connect: refused", refused));
        assert_eq!(
            with_causes(&error.to_string(), &error),
            "transport error: connect: refused"
        );
    }
}
