//! What is read again and again, in a process of its own: other tests' memory is not counted.

use std::error::Error;
use std::fs;

use baton_fuzz::TARGETS;

const TIMES: usize = 400;
/// What is kept of each time may be this much: an allocator's rounding. A tokenizer's words are 28 KiB.
const KEPT: usize = 4 << 10;
const PAGE: usize = 4 << 10;

#[test]
fn what_is_read_again_and_again_takes_no_more_memory() -> Result<(), Box<dyn Error>> {
    for target in &TARGETS {
        for (name, input) in (target.seeds)() {
            // The first times reserve what the later ones use.
            for _ in 0..3 {
                (target.check)(&input);
            }
            let before = resident()?;
            for _ in 0..TIMES {
                (target.check)(&input);
            }
            let grown = resident()?.saturating_sub(before);
            let target = target.name;
            assert!(
                grown < TIMES * KEPT,
                "target {target}: seed {name}: {grown} bytes after {TIMES} times"
            );
        }
    }
    Ok(())
}

/// Bytes of this process in memory.
fn resident() -> Result<usize, Box<dyn Error>> {
    let pages = fs::read_to_string("/proc/self/statm")?;
    let resident = pages
        .split(' ')
        .nth(1)
        .ok_or("statm has no second number")?;
    Ok(resident.parse::<usize>()? * PAGE)
}
