//! The lease protocol as its reader calls it; gRPC in a worker, the pool itself in tests and inside one process.

use baton_protocol::ids::{Generation, LeaseId, TransferId};
use futures::future::BoxFuture;
use thiserror::Error;

use crate::kv::KvPool;
use crate::kv::lease::{Completion, Gone, Granted, Reader};

/// The owner could not be asked. It may or may not have heard the question; all of them may be asked again.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("lease protocol: {0}: ask again or recompute")]
pub struct CallFailed(pub String);

/// Answer to a claim or renewal.
pub type Grant = Result<Granted, Gone>;

/// Calls to the worker that owns the lease. Each ends by itself: an implementation has its own deadline.
pub trait LeaseClient: Send + Sync {
    /// Takes the lease for this reader. Idempotent for one transfer.
    fn claim<'a>(
        &'a self,
        lease: LeaseId,
        generation: Generation,
        reader: &'a Reader,
    ) -> BoxFuture<'a, Result<Grant, CallFailed>>;

    /// Extends it.
    fn renew<'a>(
        &'a self,
        lease: LeaseId,
        generation: Generation,
        transfer: &'a TransferId,
    ) -> BoxFuture<'a, Result<Grant, CallFailed>>;

    /// Reports the end of the read. Idempotent for one transfer.
    fn complete<'a>(
        &'a self,
        lease: LeaseId,
        generation: Generation,
        transfer: &'a TransferId,
        verified: bool,
    ) -> BoxFuture<'a, Result<Completion, CallFailed>>;
}

impl LeaseClient for KvPool {
    fn claim<'a>(
        &'a self,
        lease: LeaseId,
        generation: Generation,
        reader: &'a Reader,
    ) -> BoxFuture<'a, Result<Grant, CallFailed>> {
        Box::pin(async move { Ok(Self::claim(self, lease, generation, reader)) })
    }

    fn renew<'a>(
        &'a self,
        lease: LeaseId,
        generation: Generation,
        transfer: &'a TransferId,
    ) -> BoxFuture<'a, Result<Grant, CallFailed>> {
        Box::pin(async move { Ok(Self::renew(self, lease, generation, transfer)) })
    }

    fn complete<'a>(
        &'a self,
        lease: LeaseId,
        generation: Generation,
        transfer: &'a TransferId,
        verified: bool,
    ) -> BoxFuture<'a, Result<Completion, CallFailed>> {
        Box::pin(async move { Ok(self.complete_read(lease, generation, transfer, verified)) })
    }
}
