//! Work that takes longer than a thread that serves may be kept from serving.

use std::panic;

/// Whether there are threads besides those that serve.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Threads {
    /// Long work goes to threads of its own.
    #[default]
    Machine,
    /// There are none: long work is done at once, where it is asked for, and takes no time. In a simulation a thread would
    /// run beside its clock, and no two runs would be the same.
    Absent,
}

/// The runtime ends: the work was not begun, or its result is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the process ends")]
pub struct Ending;

impl Threads {
    /// Does `work`; a panic in it goes on here.
    ///
    /// # Errors
    /// [`Ending`] when the runtime shuts down meanwhile.
    pub async fn run<T: Send + 'static>(
        self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Ending> {
        match self {
            Self::Absent => Ok(work()),
            Self::Machine => match tokio::task::spawn_blocking(work).await {
                Ok(result) => Ok(result),
                Err(error) => match error.try_into_panic() {
                    Ok(cause) => panic::resume_unwind(cause),
                    Err(_) => Err(Ending),
                },
            },
        }
    }
}
