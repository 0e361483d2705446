//! The body of each leg, from the client's.

use super::Forward;
use super::edit::{Edit, edited};
use super::members::NoObject;
use super::ours::{self, Kind};

/// What a prefill worker of vLLM is told, the members of an object: compute, keep the blocks, and say how they are found.
const COMPUTE_FOR_ANOTHER: &str = r#""do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null"#;

/// What a leg is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leg<'a> {
    /// The whole request on one worker.
    Whole,
    /// The prompt, for another worker to fetch.
    Prefill,
    /// The same, where the daemon beside the engine tells whoever knows the operation how it is fetched, before the engine answers.
    Announced,
    /// The answer, from KV that is fetched with these parameters: JSON, as the prefill worker gave them.
    Decode { parameters: &'a str },
    /// One of two legs that meet in a room of the prefill worker's bootstrap server.
    Tied { host: &'a str, port: u16, room: u64 },
}

/// The engine that a leg goes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct To<'a> {
    pub kind: Kind,
    /// Its own name of the model, where it is another one.
    pub model: Option<&'a str>,
    /// The id of the run in the engine.
    pub operation: &'a str,
}

/// Why there is no body for a leg.
#[derive(Debug, thiserror::Error)]
pub enum NoBody {
    /// The client's is no JSON object: it was one when it came.
    #[error(transparent)]
    NoObject(#[from] NoObject),
    /// The engine takes no salt, and the key demands one. In words for the client.
    #[error("{0}")]
    Unsalted(&'static str),
}

/// The body of a leg.
///
/// # Errors
/// There is none for this engine.
pub fn body(forward: &Forward, leg: Leg<'_>, to: To<'_>) -> Result<Vec<u8>, NoBody> {
    if let Some(keyed) = &forward.keyed
        && keyed.cache_salt.is_some()
        && let Some(why) = ours::unsalted(to.kind, forward.path)
    {
        return Err(NoBody::Unsalted(why));
    }
    let mut edits = ours::taken_out(forward.keyed.is_some());
    edits.extend(ours::operation(to.kind, forward.path, to.operation));
    if let Some(keyed) = &forward.keyed {
        let salt = keyed.cache_salt.as_deref();
        edits.extend(salt.map(|salt| Edit::Set("cache_salt", json(salt))));
        let allowed = keyed.priority;
        edits.extend(allowed.map(|allowed| ours::priority(to.kind, forward.path, allowed)));
    }
    if let Some(model) = to.model {
        edits.push(Edit::Set("model", json(model)));
    }
    let set = |name, value: &str| Edit::Set(name, value.to_owned());
    match leg {
        Leg::Whole => {}
        Leg::Prefill | Leg::Announced => edits.extend([
            match leg {
                Leg::Announced => Edit::Set("kv_transfer_params", announced(to.operation)),
                _ => Edit::Set("kv_transfer_params", format!("{{{COMPUTE_FOR_ANOTHER}}}")),
            },
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
    Ok(edited(&forward.body, &edits)?)
}

/// What a prefill worker with Baton's connector is told.
fn announced(operation: &str) -> String {
    let operation = json(operation);
    format!(r#"{{{COMPUTE_FOR_ANOTHER},"baton":{{"operation":{operation}}}}}"#)
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
    use crate::forward::Keyed;

    fn forward(body: &str, keyed: Option<Keyed>) -> Forward {
        Forward {
            path: "/v1/chat/completions",
            body: Bytes::from(body.to_owned()),
            model: "m".to_owned(),
            stream: true,
            keyed,
            prompt_tokens: 1,
            credit: Credit::Tokens,
            whole: None,
        }
    }

    fn made(forward: &Forward, leg: Leg<'_>, kind: Kind) -> String {
        let to = To {
            kind,
            model: None,
            operation: "run-01",
        };
        String::from_utf8(body(forward, leg, to).unwrap()).unwrap()
    }

    fn leg(sent: &str, leg: Leg<'_>) -> String {
        made(&forward(sent, None), leg, Kind::Vllm)
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
    fn a_prefill_leg_that_is_announced_says_by_which_name_and_is_the_same_otherwise() {
        let mut announced: Value = serde_json::from_str(&leg(SENT, Leg::Announced)).unwrap();
        let parameters = announced["kv_transfer_params"].as_object_mut().unwrap();
        let baton = parameters.remove("baton");
        assert_eq!(baton, Some(json!({"operation": "run-01"})));
        let prefill: Value = serde_json::from_str(&leg(SENT, Leg::Prefill)).unwrap();
        assert_eq!(announced, prefill);
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
            Some(Keyed {
                cache_salt: Some("s".to_owned()),
                priority: None,
            }),
        );
        let tied = Leg::Tied {
            host: "h\"",
            port: 8998,
            room: u64::from(u32::MAX),
        };
        let to = To {
            kind: Kind::SgLang,
            model: Some("m"),
            operation: "run-01",
        };
        let bytes = body(&forward, tied, to).unwrap();
        let expected = r#"{"model":"m","bootstrap_room":4294967295,"rid":"run-01","cache_salt":"s","bootstrap_host":"h\"","bootstrap_port":8998}"#;
        assert_eq!(String::from_utf8(bytes).unwrap(), expected);
    }

    #[test]
    fn what_cannot_be_kept_apart_from_other_keys_is_not_sent() {
        let salted = |cache_salt: Option<&str>, kind, path| {
            let keyed = Keyed {
                cache_salt: cache_salt.map(str::to_owned),
                priority: None,
            };
            let forward = Forward {
                path,
                ..forward("{}", Some(keyed))
            };
            let to = To {
                kind,
                model: None,
                operation: "run-01",
            };
            body(&forward, Leg::Whole, to).is_ok()
        };
        assert!(!salted(Some("s"), Kind::SgLang, "/v1/messages"));
        assert!(salted(None, Kind::SgLang, "/v1/messages"));
        assert!(salted(Some("s"), Kind::SgLang, "/v1/responses"));
        assert!(salted(Some("s"), Kind::Vllm, "/v1/messages"));
    }

    #[test]
    fn a_run_is_named_by_the_router_where_the_body_names_it() {
        let sent = r#"{"model":"m","rid":"a","request_id":"b"}"#;
        let named = r#"{"model":"m","rid":"run-01"}"#;
        for (kind, path, expected) in [
            (Kind::SgLang, "/v1/chat/completions", named),
            (Kind::SgLang, "/v1/completions", named),
            (Kind::SgLang, "/v1/responses", r#"{"model":"m"}"#),
            (Kind::Vllm, "/v1/completions", r#"{"model":"m"}"#),
            (Kind::Other, "/v1/completions", r#"{"model":"m"}"#),
        ] {
            let forward = Forward {
                path,
                ..forward(sent, None)
            };
            for leg in [
                Leg::Whole,
                Leg::Tied {
                    host: "h",
                    port: 1,
                    room: 2,
                },
            ] {
                let body = made(&forward, leg, kind);
                assert!(
                    body.starts_with(expected.trim_end_matches('}')),
                    "{kind:?} {path} {body}"
                );
                assert!(
                    !body.contains("\"a\"") && !body.contains("request_id"),
                    "{body}"
                );
            }
        }
    }

    #[test]
    fn a_keys_bound_is_what_each_engine_reads() {
        let bound = |sent: &str, priority, kind, path| {
            let keyed = Keyed {
                cache_salt: None,
                priority: Some(priority),
            };
            let forward = Forward {
                path,
                ..forward(sent, Some(keyed))
            };
            made(&forward, Leg::Whole, kind)
        };
        let chat = "/v1/chat/completions";
        for (sent, priority, kind, path, expected) in [
            ("{}", 5, Kind::Vllm, chat, r#"{"priority":5}"#),
            ("{}", 5, Kind::Vllm, "/v1/responses", r#"{"priority":5}"#),
            ("{}", 5, Kind::Vllm, "/tokenize", "{}"),
            ("{}", 0, Kind::Vllm, chat, "{}"),
            (
                r#"{"priority":-3000000000,"priority":null}"#,
                0,
                Kind::Vllm,
                chat,
                r#"{"priority":0,"priority":0}"#,
            ),
            // The larger the more urgent, or the other way round: without it nothing is more urgent than anything.
            (
                r#"{"priority":9}"#,
                9,
                Kind::SgLang,
                chat,
                r#"{"rid":"run-01"}"#,
            ),
        ] {
            assert_eq!(
                bound(sent, priority, kind, path),
                expected,
                "{sent} {kind:?} {path}"
            );
        }
    }
}
