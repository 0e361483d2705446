//! What only TCP can suffer: peers that talk nonsense, say nothing, or are too many.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use baton_protocol::failure::HandoffFailure;
use baton_protocol::hash::HashKey;
use baton_protocol::ids::{Generation, LeaseId, TransferId};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;

use super::frame::{Frame, PREAMBLE, Why};
use super::{TcpOptions, TcpTransport};
use crate::kv::clock::ManualClock;
use crate::kv::{Geometry, KvPool, PoolConfig};
use crate::transport::{Arrival, BlockSink, FetchRequest, Transport, TransportError};

const QUICK: TcpOptions = TcpOptions {
    connect: Duration::from_secs(5),
    handshake: Duration::from_millis(200),
    alive: Duration::from_millis(20),
    silence: Duration::from_millis(200),
    stalled: Duration::from_millis(200),
    idle: Duration::from_millis(200),
    readers: 1,
};

/// For whoever's limits are not the subject, and end nothing.
const PATIENT: TcpOptions = TcpOptions {
    connect: Duration::from_secs(30),
    handshake: Duration::from_secs(30),
    silence: Duration::from_secs(30),
    stalled: Duration::from_secs(30),
    idle: Duration::from_secs(30),
    ..QUICK
};

struct NoBlocks;

impl BlockSink for NoBlocks {
    fn place(
        &mut self,
        _: u32,
        fill: &mut dyn FnMut(&mut [u8]) -> io::Result<usize>,
    ) -> Result<io::Result<usize>, HandoffFailure> {
        Ok(fill(&mut [0; 32]))
    }

    fn arrived(&mut self, _: &Arrival) -> Result<(), HandoffFailure> {
        Ok(())
    }

    fn sealed(&mut self, _: u32) {}
}

fn request(address: String) -> FetchRequest {
    FetchRequest {
        address,
        lease: LeaseId([1; 16]),
        generation: Generation(1),
        transfer: TransferId::from("t"),
        first_block: 0,
        layout: 1,
        block_bytes: 32,
    }
}

async fn source(
    options: TcpOptions,
    stop: &CancellationToken,
) -> (String, tokio::task::JoinHandle<()>) {
    let config = PoolConfig {
        geometry: Geometry {
            block_size: 4,
            bytes_per_token: 8,
        },
        blocks: 4,
        kv_identity: "tiny".to_owned(),
        layout: 1,
        hash_key: HashKey::from_bytes(&[1; 32]),
        event_capacity: 16,
    };
    let pool = KvPool::new(config, u64::MAX, Arc::new(ManualClock::default())).expect("small");
    let listening = TcpTransport::new(options)
        .listen("127.0.0.1:0", Arc::new(pool), stop.clone())
        .await
        .expect("a free port");
    (listening.address, tokio::spawn(listening.run))
}

/// A peer that sends `bytes` to whoever connects, and then is silent or closes.
async fn peer(bytes: Vec<u8>, close: bool) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = listener.local_addr().expect("bound").to_string();
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.expect("a reader");
        stream.write_all(&bytes).await.expect("a live reader");
        if !close {
            // Until the reader goes away.
            let mut rest = Vec::new();
            let _ = stream.read_to_end(&mut rest).await;
        }
    });
    address
}

async fn fetched_from(
    options: TcpOptions,
    frames: &[Frame],
    raw: &[u8],
    close: bool,
) -> TransportError {
    let mut bytes = PREAMBLE.to_vec();
    for frame in frames {
        frame.encode(&mut bytes);
    }
    bytes.extend_from_slice(raw);
    let request = request(peer(bytes, close).await);
    TcpTransport::new(options)
        .fetch(&request, &mut NoBlocks)
        .await
        .expect_err("no such source is believed")
}

#[tokio::test]
async fn a_silent_source_is_given_up() {
    let error = fetched_from(QUICK, &[Frame::Accepted, Frame::Alive], &[], false).await;
    assert_eq!(error.failure(), HandoffFailure::Timeout, "{error}");
}

