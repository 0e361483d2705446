//! Random numbers from the system, for names, keys and pauses.

/// `N` random bytes.
///
/// # Errors
/// The system has none to give.
pub fn bytes<const N: usize>() -> Result<[u8; N], getrandom::Error> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes)?;
    Ok(bytes)
}

/// From 0 to 1, for spreading; the middle where the system has no random numbers.
#[must_use]
pub fn fraction() -> f64 {
    bytes::<4>().map_or(0.5, |bytes| {
        f64::from(u32::from_le_bytes(bytes)) / f64::from(u32::MAX)
    })
}

/// `N` bytes as hexadecimal digits.
///
/// # Errors
/// As [`bytes`].
pub fn hex<const N: usize>() -> Result<String, getrandom::Error> {
    Ok(bytes::<N>()?
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect())
}
