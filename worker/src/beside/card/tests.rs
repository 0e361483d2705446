//! Cards of servers: what is observed, declared, unknown, and contradicted; which pair and which do not.

use baton_protocol::identity::{FactSource, compatible};
use serde_json::json;

use super::*;
use crate::beside::exposition::Reading;
use crate::beside::told::EventSource;

fn config(change: impl FnOnce(&mut Value)) -> WorkerConfig {
    let mut json = json!({
        "name": "p0", "pool": "prefill", "role": "Prefill", "model": {"name": "tiny", "revision": "r1"},
        "engine": {"type": "VLLM", "url": "http://127.0.0.1:8200", "blockSize": 32, "connector": "Nixl", "sideChannel": ":5600"},
        "kvPool": {"leaseSeconds": 20},
    });
    change(&mut json);
    let config: WorkerConfig = serde_json::from_value(json).unwrap();
    config.check().unwrap();
    config
}

fn told() -> Told {
    Told {
        version: "0.32.0".into(),
        max_length: 4096,
        metrics: Reading {
            block_size: Some(32),
            blocks: Some(400),
            cache_dtype: Some("auto".into()),
            prefix_caching: Some(true),
            ..Reading::default()
        },
        ..Told::default()
    }
}

fn handshake() -> Handshake {
    Handshake {
        compatibility_hash: "c0ffee".into(),
        engine_id: "e1".into(),
        block_size: 32,
        block_lengths: vec![16_384, 16_384],
        layout: "LBHNC".into(),
        attention_backend: "CPU_ATTN".into(),
    }
}

fn folder() -> ModelFolder {
    ModelFolder {
        weights: "blake3:1".into(),
        config: json!({"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64,
            "rope_theta": 10000.0, "torch_dtype": "bfloat16"}),
        tokenizer: Some(bytes::Bytes::from_static(b"tokenizer")),
        chat_template: bytes::Bytes::from_static(b"template"),
    }
}

fn card(
    config: &WorkerConfig,
    told: &Told,
    handshake: Option<&Handshake>,
    folder: Option<&ModelFolder>,
) -> Card {
    write(
        config,
        Found {
            incarnation: Incarnation(1),
            told,
            handshake,
            folder,
            text: TextCheck::Verified,
            control_address: "10.0.0.7:7000".into(),
            url: "http://10.0.0.7:8200".into(),
            side_channel: Some("10.0.0.7:5600".into()),
            bootstrap: Some(("10.0.0.7".into(), 8998)),
        },
    )
}

#[test]
fn what_the_connector_says_is_in_the_card_and_two_that_agree_pair() {
    let card = card(
        &config(|_| {}),
        &told(),
        Some(&handshake()),
        Some(&folder()),
    );
    assert_eq!(card.layout.order, Fact::observed("LBHNC".to_owned()));
    assert_eq!(card.layout.engine_hash, Fact::observed("c0ffee".to_owned()));
    assert_eq!(
        card.layout.bytes_per_token.known(),
        Some(&(2 * 2 * 2 * 16 * 2))
    );
    let lease_milliseconds = 20_000;
    let Dispatch::OpenAiHttp { url, split, .. } = &card.dispatch else {
        panic!("a server is called over HTTP");
    };
    assert_eq!(url, "http://10.0.0.7:8200");
    assert_eq!(*split, Split::NixlPull { lease_milliseconds });
    let offer = &card.transports[0];
    assert_eq!(
        (offer.kind.as_str(), offer.address.as_str()),
        ("Nixl", "10.0.0.7:5600")
    );
    assert!(Card::from_json(&card.to_json().unwrap()).is_ok());
    assert!(compatible(&card, &card).is_ok());
}

#[test]
fn servers_that_differ_do_not_pair_and_the_field_is_named() {
    let (config, told, handshake, folder) = (config(|_| {}), told(), handshake(), folder());
    let base = card(&config, &told, Some(&handshake), Some(&folder));
    let mut blocks = told.clone();
    blocks.metrics.block_size = Some(16);
    let mut narrow = told.clone();
    narrow.metrics.cache_dtype = Some("fp8_e4m3".into());
    let mut other = folder.clone();
    other.weights = "blake3:2".into();
    let mut version = handshake.clone();
    version.compatibility_hash = "decaf".into();
    for (other, field) in [
        (
            card(&config, &blocks, Some(&handshake), Some(&folder)),
            "identity.blockSize",
        ),
        (
            card(&config, &narrow, Some(&handshake), Some(&folder)),
            "identity.kvDtype",
        ),
        (
            card(&config, &told, Some(&handshake), Some(&other)),
            "identity.weights",
        ),
        (
            card(&config, &told, Some(&version), Some(&folder)),
            "layout.engineHash",
        ),
        (
            card(&config, &told, Some(&handshake), None),
            "identity.attention",
        ),
    ] {
        let differences = compatible(&base, &other).unwrap_err();
        assert!(
            differences.iter().any(|one| one.field == field),
            "{field}: {differences:?}"
        );
    }
}

