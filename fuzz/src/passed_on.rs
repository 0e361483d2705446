//! A body that is passed on to engines: read leniently, and changed in its text for each leg. Part of the target of bodies.

use baton_placement::record::Credit;
use baton_router::forward::Forward;
use baton_router::forward::asked::{self, Endpoint};
use baton_router::forward::legs::{Leg, To, body};
use baton_router::forward::ours::{Kind, OURS, When};
use bytes::Bytes;
use serde_json::{Map, Value};

const PARAMETERS: &str = r#"{"remote_block_ids":[[1]]}"#;
/// To an engine that needs nothing beside the body.
const TO: To<'static> = To {
    kind: Kind::Vllm,
    model: None,
    operation: "run-01",
};

/// What a client may not say.
fn taken_out(name: &str, when: When) -> bool {
    OURS.iter()
        .any(|ours| ours.name == name && ours.when == when)
}

/// Whatever is read can be passed on, and says the same but for what the router must say.
pub fn check(sent: &[u8]) {
    for endpoint in [Endpoint::Chat, Endpoint::Completions, Endpoint::Other] {
        let Ok(asked) = asked::read(endpoint, sent) else {
            continue;
        };
        assert!(!asked.model.is_empty() && asked.about_tokens > 0);
        assert_eq!(asked::model(sent), Some(asked.model.clone()));
        legs(sent, asked.model);
    }
}

fn legs(sent: &[u8], model: String) {
    let forward = Forward {
        path: "/v1/completions",
        body: Bytes::copy_from_slice(sent),
        model,
        stream: false,
        keyed: None,
        prompt_tokens: 1,
        credit: Credit::Unread,
        whole: None,
    };
    let made = |leg| body(&forward, leg, TO).expect("what was read can be changed");
    let whole = made(Leg::Whole);
    let again = Forward {
        body: Bytes::from(whole.clone()),
        ..forward.clone()
    };
    let twice = body(&again, Leg::Whole, TO).expect("it stays an object");
    assert_eq!(twice, whole, "there is nothing left to take out");
    let prefill = made(Leg::Prefill);
    let decode = made(Leg::Decode {
        parameters: PARAMETERS,
    });
    // Half a surrogate pair is no text here, and an engine's to judge.
    let Ok(original) = serde_json::from_slice::<Map<String, Value>>(sent) else {
        return;
    };
    let read = |bytes: &[u8]| -> Map<String, Value> {
        serde_json::from_slice(bytes).expect("what is passed on is JSON")
    };
    let mut expected = original.clone();
    expected.retain(|name, _| !taken_out(name, When::Always));
    if let Some(Value::Object(xargs)) = expected.get_mut("vllm_xargs") {
        xargs.retain(|name, _| !taken_out(name, When::InVllmXargs));
    }
    assert_eq!(read(&whole), expected);
    if expected == original && !original.contains_key("vllm_xargs") {
        assert_eq!(whole, sent, "byte for byte");
    }
    let parameters: Value = serde_json::from_str(PARAMETERS).expect("it is written here");
    expected.insert("kv_transfer_params".to_owned(), parameters);
    assert_eq!(read(&decode), expected);
    let prefill = read(&prefill);
    assert_eq!(prefill["max_tokens"], 1);
    assert_eq!(prefill["stream"], false);
    assert!(!prefill.contains_key("stream_options") && !prefill.contains_key("min_tokens"));
    for (name, value) in &original {
        let ours = [
            "stream",
            "max_tokens",
            "max_completion_tokens",
            "stream_options",
            "min_tokens",
            "min_completion_tokens",
        ];
        if !ours.contains(&name.as_str()) && !taken_out(name, When::Always) {
            let kept = prefill.get(name).expect("it is passed on");
            assert!(kept == value || name == "vllm_xargs", "{name}");
        }
    }
}
