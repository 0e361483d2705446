//! Waiting for a condition that somebody could watch, never for a length of time.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};

/// Between two looks. Short beside everything that is waited for, long beside one look.
const PAUSE: Duration = Duration::from_millis(20);

/// Looks until the condition holds; what the last look saw is in the error.
///
/// # Errors
/// The condition did not hold within the time.
pub async fn until<T>(
    what: &str,
    within: Duration,
    mut look: impl AsyncFnMut() -> Result<T, String>,
) -> Result<T> {
    let deadline = Instant::now() + within;
    loop {
        match look().await {
            Ok(value) => return Ok(value),
            Err(seen) if Instant::now() >= deadline => {
                bail!("not within {within:?}: {what}; last seen: {seen}")
            }
            Err(_) => tokio::time::sleep(PAUSE).await,
        }
    }
}

/// The same where nothing is asynchronous.
///
/// # Errors
/// The condition did not hold within the time.
pub fn until_blocking<T>(
    what: &str,
    within: Duration,
    look: impl FnMut() -> Result<T, String>,
) -> Result<T> {
    until_pausing(what, within, PAUSE, look)
}

/// The same with another pause between two looks, where each is dear.
///
/// # Errors
/// The condition did not hold within the time.
pub fn until_pausing<T>(
    what: &str,
    within: Duration,
    pause: Duration,
    mut look: impl FnMut() -> Result<T, String>,
) -> Result<T> {
    let deadline = Instant::now() + within;
    loop {
        match look() {
            Ok(value) => return Ok(value),
            Err(seen) if Instant::now() >= deadline => {
                bail!("not within {within:?}: {what}; last seen: {seen}")
            }
            Err(_) => std::thread::sleep(pause),
        }
    }
}
