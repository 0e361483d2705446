//! Prompts that the engine computes and another worker reads: each fills a lease block by block.

use std::collections::HashMap;

use baton_protocol::ids::{LeaseId, RunId};
use baton_system::entropy;
use serde_json::Value;

use super::operations::Prompt;
use super::{Service, descriptor};
use crate::kv::lease::LeaseOpen;
use crate::kv::{CacheScope, KvPool, Proof, Reservation, Reserve};

/// Prompts under way at a time: more than an engine computes at once, and a bound on what it can make this process remember.
const MOST: usize = 4096;
/// Milliseconds that a prompt of which a block has come waits for its next one, or its seal. A longer lease is waited for. A reader that is
/// there already waits as long as its owner: it hears of the end at once.
const QUIET: u64 = 60_000;

/// One prompt under way.
#[derive(Debug)]
struct Handing {
    tokens: Vec<u32>,
    reservation: Reservation,
    /// When its last block came, by the pool's clock. Until the first has, the prompt may wait for its turn for as long as it likes.
    published: Option<u64>,
    /// Where its router may ask for it before the engine answers.
    asked: Option<Prompt>,
}

impl Handing {
    /// It ends before its seal, and why.
    fn ends(&self, why: &str) {
        if let Some(asked) = &self.asked {
            asked.is_not_handed_over(why);
        }
    }

    fn readable(&mut self) {
        if let Some(asked) = &mut self.asked {
            asked.readable();
        }
    }

    fn publish(
        &mut self,
        pool: &KvPool,
        index: usize,
        copy: impl FnOnce(&mut [u8]) -> Option<u64>,
    ) -> Result<(), String> {
        let due = self.reservation.completed_blocks();
        let blocks = self.reservation.blocks();
        let Some(block) = blocks.get(index).filter(|_| index == due) else {
            return Err(format!("block {index} came, {due} was due"));
        };
        let Some(sum) = copy(&mut pool.store().write(*block)) else {
            return Err(format!("block {index} is not in the inbox"));
        };
        self.published = Some(pool.now());
        let size = pool.store().geometry().block_size;
        // The last block may be partly filled: it is published with the seal. What the engine had behind its last token goes with
        // it, unread at the other end: which bytes of a block are which token's is the attention kernel's affair (on a CPU, keys
        // of one token lie all over the block), so nobody here could clear them.
        if let Some(tokens) = self.tokens.get(index * size..(index + 1) * size) {
            let proof = Proof::Checked(sum);
            pool.complete_received(&mut self.reservation, index, tokens, proof)
                .map_err(|error| error.to_string())?;
            self.readable();
        }
        Ok(())
    }
}

/// All of them, by the engine's id of the request.
#[derive(Debug, Default)]
pub(super) struct Handings(HashMap<String, Handing>);

impl Handings {
    /// Reserves blocks and opens the lease. Returns the first block to be published, and the descriptor, of which whoever
    /// asks for `operation` is told.
    ///
    /// # Errors
    /// Why this prompt cannot be handed over, in a sentence.
    pub(super) fn open(
        &mut self,
        service: &Service,
        run: &RunId,
        request: String,
        tokens: Vec<u32>,
        salt: &str,
        operation: Option<&str>,
    ) -> Result<(u32, Value), String> {
        if self.0.contains_key(&request) {
            return Err("a request of this id is handed over already".to_owned());
        }
        if self.0.len() >= MOST {
            return Err(format!("{MOST} prompts are handed over at once"));
        }
        let store = service.pool.store();
        let needed = store.geometry().blocks_for(tokens.len());
        if needed > store.len() {
            let all = store.len();
            return Err(format!(
                "it takes {needed} blocks, the worker has {all}: raise kvPool.blocks or kvPool.bytes"
            ));
        }
        let count = u32::try_from(tokens.len()).map_err(|error| error.to_string())?;
        let scope = CacheScope::salted(salt);
        let reserve = Reserve {
            tokens: &tokens,
            scope: &scope,
            room: 0,
            leave_last: false,
        };
        let mut reservation = service
            .pool
            .reserve(&reserve)
            .map_err(|full| full.to_string())?;
        let id = LeaseId(entropy::bytes(&*service.entropy).map_err(|error| error.to_string())?);
        let open = LeaseOpen {
            id,
            run: run.clone(),
            duration: service.lease_milliseconds,
            skip_blocks: 0,
        };
        let opened = service
            .pool
            .open_lease(&mut reservation, &open)
            .map_err(|error| error.to_string())?;
        let descriptor = descriptor::write(&service.registered, id, &opened, count)
            .map_err(|error| error.to_string())?;
        let first = reservation.cached_blocks() as u32;
        let asked = operation.and_then(|operation| {
            let parameters = descriptor::parameters(&descriptor);
            service.operations.prompt(operation, parameters)
        });
        self.0.insert(
            request,
            Handing {
                tokens,
                reservation,
                published: None,
                asked,
            },
        );
        Ok((first, descriptor))
    }

