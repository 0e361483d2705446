//! libFuzzer over [`baton_fuzz::policy_yaml`].

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| baton_fuzz::policy_yaml::check(input));
