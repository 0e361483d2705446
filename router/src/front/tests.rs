//! The front over a scripted run.
