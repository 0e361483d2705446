//! The kept inputs and the seeds, run without a fuzzer.

use std::error::Error;
use std::panic::catch_unwind;

use baton_fuzz::{TARGETS, Target, corpus};

/// Runs an input; a broken property names the input.
fn passes(target: &Target, name: &str, input: &[u8]) -> Result<(), String> {
    catch_unwind(|| (target.check)(input)).map_err(|_| {
        format!(
            "target {}: {name} breaks a property (see above)",
            target.name
        )
    })
}

#[test]
fn every_kept_input_holds_what_its_target_says() -> Result<(), Box<dyn Error>> {
    let mut broken = Vec::new();
    for target in &TARGETS {
        let inputs = corpus::kept(target.name)?;
        println!("{}: {} inputs", target.name, inputs.len());
        assert!(!inputs.is_empty(), "no inputs are kept for {}", target.name);
        for (path, input) in inputs {
            broken.extend(passes(target, &path.display().to_string(), &input).err());
        }
    }
    assert!(broken.is_empty(), "{}", broken.join("\n"));
    Ok(())
}

#[test]
fn every_seed_holds_what_its_target_says() {
    for target in &TARGETS {
        let seeds = (target.seeds)();
        assert!(!seeds.is_empty(), "no seeds for {}", target.name);
        for (name, input) in seeds {
            passes(target, &name, &input).unwrap();
        }
    }
}

#[test]
fn every_seed_is_accepted_by_whoever_reads_it() {
    for target in &TARGETS {
        for (name, input) in (target.seeds)() {
            let accepted = (target.accepts)(&input);
            assert!(accepted, "target {}: seed {name} is refused", target.name);
        }
    }
}

#[test]
fn every_beginning_of_a_seed_does_too() {
    for target in &TARGETS {
        let seeds = (target.seeds)();
        assert!(!seeds.is_empty(), "no seeds for {}", target.name);
        for (name, input) in seeds {
            // Each length of short ones; of long ones as many, spread over them.
            let step = input.len().div_ceil(400).max(1);
            for length in (0..input.len()).step_by(step) {
                passes(target, &format!("{name} to {length}"), &input[..length]).unwrap();
            }
        }
    }
}
