//! `Local` addresses: they mean something within one process only, so they carry a number that no other process has.

use std::sync::OnceLock;

use baton_protocol::card::Card;

/// Begin of every `Local` address of this process.
fn prefix() -> String {
    static PROCESS: OnceLock<String> = OnceLock::new();
    PROCESS
        .get_or_init(|| {
            let mut nonce = [0; 8];
            // Without random numbers the process id tells processes of one machine apart, and `Local` is within one anyway.
            if getrandom::fill(&mut nonce).is_err() {
                nonce = u64::from(std::process::id()).to_le_bytes();
            }
            format!("process-{:016x}/", u64::from_le_bytes(nonce))
        })
        .clone()
}

/// Address of one worker of this process.
pub(crate) fn address(card: &Card) -> String {
    format!("{}{}-{}", prefix(), card.worker, card.incarnation)
}
