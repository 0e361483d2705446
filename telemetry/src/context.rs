//! Trace context as W3C defines it (`traceparent`, version 00), and ids that follow from what they name.
//!
//! Ids are derived, not drawn: the id of a run's trace from the run's own random bits, the id of a span from its parent and its
//! name. So a span's id is known to whoever knows where it hangs, before it exists, and no process needs another's answer.

use std::fmt;

/// 16 bytes, never all zero.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TraceId([u8; 16]);

/// 8 bytes, never all zero.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SpanId([u8; 8]);

/// A place in a trace: what is made next hangs under `span`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TraceContext {
    pub trace: TraceId,
    pub span: SpanId,
    /// Whether whoever made it records it.
    pub sampled: bool,
}

impl TraceId {
    pub fn from_bytes(bytes: [u8; 16]) -> Option<Self> {
        (bytes != [0; 16]).then_some(Self(bytes))
    }

    pub fn bytes(self) -> [u8; 16] {
        self.0
    }

    /// The trace of a run that no client gave one: the 128 random bits at the end of its id, so that whoever has the one has the
    /// other; a hash of an id that does not end with them.
    pub fn of_run(run: &str) -> Self {
        run.rsplit('-')
            .next()
            .and_then(hexadecimal)
            .and_then(Self::from_bytes)
            .unwrap_or_else(|| Self(digest(&[b"trace", run.as_bytes()])))
    }
}

impl SpanId {
    pub fn from_bytes(bytes: [u8; 8]) -> Option<Self> {
        (bytes != [0; 8]).then_some(Self(bytes))
    }

    pub fn bytes(self) -> [u8; 8] {
        self.0
    }

    fn of(parts: &[&[u8]]) -> Self {
        Self(digest(parts))
    }
}

impl TraceContext {
    /// The root of a run's own trace, or of its part of a client's.
    pub fn root(parent: Option<&Self>, run: &str, sampled: bool) -> Self {
        let trace = parent.map_or_else(|| TraceId::of_run(run), |parent| parent.trace);
        Self {
            trace,
            span: SpanId::of(&[&trace.0, b"run", run.as_bytes()]),
            sampled,
        }
    }

    /// The place under this one for a span of that name. `which` tells siblings of one name apart: an attempt, an operation.
    #[must_use]
    pub fn child(&self, name: &str, which: &str) -> Self {
        let parts: [&[u8]; 4] = [
            &self.trace.0,
            &self.span.0,
            name.as_bytes(),
            which.as_bytes(),
        ];
        Self {
            span: SpanId::of(&parts),
            ..*self
        }
    }

    /// Reads `version-trace-parent-flags`, lower-case hexadecimal. `None` for anything else, as the standard says. A later version
    /// may append fields; version ff is forbidden.
    pub fn parse(value: &str) -> Option<Self> {
        let mut fields = value.split('-');
        let (version, trace, span, flags) = (
            fields.next()?,
            fields.next()?,
            fields.next()?,
            fields.next()?,
        );
        let [version] = hexadecimal::<1>(version)?;
        if version == 0xff || (version == 0 && fields.next().is_some()) {
            return None;
        }
        let [flags] = hexadecimal::<1>(flags)?;
        Some(Self {
            trace: TraceId::from_bytes(hexadecimal(trace)?)?,
            span: SpanId::from_bytes(hexadecimal(span)?)?,
            sampled: flags & 1 == 1,
        })
    }

    /// As a header's value.
    pub fn traceparent(&self) -> String {
        self.to_string()
    }
}

impl fmt::Display for TraceContext {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let flags = u8::from(self.sampled);
        write!(formatter, "00-{}-{}-{flags:02x}", self.trace, self.span)
    }
}

impl fmt::Display for TraceId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{:032x}", u128::from_be_bytes(self.0))
    }
}

impl fmt::Display for SpanId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{:016x}", u64::from_be_bytes(self.0))
    }
}

impl fmt::Debug for TraceId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, formatter)
    }
}

impl fmt::Debug for SpanId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, formatter)
    }
}