#[tokio::test]
async fn a_source_that_closes_in_the_middle_of_a_block_is_lost() {
    let block = Frame::Block {
        index: 0,
        sealed: None,
        promised: Default::default(),
        before: Default::default(),
    };
    let error = fetched_from(PATIENT, &[Frame::Accepted, block], &[7; 20], true).await;
    assert_eq!(error.failure(), HandoffFailure::SourceLost, "{error}");
}

#[tokio::test]
async fn frames_out_of_place_are_not_believed() {
    let block = |index, sealed| Frame::Block {
        index,
        sealed,
        promised: Default::default(),
        before: Default::default(),
    };
    let mut two_ends = vec![0; 32];
    let after = Default::default();
    Frame::Tail { after }.encode(&mut two_ends);
    Frame::Sealed { end: 0 }.encode(&mut two_ends);
    let cases: [(&[Frame], &[u8]); 6] = [
        (&[Frame::Alive], &[]),
        (&[Frame::Accepted, block(1, None)], &[]),
        (&[Frame::Accepted, Frame::Sealed { end: 1 }], &[]),
        (&[Frame::Accepted, Frame::Accepted], &[]),
        (&[Frame::Accepted], &[0xff; 5]),
        (&[Frame::Accepted, block(0, Some(1))], &two_ends),
    ];
    for (number, (frames, raw)) in cases.into_iter().enumerate() {
        let error = fetched_from(PATIENT, frames, raw, false).await;
        assert_eq!(
            error.failure(),
            HandoffFailure::ProtocolError,
            "case {number}: {error}"
        );
    }
}

#[tokio::test]
async fn another_protocol_at_the_address_is_named() {
    let request = request(peer(b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec(), false).await);
    let error = TcpTransport::new(PATIENT)
        .fetch(&request, &mut NoBlocks)
        .await
        .expect_err("no KV transport");
    assert_eq!(error.failure(), HandoffFailure::ProtocolError, "{error}");
}

#[tokio::test]
async fn a_busy_source_is_worth_another_try() {
    let error = fetched_from(PATIENT, &[Frame::Ended(Why::Busy)], &[], false).await;
    assert!(error.is_retryable(), "{error}");
}

#[tokio::test]
async fn a_reader_that_says_nothing_or_nonsense_is_dropped_and_the_next_is_served() {
    let stop = CancellationToken::new();
    let (address, serving) = source(QUICK, &stop).await;
    let nonsense: [&[u8]; 4] = [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"BatonKV\x02",
        &[
            b'B', b'a', b't', b'o', b'n', b'K', b'V', 1, 255, 255, 255, 255, 1,
        ],
    ];
    for bytes in nonsense {
        let mut stream = TcpStream::connect(&address).await.expect("it listens");
        stream.write_all(bytes).await.expect("accepted");
        let mut answer = Vec::new();
        // Closed or reset: either way nothing was said.
        let _ = stream.read_to_end(&mut answer).await;
        assert_eq!(answer, b"", "after {bytes:?}");
    }
    // The only place is free again.
    loop {
        let error = TcpTransport::new(PATIENT)
            .fetch(&request(address.clone()), &mut NoBlocks)
            .await
            .expect_err("no such lease");
        match error {
            TransportError::Gone(_) => break,
            // The dropped one's task may not have ended yet.
            TransportError::Busy { .. } | TransportError::Lost { .. } => {}
            other => panic!("{other}"),
        }
    }
    stop.cancel();
    serving.await.expect("no panic");
}

#[tokio::test]
async fn readers_beyond_the_limit_are_refused_at_once() {
    let stop = CancellationToken::new();
    let (address, serving) = source(PATIENT, &stop).await;
    let mut first = TcpStream::connect(&address).await.expect("it listens");
    first.write_all(&PREAMBLE).await.expect("accepted");
    let error = TcpTransport::new(PATIENT)
        .fetch(&request(address), &mut NoBlocks)
        .await
        .expect_err("one too many");
    assert!(matches!(error, TransportError::Busy { .. }), "{error}");
    stop.cancel();
    serving.await.expect("no panic");
}
