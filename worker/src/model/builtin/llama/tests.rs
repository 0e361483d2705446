//! The whole model: chunks, batches and reused blocks change nothing, and bad batches are refused.

use super::super::super::{SequenceKey, tiny};
use super::*;
use crate::kv::store::{BlockId, Geometry};
use crate::sampling::{Sampling, sample};

const BLOCK_SIZE: usize = 16;

fn store(blocks: usize) -> BlockStore {
    let geometry = Geometry {
        block_size: BLOCK_SIZE,
        bytes_per_token: tiny::SHAPE.kv_bytes_per_token(),
    };
    let kv = BlockStore::new(geometry, blocks, u64::MAX).expect("small");
    // Stale bytes must never count.
    for block in 0..blocks {
        kv.write(BlockId(block as u32)).fill(0x7e);
    }
    kv
}

fn prompt(length: usize, seed: u32) -> Vec<u32> {
    (0..length as u32)
        .map(|index| (index * 37 + seed * 101 + index * index % 13) % 256)
        .collect()
}

fn blocks(from: u32, tokens: usize) -> Vec<BlockId> {
    // Backwards, so that order in the table and order in memory differ.
    let count = tokens.div_ceil(BLOCK_SIZE) as u32;
    (from..from + count).rev().map(BlockId).collect()
}

fn slice<'a>(history: &'a [u32], start: usize, blocks: &'a [BlockId]) -> SequenceSlice<'a> {
    SequenceSlice {
        sequence: SequenceKey(1),
        history,
        start,
        blocks,
        wants_output: true,
    }
}

fn logits(output: &Output) -> &[f32] {
    match output {
        Output::Logits(logits) => logits,
        other => panic!("expected logits, found {other:?}"),
    }
}

fn forward(model: &mut Llama, kv: &BlockStore, slices: Vec<SequenceSlice<'_>>) -> Vec<Output> {
    model
        .forward(&Batch { slices }, kv)
        .expect("computes")
        .outputs
}

/// Computes a prompt in chunks; returns the last logits and all KV bytes of its full tokens.
fn chunked(model: &mut Llama, tokens: &[u32], chunk: usize) -> (Vec<f32>, Vec<Vec<u8>>) {
    let kv = store(40);
    let table = blocks(3, tokens.len());
    let mut last = Vec::new();
    let mut start = 0;
    while start < tokens.len() {
        let end = (start + chunk).min(tokens.len());
        let outputs = forward(model, &kv, vec![slice(&tokens[..end], start, &table)]);
        last = logits(&outputs[0]).to_vec();
        start = end;
    }
    let full = tokens.len() / BLOCK_SIZE;
    let bytes = table[..full].iter().map(|id| kv.read(*id).to_vec());
    (last, bytes.collect())
}

#[test]
fn chunks_give_the_bits_of_the_whole_prompt() {
    let mut model = tiny::model(7);
    // Longer than a panel, so that the inner cut is met too.
    let tokens = prompt(PANEL + 77, 1);
    let whole = chunked(&mut model, &tokens, tokens.len());
    for chunk in [1, 7, 16, 100] {
        let found = chunked(&mut model, &tokens, chunk);
        assert!(found == whole, "chunks of {chunk} differ");
    }
}

#[test]
fn every_instruction_set_gives_the_bits_of_the_others() {
    let tokens = prompt(PANEL + 77, 1);
    let mut all = Host::all().into_iter();
    let first = all.next().expect("the portable one");
    let expected = chunked(&mut tiny::model(7).on(first), &tokens, 100);
    for host in all {
        let found = chunked(&mut tiny::model(7).on(host), &tokens, 100);
        assert!(found == expected, "{} differs", host.name());
    }
}

