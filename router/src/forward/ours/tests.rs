//! Each member that the pinned engines know is the router's or the client's to say, and the client's stay as they are.

use baton_placement::record::Credit;
use bytes::Bytes;

use super::*;
use crate::forward::legs::{Leg, To, body};
use crate::forward::{Forward, Keyed};

/// What requests of vLLM 0.32 and SGLang have and clients may say: chat, completions, responses, messages, tokenize, detokenize.
const CLIENTS: &str = "\
    add_generation_prompt add_special_tokens allowed_token_ids background bad_words best_of betas cache_salt \
    chat_template chat_template_kwargs continue_final_message custom_labels custom_logit_processor custom_params \
    documents ebnf echo enable_response_messages frequency_penalty ignore_eos images_config include include_reasoning \
    include_stop_str_in_output input input_ids instructions json_schema length_penalty logit_bias logprob_token_ids \
    logprobs lora_path max_completion_tokens max_dynamic_patch max_output_tokens max_tokens max_tool_calls \
    media_io_kwargs messages metadata min_dynamic_patch min_p min_tokens mm_payload mm_processor_kwargs model n \
    no_stop_trim output_config parallel_tool_calls presence_penalty previous_input_messages previous_response_id \
    priority prompt prompt_cache_key prompt_embeds prompt_logprobs reasoning reasoning_effort regex repetition_detection \
    repetition_penalty response_format return_cached_tokens_details return_flat_raw_output_top_logprobs \
    return_flat_raw_top_logprobs_b64 return_hidden_states return_input_ids_in_sglext return_meta_info return_mm_kwargs \
    return_output_ids_in_sglext return_prompt_text return_prompt_token_ids return_routed_experts return_sampling_mask \
    return_spec_tokens_details return_token_ids return_token_offsets return_token_strs return_tokens_as_token_ids \
    routed_experts_prompt_start routed_experts_start_len sampling_logprobs_mode seed separate_reasoning service_tier \
    session_id session_params skip_special_tokens spaces_between_special_tokens stop stop_regex stop_sequences \
    stop_token_ids store stream stream_interval stream_options stream_reasoning structured_outputs suffix system task \
    temperature text thinking thinking_token_budget tokens tool_choice tools top_k top_logprobs top_p \
    truncate_prompt_tokens truncation truncation_side use_audio_in_video use_beam_search user video_config vllm_xargs \
    watermark watermarking";

/// Under a key whose salt and priority are the client's own.
fn whole(sent: &str, keys_in_force: bool) -> String {
    let forward = Forward {
        path: "/v1/chat/completions",
        body: Bytes::from(sent.to_owned()),
        model: "m".to_owned(),
        stream: false,
        keyed: keys_in_force.then(Keyed::default),
        prompt_tokens: 1,
        credit: Credit::Unread,
        whole: None,
    };
    let to = To {
        kind: Kind::Vllm,
        model: None,
        operation: "run-01",
    };
    String::from_utf8(body(&forward, Leg::Whole, to).unwrap()).unwrap()
}

fn object(names: impl IntoIterator<Item = &'static str>) -> String {
    let members: Vec<String> = names
        .into_iter()
        .map(|name| format!("\"{name}\": 1e0"))
        .collect();
    format!("{{ {} }}", members.join(" , "))
}

#[test]
fn what_is_the_clients_passes_byte_for_byte() {
    let sent = object(CLIENTS.split_whitespace());
    assert_eq!(whole(&sent, true), sent);
    for ours in OURS.iter().filter(|ours| ours.when != When::InVllmXargs) {
        let both = CLIENTS.split_whitespace().any(|name| name == ours.name);
        assert!(!both, "{} has two verdicts", ours.name);
    }
}

#[test]
fn what_is_the_routers_is_taken_out_of_whatever_a_client_sends() {
    let of = |when: When| {
        let those = OURS.iter().filter(move |ours| ours.when == when);
        those.map(|ours| ours.name)
    };
    let always = object(of(When::Always).chain(["model"]));
    assert_eq!(whole(&always, false), r#"{  "model": 1e0 }"#);
    let extra = object(of(When::WithKeys));
    assert_eq!(
        whole(&extra, false),
        extra,
        "without keys nothing is kept apart"
    );
    assert_eq!(whole(&extra, true), "{ }");
    let within = object(of(When::InVllmXargs).chain(["mine"]));
    assert_eq!(
        whole(&format!(r#"{{"vllm_xargs":{within}}}"#), false),
        r#"{"vllm_xargs":{  "mine": 1e0 }}"#
    );
}

#[test]
fn the_documentation_names_each_of_them() {
    let text = include_str!("../../../../docs/engines.md");
    for ours in OURS {
        let name = format!("`{}`", ours.name);
        assert!(text.contains(&name), "docs/engines.md does not name {name}");
        assert!(!ours.why.is_empty());
    }
}
