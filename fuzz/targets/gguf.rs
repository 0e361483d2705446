//! libFuzzer over [`baton_fuzz::gguf`].

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| baton_fuzz::gguf::check(input));