/// Not all zero. Each part is preceded by its length, so that no two lists of parts are the same bytes.
fn digest<const BYTES: usize>(parts: &[&[u8]]) -> [u8; BYTES] {
    let mut hasher = blake3::Hasher::new();
    for part in parts {
        hasher.update(&(part.len() as u64).to_le_bytes());
        hasher.update(part);
    }
    let mut bytes = [0; BYTES];
    bytes.copy_from_slice(&hasher.finalize().as_bytes()[..BYTES]);
    if bytes == [0; BYTES] {
        bytes[0] = 1;
    }
    bytes
}

/// Exactly so many bytes in lower-case hexadecimal.
fn hexadecimal<const BYTES: usize>(text: &str) -> Option<[u8; BYTES]> {
    let digit = |letter: u8| match letter {
        b'0'..=b'9' => Some(letter - b'0'),
        b'a'..=b'f' => Some(letter - b'a' + 10),
        _ => None,
    };
    let text = text.as_bytes();
    if text.len() != 2 * BYTES {
        return None;
    }
    let mut bytes = [0; BYTES];
    for (byte, pair) in bytes.iter_mut().zip(text.chunks_exact(2)) {
        *byte = digit(pair[0])? << 4 | digit(pair[1])?;
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

    #[test]
    fn a_traceparent_is_read_and_written_back() {
        let context = TraceContext::parse(GOOD).unwrap();
        assert!(context.sampled);
        assert_eq!(
            context.trace.to_string(),
            "0af7651916cd43dd8448eb211c80319c"
        );
        assert_eq!(context.span.to_string(), "b7ad6b7169203331");
        assert_eq!(context.traceparent(), GOOD);
        let unsampled = TraceContext::parse(&GOOD.replace("-01", "-00")).unwrap();
        assert!(!unsampled.sampled);
        assert!(unsampled.traceparent().ends_with("-00"));
        // Only the lowest flag is known; others may be set.
        assert!(
            TraceContext::parse(&GOOD.replace("-01", "-03"))
                .unwrap()
                .sampled
        );
    }

    #[test]
    fn a_later_version_is_read_as_far_as_it_is_known() {
        let later = format!("01{}-more-fields", &GOOD[2..]);
        let context = TraceContext::parse(&later).unwrap();
        assert_eq!(context.traceparent(), GOOD);
    }

    #[test]
    fn what_is_no_trace_context_is_dropped() {
        for bad in [
            "",
            "00",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331",
            "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-more",
            "00-00000000000000000000000000000000-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
            "00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319ç-b7ad6b7169203331-01",
            " 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        ] {
            assert_eq!(TraceContext::parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn a_run_without_a_client_s_trace_is_its_own() {
        let run = "r0-0af7651916cd43dd8448eb211c80319c";
        let root = TraceContext::root(None, run, true);
        assert_eq!(root.trace.to_string(), &run[3..]);
        assert_eq!(root, TraceContext::root(None, run, true));
        for other in ["r0-0", "", "r0-00000000000000000000000000000000"] {
            assert_ne!(TraceId::of_run(other).bytes(), [0; 16], "{other}");
        }
    }

    #[test]
    fn a_client_s_trace_is_continued() {
        let parent = TraceContext::parse(GOOD).unwrap();
        let root = TraceContext::root(Some(&parent), "r0-1", true);
        assert_eq!(root.trace, parent.trace);
        assert_ne!(root.span, parent.span);
        let other = TraceContext::root(Some(&parent), "r0-2", true);
        assert_ne!(root.span, other.span);
    }

    #[test]
    fn siblings_and_generations_have_different_ids() {
        let root = TraceContext::root(None, "r0-1", true);
        let contexts = [
            root,
            root.child("prefill", "1"),
            root.child("prefill", "2"),
            root.child("decode", "1"),
            root.child("prefill", "1").child("prefill", "1"),
            root.child("prefill1", ""),
        ];
        for (index, one) in contexts.iter().enumerate() {
            assert_eq!(one.trace, root.trace);
            for other in &contexts[..index] {
                assert_ne!(one.span, other.span);
            }
        }
    }
}
