//! libFuzzer over [`baton_fuzz::sse`].

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| baton_fuzz::sse::check(input));
