//! The last decision records in memory, for `GET /v1/decisions`.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use baton_placement::record::{DecisionRecord, Kind};
use parking_lot::Mutex;
use tokio::sync::Notify;

/// Records kept: at about 4 KiB each, some megabytes.
pub const KEPT: usize = 1024;

/// One record, as it was written.
#[derive(Clone, Debug)]
pub struct RecentRecord {
    pub run: String,
    pub plan: Option<Kind>,
    pub reason: String,
    pub json: Arc<str>,
}

impl RecentRecord {
    pub fn new(record: &DecisionRecord, json: Arc<str>) -> Self {
        Self {
            run: record.run.to_string(),
            plan: record.chosen().map(|candidate| candidate.kind),
            reason: record.reason.word(),
            json,
        }
    }
}

/// A ring of the last records.
#[derive(Debug, Default)]
pub struct Recent {
    ring: Mutex<VecDeque<RecentRecord>>,
    added: Notify,
}

impl Recent {
    pub fn add(&self, record: RecentRecord) {
        let mut ring = self.ring.lock();
        if ring.len() == KEPT {
            ring.pop_front();
        }
        ring.push_back(record);
        drop(ring);
        self.added.notify_waiters();
    }

    pub fn find(&self, run: &str) -> Option<Arc<str>> {
        self.ring
            .lock()
            .iter()
            .rev()
            .find(|record| record.run == run)
            .map(|record| record.json.clone())
    }

    /// As [`Self::find`], but waits: a client may ask before the writer has got to the record.
    pub async fn find_within(&self, run: &str, patience: Duration) -> Option<Arc<str>> {
        let search = async {
            loop {
                let added = self.added.notified();
                if let Some(found) = self.find(run) {
                    return found;
                }
                added.await;
            }
        };
        tokio::time::timeout(patience, search).await.ok()
    }

    /// The last `last` records that match, oldest first.
    pub fn last(&self, last: usize, plan: Option<Kind>, reason: Option<&str>) -> Vec<Arc<str>> {
        let ring = self.ring.lock();
        let mut found: Vec<_> = ring
            .iter()
            .rev()
            .filter(|record| plan.is_none() || record.plan == plan)
            .filter(|record| reason.is_none_or(|reason| record.reason == reason))
            .take(last)
            .map(|record| record.json.clone())
            .collect();
        found.reverse();
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(run: usize, plan: Kind) -> RecentRecord {
        RecentRecord {
            run: run.to_string(),
            plan: Some(plan),
            reason: "LocalCheaper".into(),
            json: format!("{run}").into(),
        }
    }

    #[test]
    fn the_last_ones_are_kept_and_filtered() {
        let recent = Recent::default();
        for run in 0..KEPT + 2 {
            let plan = if run % 2 == 0 {
                Kind::Local
            } else {
                Kind::Remote
            };
            recent.add(record(run, plan));
        }
        assert_eq!(recent.find("1"), None, "the oldest are gone");
        assert!(recent.find("2").is_some());
        let remote = recent.last(2, Some(Kind::Remote), None);
        assert_eq!(remote, [Arc::from("1023"), Arc::from("1025")]);
        assert!(recent.last(9, None, Some("RemoteCheaper")).is_empty());
    }

    #[tokio::test]
    async fn one_that_is_being_written_is_waited_for() {
        let recent = Arc::new(Recent::default());
        let asker = tokio::spawn({
            let recent = recent.clone();
            async move { recent.find_within("7", Duration::from_secs(30)).await }
        });
        tokio::task::yield_now().await;
        recent.add(record(7, Kind::Local));
        assert_eq!(asker.await.unwrap().as_deref(), Some("7"));
    }
}
