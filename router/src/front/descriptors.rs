//! How many connections the process may have open.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Descriptors that are not connections of clients: streams to workers, files, the runtime's own.
const OTHERS: u64 = 512;

/// Raises the soft limit on open files to the hard one. A service has no use for the soft one: it protects programs that use `select`.
pub fn raise() {
    let limit = getrlimit(Resource::Nofile);
    if limit.current == limit.maximum {
        return;
    }
    let raised = Rlimit {
        current: limit.maximum,
        ..limit
    };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        tracing::warn!(%error, "the limit on open files stays as it is: fewer connections are taken");
    }
}

/// As many of `wanted` connections as may be open.
pub fn affordable(wanted: usize) -> usize {
    let Some(limit) = getrlimit(Resource::Nofile).current else {
        return wanted;
    };
    let most = usize::try_from(limit.saturating_sub(OTHERS).max(limit / 2)).unwrap_or(usize::MAX);
    if most < wanted {
        tracing::warn!(
            open_files = limit,
            connections = most,
            "fewer connections are taken than --max-connections says: raise the limit on open files (ulimit -Hn)"
        );
    }
    wanted.min(most)
}
