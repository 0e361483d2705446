//! The body of each leg, from the client's.

use super::Forward;
use super::edit::{Edit, edited};
use super::members::NoObject;

/// Names KV of another request, or where to fetch it: only the router may say that.
const OURS: [&str; 6] = [
    "kv_transfer_params",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "bootstrap_pair_key",
    "disagg_prefill_dp_rank",
];

/// What a prefill worker of vLLM is told: compute, keep the blocks, and say how they are found.
const COMPUTE_FOR_ANOTHER: &str = r#"{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}"#;

/// What a leg is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leg<'a> {
    /// The whole request on one worker.
    Whole,
    /// The prompt, for another worker to fetch.
    Prefill,
    /// The answer, from KV that is fetched with these parameters: JSON, as the prefill worker gave them.
    Decode { parameters: &'a str },
    /// One of two legs that meet in a room of the prefill worker's bootstrap server.
    Tied { host: &'a str, port: u16, room: u64 },
}

/// The body of a leg. `model` is the engine's own name of the model, where it is another one.
///
/// # Errors
/// The client's body is no JSON object: it was one when it came.
pub fn body(forward: &Forward, leg: Leg<'_>, model: Option<&str>) -> Result<Vec<u8>, NoObject> {
    let mut edits: Vec<Edit> = OURS.map(Edit::Remove).to_vec();
    edits.extend_from_slice(&forward.edits);
    if let Some(model) = model {
        edits.push(Edit::Set("model", json(model)));
    }
    let set = |name, value: &str| Edit::Set(name, value.to_owned());
    match leg {
        Leg::Whole => {}
        Leg::Prefill => edits.extend([
            set("kv_transfer_params", COMPUTE_FOR_ANOTHER),
            set("stream", "false"),
            set("max_tokens", "1"),
            Edit::Replace("max_completion_tokens", "1".to_owned()),
            // Of answers that stream, and of those that are longer than one token.
            Edit::Remove("stream_options"),
            Edit::Remove("min_tokens"),
            Edit::Remove("min_completion_tokens"),
        ]),
        Leg::Decode { parameters } => edits.push(set("kv_transfer_params", parameters)),
        Leg::Tied { host, port, room } => edits.extend([
            Edit::Set("bootstrap_host", json(host)),
            Edit::Set("bootstrap_port", port.to_string()),
            Edit::Set("bootstrap_room", room.to_string()),
        ]),
    }
    edited(&forward.body, &edits)
}

fn json(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

#[cfg(test)]
mod tests {
    use baton_placement::record::Credit;
    use bytes::Bytes;
    use serde_json::{Value, json};

    use super::*;

    fn forward(body: &str, edits: Vec<Edit>) -> Forward {
        Forward {
            path: "/v1/chat/completions",
            body: Bytes::from(body.to_owned()),
            model: "m".to_owned(),
            stream: true,
            edits,
            prompt_tokens: 1,
            credit: Credit::Tokens,
            whole: None,
        }
    }

    fn leg(sent: &str, leg: Leg<'_>) -> String {
        String::from_utf8(body(&forward(sent, Vec::new()), leg, None).unwrap()).unwrap()
    }

    const SENT: &str = r#"{"model": "m", "tools": [{"x" : 1e3}], "stream": true, "stream_options": {"include_usage": true}, "max_completion_tokens": 9, "min_tokens": 2, "logit_bias": {"5": -100}, "kv_transfer_params": {"remote_host": "evil"}}"#;

    #[test]
    fn a_whole_request_is_what_was_sent_without_what_is_not_the_clients_to_say() {
        let whole = leg(SENT, Leg::Whole);
        assert_eq!(
            whole,
            SENT.replace(r#", "kv_transfer_params": {"remote_host": "evil"}"#, "")
        );
        let plain = r#"{"model":"m","messages":[]}"#;
        assert_eq!(leg(plain, Leg::Whole), plain);
    }

    #[test]
    fn a_prefill_leg_asks_for_one_token_that_does_not_stream() {
        let prefill: Value = serde_json::from_str(&leg(SENT, Leg::Prefill)).unwrap();
        let expected = json!({
            "model": "m", "tools": [{"x": 1e3}], "stream": false, "max_completion_tokens": 1,
            "max_tokens": 1, "logit_bias": {"5": -100},
            "kv_transfer_params": {"do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": null,
                "remote_block_ids": null, "remote_host": null, "remote_port": null},
        });
        assert_eq!(prefill, expected);
        let plain: Value = serde_json::from_str(&leg("{}", Leg::Prefill)).unwrap();
        assert!(plain.get("max_completion_tokens").is_none());
    }

    #[test]
    fn a_decode_leg_carries_the_parameters_byte_for_byte() {
        let parameters = r#"{ "remote_block_ids" : [[1, 2]], "later": 1.0 }"#;
        let sent = r#"{"model":"m","max_tokens":4}"#;
        assert_eq!(
            leg(sent, Leg::Decode { parameters }),
            format!(r#"{{"model":"m","max_tokens":4,"kv_transfer_params":{parameters}}}"#)
        );
    }

    #[test]
    fn tied_legs_name_the_room_and_the_engines_own_name_of_the_model_is_used() {
        let forward = forward(
            r#"{"model":"alias","bootstrap_room":1}"#,
            vec![Edit::Set("cache_salt", "\"s\"".to_owned())],
        );
        let tied = Leg::Tied {
            host: "h\"",
            port: 8998,
            room: u64::from(u32::MAX),
        };
        let bytes = body(&forward, tied, Some("m")).unwrap();
        let expected = r#"{"model":"m","bootstrap_room":4294967295,"cache_salt":"s","bootstrap_host":"h\"","bootstrap_port":8998}"#;
        assert_eq!(String::from_utf8(bytes).unwrap(), expected);
    }
}
