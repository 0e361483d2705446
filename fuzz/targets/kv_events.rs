//! libFuzzer over [`baton_fuzz::kv_events`].

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| baton_fuzz::kv_events::check(input));
