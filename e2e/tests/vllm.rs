//! Two real vLLM servers on this machine's processor, one that prefills and one that decodes, behind Baton: once with the connector that
//! moves KV by itself (NIXL), once with Baton's own, which has every block checked. Each pair is started once for all that is asked of it.
//! A machine without vLLM (`e2e/engines/vllm install`) says so and does none of it.

#[path = "vllm/aborts.rs"]
mod aborts;
#[path = "vllm/baton.rs"]
mod baton;
#[path = "vllm/deaths.rs"]
mod deaths;
#[path = "vllm/early.rs"]
mod early;
#[path = "vllm/equal.rs"]
mod equal;
#[path = "vllm/events.rs"]
mod events;
#[path = "vllm/gated.rs"]
mod gated;
#[path = "vllm/leases.rs"]
mod leases;
#[path = "vllm/nixl.rs"]
mod nixl;
#[path = "vllm/odd.rs"]
mod odd;

use baton_e2e::vllm::{Vllm, plug_in_tests};
use baton_e2e::{scenario, told};

#[test]
fn bytes_are_checked_where_batons_connector_moves_them() {
    scenario(async {
        let Some(vllm) = Vllm::found()? else {
            return Ok(());
        };
        let said = plug_in_tests(&vllm)?;
        told(said.trim().lines().rev().nth(2).unwrap_or_default());
        Box::pin(baton::connector(&vllm)).await
    });
}

#[test]
fn vllms_own_connector_gives_the_same_answers() {
    scenario(async {
        let Some(vllm) = Vllm::found()? else {
            return Ok(());
        };
        Box::pin(nixl::connector(&vllm)).await
    });
}
