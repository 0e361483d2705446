//! Control frames beside KV bytes, on a TCP connection and on the socket of the shared memory.

use baton_worker::transport::tcp::recode_frames;

/// Length and kind before each body, see `worker/src/transport/tcp/frame.rs`.
const HEAD: usize = 5;
/// A frame is never waited for beyond this many bytes.
const LONGEST_FRAME: usize = HEAD + 1024;

/// Reads frames until one is incomplete or wrong. A peer learns no later than with its last byte that they are.
pub fn check(bytes: &[u8]) {
    let read = recode_frames(bytes);
    assert!(read.taken <= bytes.len());
    assert!(read.frames * HEAD <= read.taken);
    assert_eq!(
        read.again.len(),
        read.taken,
        "another length when written again"
    );
    let rest = bytes.len() - read.taken;
    assert!(
        read.error.is_some() || rest < LONGEST_FRAME,
        "{rest} bytes and still no frame"
    );

    // Written again, they are the same frames: what differs is four spare bytes of each header, which nobody reads.
    let second = recode_frames(&read.again);
    assert_eq!((second.frames, second.taken), (read.frames, read.taken));
    assert_eq!(second.again, read.again);
    assert!(second.error.is_none());

    // A connection that has brought less so far has brought a beginning of the same frames, or of the same error.
    for cut in [bytes.len() / 2, bytes.len().saturating_sub(1)] {
        let part = recode_frames(&bytes[..cut]);
        assert!(read.again.starts_with(&part.again));
        assert!(part.error.is_none() || part.error == read.error);
    }
}

/// Frames, and nothing but frames.
pub fn accepts(bytes: &[u8]) -> bool {
    let read = recode_frames(bytes);
    read.error.is_none() && read.frames > 0 && read.taken == bytes.len()
}
