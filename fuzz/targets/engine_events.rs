//! libFuzzer over [`baton_fuzz::engine_events`].

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| baton_fuzz::engine_events::check(input));
