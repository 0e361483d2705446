//! Connections that wait for their next hand-off.

use std::collections::HashMap;
use std::io;
use std::time::Duration;

use baton_system::network::Stream;
use parking_lot::Mutex;
use tokio::time::Instant;

/// Idle connections to one source: more hand-offs than this between one pair rarely run at once, and the next one connects anew.
const IDLE: usize = 4;

/// By address: one entry for each source that a hand-off came from within the idle time.
#[derive(Debug, Default)]
pub(super) struct Kept(Mutex<HashMap<String, Vec<(Stream, Instant)>>>);

/// Its source is there and has said nothing since the last hand-off.
fn is_quiet(stream: &Stream) -> bool {
    matches!(stream.try_read(&mut [0; 1]), Err(error) if error.kind() == io::ErrorKind::WouldBlock)
}

impl Kept {
    pub(super) fn take(&self, address: &str) -> Option<Stream> {
        let mut kept = self.0.lock();
        let idle = kept.get_mut(address)?;
        // The one used last: its window is the widest.
        while let Some((stream, _)) = idle.pop() {
            if is_quiet(&stream) {
                return Some(stream);
            }
        }
        None
    }

    pub(super) fn put(&self, address: &str, stream: Stream) {
        let mut kept = self.0.lock();
        let idle = kept.entry(address.to_owned()).or_default();
        if idle.len() < IDLE {
            idle.push((stream, Instant::now()));
        }
    }

    /// Closes what has not been used for `idle`, for as long as it is polled.
    pub(super) async fn sweep(&self, idle: Duration) {
        // An interval of zero would spin.
        let mut sweeps = tokio::time::interval(idle.max(Duration::from_millis(10)));
        loop {
            sweeps.tick().await;
            self.0.lock().retain(|_, streams| {
                streams.retain(|(stream, since)| since.elapsed() < idle && is_quiet(stream));
                !streams.is_empty()
            });
        }
    }
}
