//! Tokens that depend on the KV that was read, and durations that follow the cost formulas.

use super::super::SequenceKey;
use super::*;
use crate::kv::store::Geometry;

fn settings() -> Settings {
    let coefficients = WorkerCoefficients {
        a: 2.0,
        b: 0.05,
        k: 1e-6,
        floor: 4.0,
        d0: 5.0,
        d1: 0.1,
        d2: 1e-4,
        upper: Default::default(),
        samples: Default::default(),
    };
    Settings {
        kv_bytes_per_token: 36,
        ..Settings::new(coefficients, 1)
    }
}

fn store() -> BlockStore {
    let geometry = Geometry {
        block_size: 16,
        bytes_per_token: 36,
    };
    BlockStore::new(geometry, 64, u64::MAX).expect("small")
}

fn run(
    model: &mut Simulated,
    kv: &BlockStore,
    history: &[u32],
    start: usize,
    blocks: &[BlockId],
) -> StepReport {
    let slice = SequenceSlice {
        sequence: SequenceKey(1),
        history,
        start,
        blocks,
        wants_output: true,
    };
    model
        .forward(
            &Batch {
                slices: vec![slice],
            },
            kv,
        )
        .expect("computes")
}

fn blocks(from: u32) -> Vec<BlockId> {
    (from..from + 10).map(BlockId).collect()
}

#[test]
fn tokens_do_not_depend_on_chunks_or_on_the_worker() {
    let prompt: Vec<u32> = (0..100).map(|index| index % 96 + 32).collect();
    let mut first = Simulated::new(settings()).expect("sane");
    let whole = run(&mut first, &store(), &prompt, 0, &blocks(0)).outputs;

    let mut second = Simulated::new(Settings {
        seed: 2,
        ..settings()
    })
    .expect("sane");
    let kv = store();
    run(&mut second, &kv, &prompt[..33], 0, &blocks(20));
    let chunked = run(&mut second, &kv, &prompt, 33, &blocks(20)).outputs;
    assert_eq!(whole, chunked);

    let mut other = prompt.clone();
    other[3] += 1;
    assert_ne!(
        run(&mut first, &store(), &other, 0, &blocks(0)).outputs,
        whole
    );
}

#[test]
fn a_copied_block_is_as_good_as_a_computed_one_and_a_damaged_one_is_not() {
    let prompt: Vec<u32> = (0..60).collect();
    let mut model = Simulated::new(settings()).expect("sane");
    let source = store();
    let whole = run(&mut model, &source, &prompt, 0, &blocks(0)).outputs;
    let target = store();
    for (from, to) in blocks(0).iter().zip(blocks(30)).take(3) {
        target.write(to).copy_from_slice(&source.read(*from));
    }
    assert_eq!(
        run(&mut model, &target, &prompt, 48, &blocks(30)).outputs,
        whole
    );
    // Another block's bytes in place of the second one's.
    let wrong = source.read(blocks(0)[2]).to_vec();
    target.write(blocks(30)[1]).copy_from_slice(&wrong);
    assert_ne!(
        run(&mut model, &target, &prompt, 48, &blocks(30)).outputs,
        whole
    );
}

#[test]
fn a_wrong_bit_in_the_first_key_or_the_last_value_of_a_block_changes_what_comes_out() {
    let prompt: Vec<u32> = (0..60).collect();
    for kv_bytes_per_token in [4, 16, 36, 64] {
        let geometry = Geometry {
            block_size: 16,
            bytes_per_token: kv_bytes_per_token,
        };
        let settings = Settings {
            kv_bytes_per_token,
            ..settings()
        };
        let mut model = Simulated::new(settings).expect("sane");
        let kv = BlockStore::new(geometry, 64, u64::MAX).expect("small");
        let whole = run(&mut model, &kv, &prompt, 0, &blocks(0)).outputs;
        assert_eq!(run(&mut model, &kv, &prompt, 48, &blocks(0)).outputs, whole);
        let (half, last) = (kv_bytes_per_token / 2, 16 * kv_bytes_per_token - 1);
        for byte in [15 * half, last] {
            kv.write(blocks(0)[1])[byte] ^= 0x80;
            assert_ne!(
                run(&mut model, &kv, &prompt, 48, &blocks(0)).outputs,
                whole,
                "byte {byte} of {kv_bytes_per_token} a token"
            );
            kv.write(blocks(0)[1])[byte] ^= 0x80;
        }
    }
}

