//! libFuzzer over [`baton_fuzz::transport_frames`].

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| baton_fuzz::transport_frames::check(input));
