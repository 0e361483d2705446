//! Sources that lie about their memory, or say nothing.

use std::os::fd::{AsFd, OwnedFd};

use baton_protocol::failure::HandoffFailure;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use tokio::net::UnixListener;

use super::{BLOCK, PATIENCE, address, fetched, transport};
use crate::transport::memory::{Arena, Shape};
use crate::transport::shm::connection::Connection;
use crate::transport::tcp::frame::Frame;
use crate::transport::{Obstacle, TransportError};

/// A source that answers whoever connects with `frames` and, beside the first byte, `file`.
pub(super) async fn liar(frames: Vec<Frame>, file: Option<OwnedFd>) -> String {
    let address = address();
    let socket = transport().socket(&address).expect("of this host");
    let listener = UnixListener::bind(socket).expect("free");
    tokio::spawn(async move {
        let (stream, _) = listener.accept().await.expect("a reader");
        let mut connection = Connection::new(stream);
        for frame in &frames {
            connection.write(frame);
        }
        match &file {
            Some(file) => connection.flush_with(file.as_fd(), PATIENCE).await,
            None => connection.flush(PATIENCE).await,
        }
        .expect("a reader that listens");
        // Until the reader goes away.
        while let Ok(Some(_)) = connection.frame().await {}
    });
    address
}

pub(super) fn arena(blocks: u32) -> (Frame, Option<OwnedFd>) {
    let shape = Shape::new(2, BLOCK).expect("small");
    let (arena, _pieces) = Arena::new(shape).expect("memory");
    let file = arena.file().expect("memfd").try_clone_to_owned();
    let frame = Frame::Arena {
        blocks,
        block_bytes: BLOCK as u64,
    };
    (frame, Some(file.expect("a descriptor")))
}

/// A file that could be made shorter under its reader.
pub(super) fn loose() -> OwnedFd {
    let loose =
        memfd_create("loose", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).expect("memfd");
    ftruncate(&loose, 1 << 20).expect("grows");
    loose
}

fn located(index: u32, block: u32) -> Frame {
    Frame::Located {
        index,
        sealed: None,
        promised: Default::default(),
        block,
    }
}

#[tokio::test]
async fn lies_about_blocks_are_not_believed() {
    let lies: [&[Frame]; 5] = [
        &[located(0, 2)],
        &[located(0, u32::MAX)],
        &[located(1, 0)],
        &[Frame::Sealed { end: 1 }],
        &[Frame::Accepted],
    ];
    for (number, lie) in lies.into_iter().enumerate() {
        let (frame, file) = arena(2);
        let frames = [&[frame, Frame::Accepted], lie].concat();
        let error = fetched(&transport(), &liar(frames, file).await)
            .await
            .expect_err("a lie");
        assert_eq!(
            error.failure(),
            HandoffFailure::ProtocolError,
            "lie {number}: {error}"
        );
    }
}

#[tokio::test]
async fn memory_that_is_not_there_is_not_mapped() {
    let memory = |error: TransportError| match error {
        TransportError::Unusable { obstacle, .. } => assert_eq!(obstacle, Obstacle::Memory),
        other => panic!("{other}"),
    };
    // More blocks than the file has.
    let (frame, file) = arena(1 << 20);
    let address = liar(vec![frame, Frame::Accepted], file).await;
    memory(fetched(&transport(), &address).await.expect_err("a lie"));
    let address = liar(vec![arena(2).0, Frame::Accepted], Some(loose())).await;
    memory(fetched(&transport(), &address).await.expect_err("unsealed"));
    // No file at all.
    let address = liar(vec![arena(2).0, Frame::Accepted], None).await;
    let error = fetched(&transport(), &address).await.expect_err("no file");
    assert_eq!(error.failure(), HandoffFailure::ProtocolError, "{error}");
}

#[tokio::test]
async fn a_silent_source_is_given_up() {
    let (frame, file) = arena(2);
    let address = liar(vec![frame, Frame::Accepted, Frame::Alive], file).await;
    let error = fetched(&transport(), &address).await.expect_err("silent");
    assert_eq!(error.failure(), HandoffFailure::Timeout, "{error}");
    let error = fetched(&transport(), &liar(Vec::new(), None).await)
        .await
        .expect_err("it greets and says no more");
    assert_eq!(error.failure(), HandoffFailure::Timeout, "{error}");
}