#[test]
fn the_format_of_the_cache_is_the_servers_word_before_anybody_elses() {
    let dtype = |config: &WorkerConfig, told: &Told, folder: Option<&ModelFolder>| {
        let fact = card(config, told, None, folder).identity.kv_dtype;
        (fact.known().cloned(), fact.source())
    };
    let some = |name: &str| Some(name.to_owned());
    let plain = config(|_| {});
    let declared = config(|json| json["engine"]["dtype"] = "F16".into());
    let folder = folder();
    assert_eq!(dtype(&plain, &told(), None), (None, FactSource::Unknown));
    // The server may have been told another than its files say.
    assert_eq!(
        dtype(&plain, &told(), Some(&folder)),
        (some("BF16"), FactSource::Declared)
    );
    let scales = |told: &Told| {
        let scales = card(&plain, told, None, Some(&folder))
            .identity
            .quantization;
        (scales.known().cloned(), scales.source())
    };
    assert_eq!(scales(&told()), (some("None"), FactSource::Declared));
    assert_eq!(
        dtype(&declared, &told(), Some(&folder)),
        (some("F16"), FactSource::Declared)
    );
    let mut developing = told();
    developing.dtype = Some("torch.float16".into());
    assert_eq!(scales(&developing), (some("None"), FactSource::Observed));
    assert_eq!(
        dtype(&plain, &developing, Some(&folder)),
        (some("F16"), FactSource::Observed)
    );
    let mut narrow = developing;
    narrow.metrics.cache_dtype = Some("fp8".into());
    assert_eq!(
        dtype(&declared, &narrow, Some(&folder)),
        (some("F8E4M3"), FactSource::Observed)
    );
    // What a server makes of weights in full is its own choice.
    let mut wide = folder;
    wide.config["torch_dtype"] = "float32".into();
    assert_eq!(dtype(&plain, &told(), Some(&wide)).1, FactSource::Unknown);
}

#[test]
fn contradictions_are_said_with_both_values() {
    let config = config(|json| {
        json["engine"]["maxModelLength"] = 2048.into();
        json["engine"]["dtype"] = "F16".into();
        json["engine"]["kvCacheDtype"] = "F8E5M2".into();
        json["engine"]["quantization"] = "Awq".into();
    });
    let mut told = told();
    told.metrics.block_size = Some(16);
    told.metrics.cache_dtype = Some("fp8_e4m3".into());
    told.dtype = Some("torch.bfloat16".into());
    let mut folder = folder();
    folder.config["quantization_config"] = json!({"quant_method": "gptq"});
    let notices = card(&config, &told, None, Some(&folder)).notices;
    for words in [
        "engine.blockSize: declared is 32, the server has 16: correct",
        "engine.maxModelLength: declared is 2048, the server has 4096",
        "engine.dtype: declared is F16, the server has BF16",
        "engine.kvCacheDtype: declared is F8E5M2, the server has F8E4M3",
        "engine.quantization: declared is awq, the server has gptq",
    ] {
        assert!(
            notices.iter().any(|notice| notice.starts_with(words)),
            "{words}: {notices:?}"
        );
    }
    let right = config_of_the_right_server();
    let notices = card(&right, &self::told(), None, Some(&self::folder())).notices;
    assert!(
        !notices.iter().any(|notice| notice.contains("declared is")),
        "{notices:?}"
    );
}

#[test]
fn what_is_assumed_and_why_no_prefix_is_credited_is_said() {
    let source = |endpoint: &str| EventSource {
        endpoint: endpoint.to_owned(),
        replay: None,
    };
    let notices = |told: &Told, text: TextCheck| {
        let found = Found {
            incarnation: Incarnation(1),
            told,
            handshake: None,
            folder: None,
            text,
            control_address: "10.0.0.7:7000".into(),
            url: "http://10.0.0.7:8200".into(),
            side_channel: None,
            bootstrap: None,
        };
        write(&config(|_| {}), found).notices
    };
    let mut silent = told();
    silent.events = vec![source("ipc:///run/kv")];
    let reason = "sample text 1: at place 1".to_owned();
    let said = notices(&silent, TextCheck::Unverified { reason });
    for words in [
        "capacity.maxSequences: the server does not say how many requests it runs at once: 256 is assumed",
        "events: the engine publishes its events at ipc:///run/kv: give it a tcp:// endpoint",
        "tokenizer: unverified: sample text 1: at place 1: no prefix is credited",
    ] {
        assert!(
            said.iter().any(|notice| notice.starts_with(words)),
            "{words}: {said:?}"
        );
    }
    let mut told = silent;
    told.events = vec![source("tcp://*:5557")];
    told.max_sequences = Some(48);
    let said = notices(&told, TextCheck::Verified);
    for word in ["capacity", "events", "tokenizer: "] {
        assert!(
            !said.iter().any(|notice| notice.starts_with(word)),
            "{word}: {said:?}"
        );
    }
}

fn config_of_the_right_server() -> WorkerConfig {
    config(|json| {
        json["engine"]["dtype"] = "BF16".into();
        json["engine"]["kvCacheDtype"] = "Auto".into();
        json["engine"]["quantization"] = "None".into();
        json["engine"]["maxModelLength"] = 4096.into();
    })
}

#[test]
fn sglang_servers_pair_over_their_bootstrap_server() {
    let config = config(|json| {
        json["engine"] = json!({"type": "SGLang", "url": "http://127.0.0.1:30000", "blockSize": 32, "connector": "Sglang"});
    });
    let mut told = told();
    told.layout = Some("SGLang 0.5.23, attention backend fa3".into());
    told.tensor = Some(2);
    let card = card(&config, &told, None, Some(&folder()));
    let Dispatch::OpenAiHttp { split, .. } = &card.dispatch else {
        panic!("a server is called over HTTP");
    };
    let (host, port) = ("10.0.0.7".to_owned(), 8998);
    assert_eq!(*split, Split::Bootstrap { host, port });
    assert_eq!(card.transports[0].kind, "Sglang");
    assert_eq!(card.layout.tensor, Fact::observed(2));
    assert!(compatible(&card, &card).is_ok());
}
