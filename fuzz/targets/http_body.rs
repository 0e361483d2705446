//! libFuzzer over [`baton_fuzz::http_body`].

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| baton_fuzz::http_body::check(input));
