//! What is drawn, from which tokens, and that it is drawn the same again.

use proptest::prelude::*;

use super::*;

fn at(temperature: f64, seed: u64) -> Sampling {
    Sampling {
        temperature,
        seed,
        ..Sampling::greedy()
    }
}

fn rows() -> impl Strategy<Value = Vec<f32>> {
    proptest::collection::vec(-20.0_f32..20.0, 1..60)
}

proptest! {
    #[test]
    fn the_same_seed_and_position_give_the_same_token(
        logits in rows(), seed: u64, position: u64, temperature in 0.1_f64..3.0,
    ) {
        let sampling = at(temperature, seed);
        prop_assert_eq!(
            sample(&logits, &sampling, position, &[]),
            sample(&logits, &sampling, position, &[])
        );
    }

    #[test]
    fn a_temperature_near_zero_is_greedy(logits in rows(), seed: u64, position: u64) {
        let mut ranked = logits.clone();
        ranked.sort_unstable_by(f32::total_cmp);
        // Two near-equal logits stay near-equal at any temperature.
        prop_assume!(ranked.len() < 2 || ranked[ranked.len() - 1] - ranked[ranked.len() - 2] > 1e-3);
        prop_assert_eq!(
            sample(&logits, &at(1e-6, seed), position, &[]).token,
            sample(&logits, &Sampling::greedy(), position, &[]).token
        );
    }

    #[test]
    fn a_token_is_among_the_top_k(logits in rows(), seed: u64, position: u64, top_k in 1_u32..10) {
        let token = sample(&logits, &Sampling { top_k, ..at(2.0, seed) }, position, &[]).token;
        let better = logits.iter().filter(|logit| **logit > logits[token as usize]).count();
        prop_assert!(better < top_k as usize);
    }

    #[test]
    fn the_tokens_above_a_chosen_one_hold_less_than_top_p(
        logits in rows(), seed: u64, position: u64, top_p in 0.05_f64..1.0,
    ) {
        let token = sample(&logits, &Sampling { top_p, ..at(1.0, seed) }, position, &[]).token;
        let mass = |keep: &dyn Fn(f32) -> bool| -> f64 {
            logits.iter().filter(|logit| keep(**logit)).map(|logit| f64::from(*logit).exp()).sum()
        };
        let above = mass(&|logit| logit > logits[token as usize]) / mass(&|_| true);
        prop_assert!(above < top_p + 1e-9, "{above} of the mass lies above a token kept at {top_p}");
    }

    #[test]
    fn a_token_is_at_least_min_p_as_probable_as_the_best(
        logits in rows(), seed: u64, position: u64, min_p in 0.01_f64..1.0,
    ) {
        let token = sample(&logits, &Sampling { min_p, ..at(1.0, seed) }, position, &[]).token;
        let highest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let share = (f64::from(logits[token as usize]) - f64::from(highest)).exp();
        prop_assert!(share >= min_p * (1.0 - 1e-9));
    }

    #[test]
    fn forbidden_ids_are_never_chosen(logits in rows(), seed: u64, position: u64, temperature in 0.0_f64..3.0) {
        prop_assume!(logits.len() > 1);
        let best = sample(&logits, &Sampling::greedy(), 0, &[]).token;
        prop_assert_ne!(sample(&logits, &at(temperature, seed), position, &[best]).token, best);
    }

    #[test]
    fn log_probabilities_are_those_of_a_softmax(logits in rows(), count in 0_u32..8) {
        let sampling = Sampling { top_logprobs: Some(count), ..Sampling::greedy() };
        let sampled = sample(&logits, &sampling, 0, &[]);
        let logprobs = sampled.logprobs.expect("asked for");
        let sum: f64 = logits.iter().map(|logit| f64::from(*logit).exp()).sum();
        let expected = f64::from(logits[sampled.token as usize]) - sum.ln();
        prop_assert!((f64::from(logprobs.chosen) - expected).abs() < 1e-4);
        prop_assert_eq!(logprobs.top.len(), (count as usize).min(logits.len()));
        prop_assert!(logprobs.top.windows(2).all(|pair| pair[0].1 >= pair[1].1));
        if let Some((token, _)) = logprobs.top.first() {
            prop_assert_eq!(*token, sampled.token);
        }
    }
}

#[test]
fn equal_logits_go_to_the_lowest_id() {
    let logits = [0.0, 3.0, 3.0, 3.0];
    assert_eq!(sample(&logits, &Sampling::greedy(), 0, &[]).token, 1);
    let one = Sampling {
        top_k: 1,
        ..at(1.0, 7)
    };
    assert!((0..50).all(|position| sample(&logits, &one, position, &[]).token == 1));
}

#[test]
fn frequencies_follow_the_probabilities() {
    // 8 : 4 : 2 : 1 : 1
    let logits: Vec<f32> = [8.0_f32, 4.0, 2.0, 1.0, 1.0].map(f32::ln).to_vec();
    let mut counts = [0_u32; 5];
    for position in 0..16_000 {
        counts[sample(&logits, &at(1.0, 42), position, &[]).token as usize] += 1;
    }
    for (count, share) in counts.iter().zip([8, 4, 2, 1, 1]) {
        let expected = f64::from(1000 * share);
        // Five standard deviations of a binomial.
        let slack = 5.0 * (expected * (1.0 - expected / 16_000.0)).sqrt();
        assert!((f64::from(*count) - expected).abs() < slack, "{counts:?}");
    }
}

/// Values computed apart from this code, from the text of the rules, in Python: another build, machine or version of a worker must
/// draw the same, or an attempt that goes on elsewhere says something else.
#[test]
fn what_is_drawn_is_what_was_always_drawn() {
    let drawn = [(0, 0), (0, 1), (1, 0), (42, 1000), (u64::MAX, u64::MAX)]
        .map(|(seed, position)| uniform(seed, position));
    let recorded = [
        0.483_944_699_219_436_84,
        0.424_592_831_519_582_27,
        0.833_909_930_627_439_9,
        0.683_914_391_319_312_5,
        0.542_702_218_605_321_4,
    ];
    assert_eq!(drawn, recorded);
    let logits: Vec<f32> = (0..50_u16)
        .map(|id| f32::from(id * 37 % 50) / 10.0)
        .collect();
    let sampling = Sampling {
        top_k: 30,
        top_p: 0.9,
        min_p: 0.01,
        ..at(0.8, 7)
    };
    let tokens: Vec<u32> = (0..16)
        .map(|position| sample(&logits, &sampling, position, &[]).token)
        .collect();
    let recorded = [27, 12, 24, 39, 8, 24, 27, 39, 1, 1, 8, 43, 27, 47, 8, 28];
    assert_eq!(tokens, recorded);
}

#[test]
fn a_row_without_numbers_still_gives_a_token() {
    assert_eq!(sample(&[f32::NAN, 1.0], &at(1.0, 1), 0, &[]).token, 1);
    assert_eq!(
        sample(&[f32::NEG_INFINITY; 3], &at(1.0, 1), 0, &[]).token,
        0
    );
    assert_eq!(sample(&[], &Sampling::greedy(), 0, &[]).token, 0);
}