#[test]
fn durations_are_those_of_the_cost_formulas_with_noise_around_them() {
    let mut model = Simulated::new(settings()).expect("sane");
    let worker = settings().coefficients;
    let kv = store();
    let prompt: Vec<u32> = vec![65; 150];
    let mut ratios = Vec::new();
    for _ in 0..400 {
        let prefill = run(&mut model, &kv, &prompt, 50, &blocks(0));
        let expected = cost::prefill_step(&worker, 100.0, 50.0);
        ratios.push(prefill.duration_milliseconds.expect("modelled") / expected);
        let decode = run(&mut model, &kv, &prompt, 149, &blocks(0));
        let expected = cost::decode_step(&worker, 1.0, 150.0);
        ratios.push(decode.duration_milliseconds.expect("modelled") / expected);
    }
    let count = ratios.len() as f64;
    let mean = ratios.iter().sum::<f64>() / count;
    let spread = (ratios
        .iter()
        .map(|ratio| (ratio - mean).powi(2))
        .sum::<f64>()
        / count)
        .sqrt();
    // Three standard errors of 800 draws.
    assert!((mean - 1.0).abs() < 0.0032, "mean {mean}");
    assert!((spread - 0.03).abs() < 0.0023, "spread {spread}");

    let exact = Settings {
        noise: 0.0,
        ..settings()
    };
    let mut exact = Simulated::new(exact).expect("sane");
    let step = run(&mut exact, &kv, &prompt, 50, &blocks(0));
    assert_eq!(
        step.duration_milliseconds,
        Some(cost::prefill_step(&worker, 100.0, 50.0))
    );
}

#[test]
fn prompts_of_one_step_share_it() {
    let mut model = Simulated::new(Settings {
        noise: 0.0,
        ..settings()
    })
    .expect("sane");
    let prompt = vec![65; 80];
    let (first, second, third) = (blocks(0), blocks(10), blocks(20));
    let slice = |start, blocks| SequenceSlice {
        sequence: SequenceKey(1),
        history: &prompt,
        start,
        blocks,
        wants_output: true,
    };
    let batch = Batch {
        slices: vec![slice(0, &first), slice(30, &second), slice(79, &third)],
    };
    let report = model.forward(&batch, &store()).expect("computes");
    let attention = 80.0 * 80.0 / 2.0 + 50.0 * 30.0 + 50.0 * 50.0 / 2.0;
    let expected = 2.0 + 0.05 * 130.0 + 1e-6 * attention + 0.1 + 1e-4 * 80.0;
    let found = report.duration_milliseconds.expect("modelled");
    assert!((found - expected).abs() < 1e-9, "{found} for {expected}");
}

#[test]
fn the_text_of_another_model_takes_the_place_of_its_own() {
    let tiny = super::super::tiny::model(7);
    let other = ModelFacts {
        tokenizer: b"{}".to_vec().into(),
        eos_token_ids: vec![3],
        ..tiny.facts().clone()
    };
    let text = Some(Text::of(&other));
    let mut model = Simulated::new(Settings { text, ..settings() }).expect("sane");
    let facts = model.facts();
    assert_eq!(facts.tokenizer, other.tokenizer);
    assert_eq!(facts.eos_token_ids, other.eos_token_ids);
    assert_eq!(facts.shape.vocabulary, other.shape.vocabulary);
    let prompt: Vec<u32> = (0..20).collect();
    let outputs = run(&mut model, &store(), &prompt, 0, &blocks(0)).outputs;
    let vocabulary = other.shape.vocabulary as u32;
    assert!(matches!(outputs[..], [Output::Token(token)] if token < vocabulary));
}

#[test]
fn settings_that_cannot_be_are_named() {
    for (settings, field) in [
        (
            Settings {
                kv_bytes_per_token: 6,
                ..settings()
            },
            "kvBytesPerToken",
        ),
        (
            Settings {
                vocabulary: 100,
                ..settings()
            },
            "vocabulary",
        ),
        (
            Settings {
                noise: 2.0,
                ..settings()
            },
            "noise",
        ),
    ] {
        let message = Simulated::new(settings).expect_err("refused").to_string();
        assert!(message.contains(field), "{message}");
    }
}