    /// A block is there. `copy` fills it and returns the checksum of what it copied; it is not called when nobody wants the block.
    ///
    /// # Errors
    /// The blocks of this prompt came in a wrong order, or `copy` has nothing: it is not handed over.
    pub(super) fn publish(
        &mut self,
        service: &Service,
        request: &str,
        index: u32,
        copy: impl FnOnce(&mut [u8]) -> Option<u64>,
    ) -> Result<(), String> {
        let Some(handing) = self.0.get_mut(request) else {
            return Ok(());
        };
        let published = handing.publish(&service.pool, index as usize, copy);
        if let Err(why) = &published {
            handing.ends(why);
            self.0.remove(request);
        }
        published
    }

    /// Those under way are still computed, or wait to be: their leases run anew. Whoever will read them comes with the first block at the
    /// earliest, so nobody else keeps them until then; a reader that is there renews too. One that has ended stays so. One of which nothing
    /// came for too long has neither seal nor cancel to come, as when copies hang on a device: it is given up, and its reader hears of it.
    pub(super) fn extend(&mut self, service: &Service) {
        let (pool, now) = (&service.pool, service.pool.now());
        let quiet = QUIET.max(service.lease_milliseconds);
        self.0.retain(|request, handing| {
            let since = handing.published.map_or(0, |last| now.saturating_sub(last));
            if since > quiet {
                tracing::warn!(
                    request,
                    milliseconds = since,
                    "a prompt is not handed over: none of its blocks came for so long"
                );
                handing.ends("none of its blocks came for too long");
                return false;
            }
            pool.extend_lease(&handing.reservation);
            true
        });
    }

    /// All blocks are there: from now on the lease alone holds them, for all of its duration.
    ///
    /// # Errors
    /// They are not: the lease ends.
    pub(super) fn seal(&mut self, service: &Service, request: &str) -> Result<(), String> {
        let Some(mut handing) = self.0.remove(request) else {
            return Ok(());
        };
        service.pool.extend_lease(&handing.reservation);
        let sealed = service
            .pool
            .seal(&handing.reservation, handing.tokens.len())
            .map_err(|error| error.to_string());
        match &sealed {
            // Less than a block, or none that was not there before.
            Ok(_) => handing.readable(),
            Err(why) => handing.ends(why),
        }
        sealed.map(|_| ())
    }

    /// Ends one that is not sealed; its reader hears of it at once. False when there is none.
    pub(super) fn cancel(&mut self, request: &str) -> bool {
        let ended = self.0.remove(request);
        if let Some(handing) = &ended {
            handing.ends("the engine has given the prompt up");
        }
        ended.is_some()
    }

    /// Ends all that are not sealed, and says why.
    pub(super) fn end_all(&mut self, why: &str) {
        for (_, handing) in self.0.drain() {
            handing.ends(why);
        }
    }
}
