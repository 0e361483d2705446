//! Inputs that are right, made here: what a fuzzer begins from, and the proof that a target reaches what it is about.

pub mod engine_events;
pub mod events;
pub mod model_files;

/// A seed and a word for its file.
type Seed = (String, Vec<u8>);

fn named<const N: usize>(seeds: [(&str, &[u8]); N]) -> Vec<Seed> {
    seeds
        .into_iter()
        .map(|(name, bytes)| (name.to_owned(), bytes.to_vec()))
        .collect()
}

/// Bodies of both endpoints. Each is accepted by one of them at least.
pub fn requests() -> Vec<Seed> {
    named([
        ("chat", br#"{"model":"m","messages":[{"role":"system","content":"be brief"},{"role":"user","content":"hi"}]}"#),
        (
            "chat-full",
            br#"{"model":"m","messages":[{"role":"developer","content":"a"},{"role":"user","content":[{"type":"text","text":"b"},{"type":"text","text":"c"}],"name":"n"}],"temperature":0.5,"top_p":0.9,"top_k":-1,"min_p":0.1,"seed":-7,"max_completion_tokens":9,"max_tokens":8,"min_tokens":2,"stream":true,"stream_options":{"include_usage":true},"stop":["x","yz"],"stop_token_ids":[1,2],"logprobs":true,"top_logprobs":3,"cache_salt":"s","priority":-3,"ignore_eos":true,"n":1,"logit_bias":{},"presence_penalty":0,"response_format":{"type":"text"},"tools":[],"tool_choice":"auto","modalities":["text"],"add_generation_prompt":false,"add_special_tokens":true,"chat_template_kwargs":{"enable":true}}"#,
        ),
        (
            "chat-tools",
            br#"{"model":"m","messages":[{"role":"user","content":"weather?"},{"role":"assistant","content":null,"tool_calls":[{"id":"1","type":"function","function":{"name":"w","arguments":"{\"city\":\"Ulm\"}"}}]},{"role":"tool","tool_call_id":"1","content":"rain"}]}"#,
        ),
        ("completion", br#"{"model":"m","prompt":"once \u00e9\ud83d\ude00","max_tokens":4,"echo":false,"suffix":"","best_of":1}"#),
        ("completion-list", br#"{"model":"m","prompt":["once"],"logprobs":5,"stop":"x","seed":18446744073709551615}"#),
        ("completion-tokens", br#"{"model":"m","prompt":[[1,2,258]],"temperature":0,"add_special_tokens":false}"#),
        ("completion-ids", br#"{"model":"m","prompt":[1,2.0,3e0],"use_beam_search":false,"repetition_penalty":1.0}"#),
        ("both", br#"{"model":"m","prompt":"a","messages":[{"role":"user","content":"<|im_start|>"}]}"#),
    ])
}

/// Streams as servers send them, each with the byte that cuts it up.
pub fn streams() -> Vec<Seed> {
    named([
        ("chat", b"\x00data: {\"choices\":[{\"delta\":{\"content\":\"hi\"}}]}\n\ndata: [DONE]\n\n"),
        ("returns", b"\x01data: a\r\ndata: b\r\n\r\n: alive\r\revent: error\rdata: c\r\r"),
        ("mark", b"\x02\xef\xbb\xbfid: 7\nretry: 10\nevent: x\ndata\n\ndata: \xff\xfe\n\n"),
        ("usage", b"\x03event: error\ndata: {\"error\":{\"message\":\"m\"}}\n\ndata:\n\n\n\ndata: cut off"),
    ])
}

/// Every kind of frame.
pub fn frames() -> Vec<Seed> {
    let frame = |kind: u8, body: &[u8]| {
        let mut bytes = (body.len() as u32).to_le_bytes().to_vec();
        bytes.push(kind);
        bytes.extend_from_slice(body);
        bytes
    };
    let header: Vec<u8> = (1..=48).collect();
    let open = [&[7; 44][..], b"run-1/2/transfer"].concat();
    let block = [
        &3_u32.to_le_bytes(),
        &u32::MAX.to_le_bytes(),
        &header[..],
        &header[..],
    ]
    .concat();
    let last = [
        &4_u32.to_le_bytes(),
        &5_u32.to_le_bytes(),
        &header[..],
        &header[..],
    ]
    .concat();
    let answer = [
        frame(2, b""),
        frame(3, &block),
        frame(4, &header),
        frame(6, b""),
        frame(3, &last),
        frame(4, &header),
        frame(5, &5_u32.to_le_bytes()),
    ]
    .concat();
    let ends: Vec<u8> = [0, 1, 0xfd, 0xfe, 0xff]
        .into_iter()
        .flat_map(|why| frame(7, &[why]))
        .collect();
    let located = [
        &3_u32.to_le_bytes(),
        &u32::MAX.to_le_bytes(),
        &header[..],
        &[9, 0, 0, 0],
    ]
    .concat();
    let memory = [
        frame(8, &[7; 12]),
        frame(9, &located),
        frame(5, &4_u32.to_le_bytes()),
        frame(10, b""),
    ]
    .concat();
    named([
        ("open", &frame(1, &open)),
        ("answer", &answer),
        ("memory", &memory),
        ("ends", &ends),
    ])
}

/// The examples that the command reads, and every field of the three kinds.
pub fn resources() -> Vec<Seed> {
    named([
        ("quickstart", include_bytes!("../../examples/quickstart.yaml")),
        ("tiny", include_bytes!("../../examples/tiny.yaml")),
        (
            "policy",
            b"apiVersion: serving.baton.dev/v1alpha1\nkind: RoutePolicy\nmetadata: {name: p, labels: {a: b}}\nspec:\n  model: m\n  aliases: [other]\n  prefillPools: [{name: a}, {selector: {matchLabels: {x: z}}}]\n  decodePools: [{name: d}]\n  mode: Threshold\n  thresholdTokens: 512\n  overrides: Allowed\n  pooling: Strict\n  objective: {ttftMilliseconds: 500}\n  cost: {preset: Latency, weights: {wm: 50, lambda: 200}, marginPercent: 0, levelPenaltyMilliseconds: {rack: 3}}\n  topology: {enforcement: Required, farthestLevel: rack, breaker: {failures: 9}}\n  onNoPrefill: {action: Queue, queueMilliseconds: 7}\n  fallback: {localRecompute: {maxPercent: 33}, replans: 0}\n  firstToken: Decode\n  timeouts: {tokenSeconds: 5}\n  admission: {retryAfterSeconds: 4}\n  verify: {require: Verified, checksum: Sampled}\n  cache: {source: None, staleAfterMilliseconds: 11}\n",
        ),
        (
            "anchors",
            b"apiVersion: serving.baton.dev/v1alpha1\nkind: RoutePolicy\nmetadata: {name: p}\nspec:\n  model: m\n  prefillPools: [&d {name: d}]\n  decodePools: [*d]\n  aliases:\n  - \"\\U0001f600\"\n  - 'it''s'\n  - |-\n    x\n---\n--- # nothing\n...\n",
        ),
    ])
}
