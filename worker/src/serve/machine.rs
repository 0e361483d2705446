//! What the machine can do: free memory, and the processor instructions that this build was compiled for.

use std::fs;

/// Bytes of memory that a new allocation may use: what the kernel calls available, or what is left of the container's limit.
pub(crate) fn available_memory() -> u64 {
    let machine = fs::read_to_string("/proc/meminfo")
        .ok()
        .and_then(|text| meminfo_available(&text))
        .unwrap_or(u64::MAX);
    machine.min(control_group_left().unwrap_or(u64::MAX))
}

fn meminfo_available(text: &str) -> Option<u64> {
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kibibytes * 1024)
}

/// Of the process's own control group (version 2); none where there is no limit.
fn control_group_left() -> Option<u64> {
    let number = |file: &str| -> Option<u64> {
        let text = fs::read_to_string(format!("/sys/fs/cgroup/{file}")).ok()?;
        text.trim().parse().ok()
    };
    Some(number("memory.max")?.saturating_sub(number("memory.current")?))
}

/// The processor's name as `/proc/cpuinfo` has it.
pub(crate) fn processor() -> String {
    fs::read_to_string("/proc/cpuinfo")
        .ok()
        .and_then(|text| model_name(&text))
        .unwrap_or_else(|| format!("a processor of kind {}", std::env::consts::ARCH))
}

fn model_name(cpuinfo: &str) -> Option<String> {
    let line = cpuinfo
        .lines()
        .find(|line| line.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

/// Instructions that the build uses without asking (x86-64-v3), as `/proc/cpuinfo` names them.
#[cfg(target_arch = "x86_64")]
const NEEDED: [&str; 7] = ["avx2", "fma", "f16c", "bmi1", "bmi2", "movbe", "abm"];

/// Names the first instruction set that this build needs and the processor lacks.
///
/// Asked of the kernel: the compiler takes `is_x86_feature_detected` for granted when it was told to use the feature.
#[cfg(target_arch = "x86_64")]
pub(crate) fn missing_instructions() -> Option<&'static str> {
    let text = fs::read_to_string("/proc/cpuinfo").ok()?;
    missing(&text)
}

#[cfg(not(target_arch = "x86_64"))]
pub(crate) fn missing_instructions() -> Option<&'static str> {
    None
}

#[cfg(target_arch = "x86_64")]
fn missing(cpuinfo: &str) -> Option<&'static str> {
    let flags = cpuinfo.lines().find_map(|line| {
        let (name, flags) = line.split_once(':')?;
        (name.trim() == "flags").then_some(flags)
    })?;
    NEEDED
        .into_iter()
        .find(|needed| !flags.split_whitespace().any(|flag| flag == *needed))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn available_memory_is_read_from_the_kernels_text() {
        let text = "MemTotal:       16000000 kB\nMemAvailable:    1024 kB\n";
        assert_eq!(meminfo_available(text), Some(1 << 20));
        assert_eq!(meminfo_available("MemTotal: 5 kB\n"), None);
        assert!(available_memory() > 0);
    }

    #[test]
    fn a_processor_is_named_as_the_kernel_names_it() {
        let text = "processor : 0\nmodel name\t: Fast CPU @ 3GHz\nflags : fpu\n";
        assert_eq!(model_name(text).as_deref(), Some("Fast CPU @ 3GHz"));
        assert_eq!(model_name("processor : 0\n"), None);
        assert!(!processor().is_empty());
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn an_old_processor_is_told_by_what_it_lacks() {
        let new = "processor : 0\nflags\t\t: fpu abm avx2 bmi1 bmi2 f16c fma movbe\n";
        assert_eq!(missing(new), None);
        assert_eq!(missing(&new.replace("avx2 ", "avx ")), Some("avx2"));
        assert_eq!(missing("flags : fpu sse2\n"), Some("avx2"));
    }
}
