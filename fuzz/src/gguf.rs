//! Model files: the header, what it says of the model, and a step of the model where it is one.

use baton_text::model::ModelText;
use baton_worker::kv::store::{BlockId, BlockStore, Geometry};
use baton_worker::model::builtin::Llama;
use baton_worker::model::builtin::gguf::parse;
use baton_worker::model::{Batch, Model, Output, SequenceKey, SequenceSlice};
use baton_worker::sampling::{Sampling, sample};

/// A message names the file and the field and does not repeat what the file holds.
const LONGEST_MESSAGE: usize = 300;
/// Blocks of the pool that a model is tried with; more than it needs.
const POOL_BYTES: u64 = 64 << 20;

/// A file is a model, or one line says what is wrong with it.
pub fn check(file: &[u8]) {
    match parse(file, "m.gguf") {
        Ok(model) => serve(model),
        Err(error) => {
            let message = error.to_string();
            assert!(message.starts_with("model file m.gguf: "), "{message}");
            let length = message.chars().count();
            assert!(length <= LONGEST_MESSAGE, "{length} characters");
            assert!(!message.contains(char::is_control), "{message:?}");
        }
    }
}

/// It is a model.
pub fn accepts(file: &[u8]) -> bool {
    parse(file, "m.gguf").is_ok()
}

/// What a worker does with a model: registers it, and computes with it.
fn serve(mut model: Llama) {
    let facts = model.facts().clone();
    let shape = facts.shape;
    assert!(facts.identity(16).digest() == facts.identity(16).digest());
    for id in facts.eos_token_ids.iter().chain(&facts.bos_token_id) {
        assert!((*id as usize) < shape.vocabulary, "token {id}");
    }
    // A tokenizer that the router cannot use is refused with a message, by the router.
    let _unusable = ModelText::compile(&facts.tokenizer, &facts.chat_template);

    let geometry = Geometry {
        block_size: 2,
        bytes_per_token: shape.kv_bytes_per_token(),
    };
    let Ok(store) = BlockStore::new(geometry, 1, POOL_BYTES) else {
        return;
    };
    let history = [0];
    let batch = Batch {
        slices: vec![SequenceSlice {
            sequence: SequenceKey(1),
            history: &history,
            start: 0,
            blocks: &[BlockId(0)],
            wants_output: true,
        }],
    };
    let report = model
        .forward(&batch, &store)
        .expect("one token fits every model");
    let [Output::Logits(logits)] = report.outputs.as_slice() else {
        panic!("one slice, one row of logits: {:?}", report.outputs.len());
    };
    assert_eq!(logits.len(), shape.vocabulary);
    let sampled = sample(logits, &Sampling::greedy(), 1, &[]);
    assert!((sampled.token as usize) < shape.vocabulary);
}
