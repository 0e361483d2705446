//! Model folders as they are found, old and new forms.

use serde_json::json;

use super::*;

fn folder(files: &[(&str, &str)]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (name, contents) in files {
        fs::write(folder.path().join(name), contents).unwrap();
    }
    folder
}

const LLAMA: &str = r#"{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64,
    "rope_theta": 10000.0, "torch_dtype": "bfloat16"}"#;

#[test]
fn the_digest_is_of_the_files_as_they_are() {
    let read = |files: &[(&str, &str)]| read(folder(files).path()).unwrap().weights;
    let one = read(&[("a.safetensors", "12"), ("config.json", LLAMA)]);
    assert_eq!(one, read(&[("a.safetensors", "12")]), "only weights count");
    for other in [
        &[("a.safetensors", "13")][..],
        &[("b.safetensors", "12")],
        &[("a.safetensors", "1"), ("b.safetensors", "2")],
    ] {
        assert_ne!(one, read(other));
    }
}

#[test]
fn a_folder_that_cannot_be_used_says_what_to_give() {
    let error = read(folder(&[("config.json", "[]"), ("a.safetensors", "")]).path()).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("config.json: it is no JSON object"),
        "{error}"
    );
    let error = read(folder(&[]).path()).unwrap_err().to_string();
    assert!(
        error.contains("no *.safetensors: give the folder"),
        "{error}"
    );
    let error = read(Path::new("/nowhere")).unwrap_err().to_string();
    assert!(
        error.contains("/nowhere") && error.contains("give the folder"),
        "{error}"
    );
}

#[test]
fn the_template_is_found_wherever_it_lies() {
    let template = |files: &[(&str, &str)]| {
        let mut files = files.to_vec();
        files.push(("a.safetensors", ""));
        let folder = read(folder(&files).path()).unwrap();
        serde_json::from_slice::<Value>(&folder.chat_template).unwrap()
    };
    let config = r#"{"chat_template": "T", "bos_token": {"content": "<s>"}, "eos_token": "</s>", "add_bos_token": true}"#;
    assert_eq!(
        template(&[("tokenizer_config.json", config)]),
        json!({"chat_template": "T", "bos_token": "<s>", "eos_token": "</s>", "add_bos": true})
    );
    let both = template(&[
        ("tokenizer_config.json", config),
        ("chat_template.jinja", "J"),
    ]);
    assert_eq!(both["chat_template"], "J");
    let several = r#"{"chat_template": [{"name": "tool_use", "template": "U"}, {"name": "default", "template": "D"}]}"#;
    assert_eq!(
        template(&[("tokenizer_config.json", several)])["chat_template"],
        "D"
    );
    let beside = template(&[("chat_template.json", r#"{"chat_template": "B"}"#)]);
    assert_eq!(beside["chat_template"], "B");
    assert_eq!(template(&[])["chat_template"], "");
}

#[test]
fn attention_and_positions_are_read_in_old_and_new_forms() {
    let config: Value = serde_json::from_str(LLAMA).unwrap();
    let described = Described::of(&config);
    assert_eq!(
        described.attention().known().unwrap().to_string(),
        "Full 2 layers x 2 KV heads x 16"
    );
    assert_eq!(described.bytes_per_token(2), Some(2 * 2 * 2 * 16 * 2));
    assert_eq!(
        described.rope().known().unwrap().to_string(),
        "base 10000.0 over 16 dimensions, scaling None"
    );
    assert_eq!(described.sliding_window().known(), Some(&0));
    assert_eq!(described.processor().known().unwrap(), "None");
    assert_eq!(described.dtype(), Some("bfloat16"));

    let newer = json!({"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64, "head_dim": 8, "sliding_window": 128,
        "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}, "dtype": "float16"});
    let newer = Described::of(&newer);
    assert_eq!(newer.attention().known().unwrap().kind, "SlidingWindow");
    assert_eq!(newer.sliding_window().known(), Some(&128));
    assert_eq!(newer.rope().known().unwrap().scaling, "None");
    assert_eq!(newer.dtype(), Some("float16"));

    let scaled = json!({"num_attention_heads": 4, "hidden_size": 64, "rope_theta": 1,
        "rope_scaling": {"type": "linear", "factor": 2}});
    let scaling = Described::of(&scaled)
        .rope()
        .known()
        .unwrap()
        .scaling
        .clone();
    assert_eq!(scaling, r#"{"factor":2,"rope_type":"linear"}"#);

    let latent = json!({"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_attention_heads": 128, "hidden_size": 7168});
    assert_eq!(Described::of(&latent).bytes_per_token(2), Some(70_272));
    let seeing = json!({"vision_config": {}, "text_config": {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}});
    assert_eq!(Described::of(&seeing).processor().known(), None);
    assert!(Described::of(&seeing).attention().known().is_some());
}

#[test]
fn what_a_file_does_not_say_is_unknown() {
    let nothing = Value::Null;
    let nothing = Described::of(&nothing);
    assert_eq!(nothing.attention(), Fact::unknown());
    assert_eq!(nothing.rope(), Fact::unknown());
    assert_eq!(nothing.sliding_window(), Fact::unknown());
    assert_eq!(nothing.processor(), Fact::unknown());
    assert_eq!(nothing.bytes_per_token(2), None);
}
