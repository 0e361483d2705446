//! The descriptor of a hand-off as JSON: it travels in `kv_transfer_params.baton` of one engine's answer to another engine's request,
//! through a router that does not look into it.

use baton_protocol::ids::LeaseId;
use baton_protocol::wire;
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::Registered;
use crate::kv::lease::LeaseOpened;

/// Of this form.
const VERSION: u32 = 1;

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Json {
    version: u32,
    worker: String,
    /// 16 hexadecimal digits: a number of that size is not the same in every JSON reader.
    incarnation: String,
    /// 32 hexadecimal digits. A capability.
    lease: String,
    generation: u64,
    expires_in_milliseconds: u64,
    kv_identity: String,
    layout_digest: String,
    control_address: String,
    transports: Vec<Address>,
    tokens: u32,
}

#[derive(Debug, Serialize, Deserialize)]
struct Address {
    kind: String,
    address: String,
}

/// What an engine's answer carries.
///
/// # Errors
/// Only where JSON cannot be written at all.
pub fn write(
    own: &Registered,
    lease: LeaseId,
    opened: &LeaseOpened,
    tokens: u32,
) -> Result<Value, serde_json::Error> {
    let transports = own.transports.iter().map(|offer| Address {
        kind: offer.kind.clone(),
        address: offer.address.clone(),
    });
    serde_json::to_value(Json {
        version: VERSION,
        worker: own.worker.to_string(),
        incarnation: own.incarnation.to_string(),
        lease: hexadecimal(&lease.0),
        generation: opened.generation.0,
        expires_in_milliseconds: opened.expires_in,
        kv_identity: own.kv_identity.clone(),
        layout_digest: own.layout_digest.clone(),
        control_address: own.control_address.clone(),
        transports: transports.collect(),
        tokens,
    })
}

/// The whole `kv_transfer_params` of the engine's answer, as its plug-in writes it (`finished` in `baton_vllm/scheduler.py`): for whoever
/// is to know before the answer is there.
pub fn parameters(descriptor: &Value) -> String {
    json!({"do_remote_prefill": true, "do_remote_decode": false, "baton": descriptor}).to_string()
}

/// As it goes over the wire between workers.
///
/// # Errors
/// A sentence that names the field.
pub fn read(descriptor: Value) -> Result<wire::Descriptor, String> {
    let json: Json = serde_json::from_value(descriptor)
        .map_err(|error| format!("kv_transfer_params.baton: {error}"))?;
    if json.version != VERSION {
        return Err(format!(
            "kv_transfer_params.baton: version {}, this worker reads {VERSION}: run the same release on both",
            json.version
        ));
    }
    let incarnation = u64::from_str_radix(&json.incarnation, 16)
        .map_err(|error| format!("kv_transfer_params.baton.incarnation: {error}"))?;
    let lease = bytes(&json.lease)
        .ok_or("kv_transfer_params.baton.lease: it must be 32 hexadecimal digits")?;
    Ok(wire::Descriptor {
        worker: json.worker,
        incarnation,
        lease,
        generation: json.generation,
        expires_in_milliseconds: json.expires_in_milliseconds,
        kv_identity: json.kv_identity,
        layout_digest: json.layout_digest,
        control_address: json.control_address,
        transports: json
            .transports
            .into_iter()
            .map(|Address { kind, address }| wire::TransportAddress { kind, address })
            .collect(),
        skip_blocks: 0,
        tokens: json.tokens,
    })
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn bytes(digits: &str) -> Option<Bytes> {
    let whole = digits.len() == 32 && digits.is_ascii();
    let byte = |at: usize| u8::from_str_radix(digits.get(at..at + 2)?, 16).ok();
    whole
        .then(|| (0..32).step_by(2).map(byte).collect::<Option<Vec<u8>>>())
        .flatten()
        .map(Bytes::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_survives_and_nonsense_does_not() {
        let lease: Vec<u8> = (0..16).map(|byte| byte * 16 + 1).collect();
        assert_eq!(bytes(&hexadecimal(&lease)).as_deref(), Some(&lease[..]));
        for wrong in [
            "",
            "00",
            "0g000000000000000000000000000000",
            "ä000000000000000000000000000000",
        ] {
            assert_eq!(bytes(wrong), None, "{wrong}");
        }
        assert!(read(Value::Null).expect_err("nothing").contains("baton"));
    }
}
