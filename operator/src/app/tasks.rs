//! Tasks that must not end before the process does: one that does takes the process with it, with the reason.

use std::collections::HashMap;

use anyhow::{Error, anyhow};
use tokio::task::{Id, JoinError, JoinSet};
use tracing::warn;

/// Dropped, it ends them all.
#[derive(Debug, Default)]
pub(super) struct Tasks {
    running: JoinSet<()>,
    names: HashMap<Id, &'static str>,
}

impl Tasks {
    pub(super) fn spawn(
        &mut self,
        name: &'static str,
        task: impl Future<Output = ()> + Send + 'static,
    ) {
        let id = self.running.spawn(task).id();
        self.names.insert(id, name);
    }

    /// Returns when one has ended, with why. Never, where there is none.
    pub(super) async fn failed(&mut self) -> Error {
        match self.running.join_next_with_id().await {
            Some(ended) => self.said(ended),
            None => std::future::pending().await,
        }
    }

    /// Waits until all have ended, as they were told to.
    pub(super) async fn all(mut self) {
        while let Some(ended) = self.running.join_next_with_id().await {
            if ended.is_err() {
                warn!("{}", self.said(ended));
            }
        }
    }

    fn said(&self, ended: Result<(Id, ()), JoinError>) -> Error {
        let (id, why) = match ended {
            Ok((id, ())) => (id, "it has returned".to_owned()),
            Err(error) => (error.id(), error.to_string()),
        };
        let name = self.names.get(&id).copied().unwrap_or("a task");
        anyhow!("{name}: {why}: this is a fault of the operator, which starts anew")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_task_that_panics_or_returns_is_told_of_by_its_name() {
        let mut tasks = Tasks::default();
        tasks.spawn("one that lasts", std::future::pending());
        tasks.spawn("Node", async { panic!("a label") });
        let said = tasks.failed().await.to_string();
        assert!(
            said.starts_with("Node: ") && said.contains("a label"),
            "{said}"
        );
        tasks.spawn("Pod", async {});
        let said = tasks.failed().await.to_string();
        assert!(said.starts_with("Pod: it has returned"), "{said}");
    }
}