#[test]
fn eight_mixed_sequences_give_the_bits_of_each_alone() {
    let mut model = tiny::model(7);
    let lengths = [1, 3, 16, 17, 40, 90, 5, 130];
    let prompts: Vec<Vec<u32>> = lengths
        .iter()
        .zip(0..)
        .map(|(length, seed)| prompt(*length, seed))
        .collect();
    let alone: Vec<Vec<f32>> = prompts
        .iter()
        .map(|tokens| chunked(&mut model, tokens, tokens.len()).0)
        .collect();

    let kv = store(200);
    let tables: Vec<Vec<BlockId>> = prompts
        .iter()
        .zip(0_u32..)
        .map(|(tokens, index)| blocks(index * 20, tokens.len()))
        .collect();
    // Every second sequence has all but its last token behind it: those decode beside the prefills of the others.
    for (index, tokens) in prompts.iter().enumerate().skip(1).step_by(2) {
        let mut early = slice(&tokens[..tokens.len() - 1], 0, &tables[index]);
        early.wants_output = false;
        assert_eq!(forward(&mut model, &kv, vec![early]), [Output::None]);
    }
    let slices = prompts
        .iter()
        .enumerate()
        .map(|(index, tokens)| {
            let start = if index % 2 == 1 { tokens.len() - 1 } else { 0 };
            slice(tokens, start, &tables[index])
        })
        .collect();
    let together = forward(&mut model, &kv, slices);
    for (index, (output, alone)) in together.iter().zip(&alone).enumerate() {
        assert!(logits(output) == alone, "sequence {index} differs");
    }
}

#[test]
fn a_transferred_prefix_gives_the_bits_of_a_computed_one() {
    let mut model = tiny::model(7);
    let tokens = prompt(70, 4);
    let (whole, bytes) = chunked(&mut model, &tokens, tokens.len());
    let kv = store(8);
    let table = blocks(0, tokens.len());
    for (id, bytes) in table.iter().zip(&bytes).take(3) {
        kv.write(*id).copy_from_slice(bytes);
    }
    let outputs = forward(&mut model, &kv, vec![slice(&tokens, 48, &table)]);
    assert!(logits(&outputs[0]) == whole);

    // And a wrong one does not: the test can fail.
    kv.write(table[1])[5] ^= 0x10;
    let outputs = forward(&mut model, &kv, vec![slice(&tokens, 48, &table)]);
    assert!(logits(&outputs[0]) != whole);
}

fn generate(model: &mut Llama, prompt: &[u32], count: usize) -> Vec<u32> {
    let kv = store(40);
    let table = blocks(0, prompt.len() + count);
    let mut history = prompt.to_vec();
    let mut start = 0;
    for _ in 0..count {
        let outputs = forward(model, &kv, vec![slice(&history, start, &table)]);
        start = history.len();
        let sampled = sample(logits(&outputs[0]), &Sampling::greedy(), start as u64, &[]);
        history.push(sampled.token);
    }
    history.split_off(prompt.len())
}

#[test]
fn greedy_generation_is_the_seeds_and_the_prompts() {
    let text: Vec<u32> = "the baton is never dropped"
        .bytes()
        .map(u32::from)
        .collect();
    let tokens = generate(&mut tiny::model(1), &text, 12);
    assert_eq!(tokens, generate(&mut tiny::model(1), &text, 12));
    assert_ne!(tokens, generate(&mut tiny::model(2), &text, 12));
    assert_ne!(tokens, generate(&mut tiny::model(1), &text[1..], 12));
    // Guards the numerics: when this changes, `NUMERICS` must change too, or workers of two versions mix their KV.
    assert_eq!(tokens, GREEDY);
}

const GREEDY: [u32; 12] = [127, 257, 245, 26, 40, 184, 103, 226, 75, 127, 45, 167];

#[test]
fn batches_that_do_not_fit_are_refused_by_name() {
    let mut model = tiny::model(7);
    let kv = store(2);
    let table = blocks(0, 32);
    let tokens = prompt(40, 1);
    let mut refused = |slice: SequenceSlice<'_>, word: &str| {
        let batch = Batch {
            slices: vec![slice],
        };
        let message = model.forward(&batch, &kv).expect_err("refused").to_string();
        assert!(
            message.starts_with("sequence 1: ") && message.contains(word),
            "{message}"
        );
    };
    refused(slice(&tokens, 0, &table), "2 blocks");
    refused(slice(&tokens[..8], 8, &table), "no token");
    refused(slice(&[999], 0, &table), "999");
    refused(slice(&tokens[..8], 0, &[BlockId(2)]), "block 2");
    let other = BlockStore::new(
        Geometry {
            block_size: 16,
            bytes_per_token: 8,
        },
        2,
        u64::MAX,
    )
    .expect("small");
    let batch = Batch {
        slices: vec![slice(&tokens[..8], 0, &table)],
    };
    assert!(matches!(
        model.forward(&batch, &other),
        Err(ModelError::Geometry { .. })
    ));
}
