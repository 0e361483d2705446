//! Every wait of an attempt has a deadline; what a missed one means depends on what was waited for.

use baton_protocol::failure::{FailureClass, HandoffFailure};

use super::{Attempt, DecodeLeg, PrefillLeg};
use crate::clock::Moment;
use crate::dispatch::failure::Failure;
use crate::dispatch::progress::Progress;

impl Attempt {
    /// When [`Self::on_timer`] is to be called unless something is reported before. `None` only after the end.
    pub fn deadline(&self) -> Option<Moment> {
        if self.ended {
            return None;
        }
        if let Some((until, _)) = self.closing {
            return Some(until);
        }
        let prefill = match self.prefill {
            PrefillLeg::Closed | PrefillLeg::Sealed(_) => None,
            PrefillLeg::Opened(at) => Some(at.plus(self.limits.prefill_start)),
            PrefillLeg::Started(at) => Some(at.plus(self.limits.prefill)),
        };
        let decode = match (self.decode, self.prefill) {
            (DecodeLeg::Opened(at), _) => Some(at.plus(self.limits.reserve)),
            // While the source computes, its own deadline bounds the wait.
            (DecodeLeg::Reserved(_), PrefillLeg::Opened(_) | PrefillLeg::Started(_)) => None,
            (DecodeLeg::Reserved(_), PrefillLeg::Sealed(at)) => Some(at.plus(self.limits.transfer)),
            (DecodeLeg::Reserved(at), PrefillLeg::Closed) => {
                Some(at.plus(self.limits.prefill_start))
            }
            (DecodeLeg::Prefilling(at), _) => Some(at.plus(self.limits.prefill)),
            (DecodeLeg::Ready(at), _) => Some(at.plus(self.limits.decode_start)),
            (DecodeLeg::Decoding(at), _) => Some(at.plus(self.limits.token)),
        };
        match (prefill, decode) {
            (Some(prefill), Some(decode)) => Some(prefill.min(decode)),
            (one, other) => one.or(other),
        }
    }

    /// A wait was too long.
    pub fn on_timer(&mut self, now: Moment, progress: &mut Progress) {
        if self.ended || self.deadline().is_none_or(|deadline| now < deadline) {
            return;
        }
        if let Some((_, reason)) = self.closing {
            return self.complete(reason, now, progress);
        }
        let source_late = match self.prefill {
            PrefillLeg::Opened(at) => now >= at.plus(self.limits.prefill_start),
            PrefillLeg::Started(at) => now >= at.plus(self.limits.prefill),
            PrefillLeg::Closed | PrefillLeg::Sealed(_) => false,
        };
        if let (true, Some(source)) = (source_late, self.source()) {
            let worker = source.worker.clone();
            return self.fail(Failure::lost(
                &worker,
                "its prefill took too long",
                FailureClass::PrefillLost,
            ));
        }
        if let (DecodeLeg::Reserved(_), PrefillLeg::Sealed(_), Some(source)) =
            (self.decode, self.prefill, self.source())
        {
            let worker = source.worker.clone();
            return self.hand_off_failed(Failure::handoff(
                &worker,
                HandoffFailure::Timeout,
                "the transfer took too long",
            ));
        }
        let waited_for = match self.decode {
            DecodeLeg::Opened(_) => "it did not answer the reservation in time",
            DecodeLeg::Reserved(_) | DecodeLeg::Prefilling(_) => "its prefill took too long",
            DecodeLeg::Ready(_) => "it did not begin to decode in time",
            DecodeLeg::Decoding(_) => "its next token took too long",
        };
        let worker = self.target().worker.clone();
        self.fail(Failure::lost(&worker, waited_for, FailureClass::DecodeLost));
    }
}
