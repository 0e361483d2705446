//! What a key has used of its limits: requests at a time, and requests per minute.

use std::sync::Arc;

use parking_lot::Mutex;
use tokio::time::Instant;

use crate::openai::error::ApiError;

/// Seconds of its rate that a key may use at once, after a pause.
const BURST_SECONDS: f64 = 10.0;

/// What a key may use; nothing: no limit. Of the file in force, while what was used outlives files.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Limits {
    pub(super) max_in_flight: Option<u32>,
    pub(super) requests_per_minute: Option<u32>,
}

/// See the module's text.
#[derive(Debug, Default)]
pub struct Usage(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    in_flight: u32,
    /// Requests that may begin at once; fractions grow with time. `None` before the first.
    bucket: Option<(f64, Instant)>,
}

/// A request of the key. Dropping it ends it.
#[derive(Debug)]
pub struct Using(Arc<Usage>);

impl Usage {
    /// A request begins.
    ///
    /// # Errors
    /// 429, with the time after which another one may begin.
    pub(super) fn begin(self: &Arc<Self>, limits: Limits, now: Instant) -> Result<Using, ApiError> {
        let mut state = self.0.lock();
        if let Some(most) = limits.max_in_flight.filter(|&most| state.in_flight >= most) {
            return Err(ApiError::rate_limited(
                format!(
                    "{most} requests of this API key are in flight, which is its limit: try again when one has ended"
                ),
                1,
            ));
        }
        if let Some(rate) = limits.requests_per_minute {
            let wait = state.draw(rate, now);
            if let Err(seconds) = wait {
                return Err(ApiError::rate_limited(
                    format!(
                        "this API key may begin {rate} requests a minute: try again in {seconds} s"
                    ),
                    seconds,
                ));
            }
        }
        state.in_flight += 1;
        Ok(Using(self.clone()))
    }
}

impl State {
    /// Takes one request out of the bucket; otherwise says after how many whole seconds there is one.
    fn draw(&mut self, per_minute: u32, now: Instant) -> Result<(), u64> {
        let per_second = f64::from(per_minute) / 60.0;
        let most = (per_second * BURST_SECONDS).max(1.0);
        let (left, since) = self.bucket.unwrap_or((most, now));
        let grown = now.saturating_duration_since(since).as_secs_f64() * per_second;
        let left = (left + grown).min(most);
        if left < 1.0 {
            self.bucket = Some((left, now));
            return Err(((1.0 - left) / per_second).ceil() as u64);
        }
        self.bucket = Some((left - 1.0, now));
        Ok(())
    }
}

impl Drop for Using {
    fn drop(&mut self) {
        let mut state = self.0.0.lock();
        state.in_flight = state.in_flight.saturating_sub(1);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_rate_allows_a_burst_and_then_says_when_the_next_may_come() {
        let usage = Arc::new(Usage::default());
        let rate = |requests| Limits {
            requests_per_minute: Some(requests),
            ..Limits::default()
        };
        // One in ten seconds.
        let slow = rate(6);
        let began = Instant::now();
        let after = |seconds: u64| began + Duration::from_secs(seconds);
        usage.begin(slow, after(0)).unwrap();
        let error = usage.begin(slow, after(1)).unwrap_err();
        assert_eq!((error.status, error.retry_after_seconds), (429, Some(9)));
        assert_eq!(error.code.as_deref(), Some("rate_limit_exceeded"));
        // What was refused costs nothing, and waiting for as long as was said is enough.
        usage.begin(slow, after(10)).unwrap();
        assert!(usage.begin(slow, after(11)).is_err());
        // A pause saves no more than a burst.
        usage.begin(slow, after(1000)).unwrap();
        assert!(usage.begin(slow, after(1000)).is_err());
        let begun = (0..100)
            .filter(|_| usage.begin(rate(60), after(2000)).is_ok())
            .count();
        assert_eq!(begun, 10);
    }

    #[test]
    fn requests_at_a_time_are_counted_until_they_end() {
        let usage = Arc::new(Usage::default());
        let two = Limits {
            max_in_flight: Some(2),
            ..Limits::default()
        };
        let now = Instant::now();
        let first = usage.begin(two, now).unwrap();
        let _second = usage.begin(two, now).unwrap();
        let error = usage.begin(two, now).unwrap_err();
        assert_eq!((error.status, error.kind()), (429, "rate_limit_error"));
        drop(first);
        usage.begin(two, now).unwrap();
    }
}
