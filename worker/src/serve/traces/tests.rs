//! Spans of what is reported.
