//! Tasks that run by the clock: load reports, and the reaper.

use std::sync::Arc;
use std::time::Duration;

use super::daemon::Daemon;
use crate::kv::lease::look_every;

/// Between reports under load (design/30: at 50 ms late reports cost nothing; at a second they do).
const UNDER_LOAD: Duration = Duration::from_millis(50);
const IDLE: Duration = Duration::from_secs(1);
/// Least time between two reports, however much changes: a report scans all blocks.
const SMALLEST_GAP: Duration = Duration::from_millis(10);

/// Makes load reports until the worker stops: at once when something was admitted or has ended, and by the clock.
pub(crate) async fn report(daemon: Arc<Daemon>) {
    loop {
        let load = daemon.report();
        let busy = load.queued_sequences > 0
            || load.running_sequences > 0
            || load.leases_open > 0
            || daemon.operations.count() > 0;
        daemon.load.send_replace(load);
        let period = if busy { UNDER_LOAD } else { IDLE };
        let due = async {
            tokio::time::sleep(SMALLEST_GAP).await;
            tokio::select! {
                () = daemon.changed.notified() => {}
                () = tokio::time::sleep(period - SMALLEST_GAP) => {}
            }
        };
        tokio::select! {
            () = daemon.stop.cancelled() => return,
            () = due => {}
        }
    }
}

/// Frees what expired leases hold and forgets results that nobody will ask for.
pub(crate) async fn reap(daemon: Arc<Daemon>) {
    let period = look_every(daemon.lease_duration);
    loop {
        tokio::select! {
            () = daemon.stop.cancelled() => return,
            () = tokio::time::sleep(period) => {}
        }
        let reaped = daemon.pool.reap();
        if reaped.leases > 0 {
            tracing::warn!(
                leases = reaped.leases,
                blocks = reaped.blocks,
                "leases expired: nobody read or renewed them"
            );
            daemon.changed.notify_one();
        }
        if reaped.quarantined > 0 {
            tracing::warn!(
                blocks = reaped.quarantined,
                "quarantine ended: its readers were gone without a word"
            );
            daemon.changed.notify_one();
        }
        let now = daemon.pool.now();
        daemon.results.forget(now);
        daemon.traces.forget();
        daemon.operations.forget(now);
    }
}
