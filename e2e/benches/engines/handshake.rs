//! What vLLM's NixlConnector tells whoever is about to read from it, over ZeroMQ: Baton's daemon asks it to know what it is beside.

use std::net::SocketAddr;

use anyhow::Result;
use bytes::Bytes;
use rmpv::Value;
use tokio_util::task::AbortOnDropHandle;
use zeromq::{RouterSocket, Socket as _, SocketRecv as _, SocketSend as _, ZmqMessage};

use crate::answers::engine_id;
use crate::fake::BLOCK_SIZE;

/// Of 32 KiB a token.
const BLOCK_BYTES: u32 = BLOCK_SIZE * (32 << 10);

/// The socket of one server, closed when dropped.
pub(crate) struct Handshakes {
    pub(crate) address: SocketAddr,
    _answers: AbortOnDropHandle<Result<()>>,
}

impl Handshakes {
    /// Of the server that listens at `server`.
    pub(crate) async fn open(server: SocketAddr) -> Result<Self> {
        let mut socket = RouterSocket::new();
        let bound = socket.bind("tcp://127.0.0.1:0").await?.to_string();
        let address = bound.trim_start_matches("tcp://").parse()?;
        let answer = metadata(server)?;
        Ok(Self {
            address,
            _answers: AbortOnDropHandle::new(tokio::spawn(serve(socket, answer))),
        })
    }
}

async fn serve(mut socket: RouterSocket, answer: Bytes) -> Result<()> {
    loop {
        let question = socket.recv().await?.into_vec();
        let Some(who) = question.first() else {
            continue;
        };
        // Then the server's clock, which nobody here needs to be right.
        let clock = Bytes::from_static(&[0xcb, 0, 0, 0, 0, 0, 0, 0, 0]);
        let mut message = ZmqMessage::from(who.clone());
        for frame in [Bytes::new(), answer.clone(), clock] {
            message.push_back(frame);
        }
        socket.send(message).await?;
    }
}

/// A map with a map in it, as bytes.
fn metadata(server: SocketAddr) -> Result<Bytes> {
    let inner = bytes(&[
        ("engine_id", engine_id(server).into()),
        ("kv_caches_base_addr", Value::Array(vec![0.into()])),
        ("num_blocks", crate::fake::BLOCKS.into()),
        ("block_lens", Value::Array(vec![BLOCK_BYTES.into()])),
        ("kv_cache_layout", "LBHNC".into()),
        ("block_size", BLOCK_SIZE.into()),
        ("attn_backend_name", "NONE".into()),
    ])?;
    bytes(&[
        ("compatibility_hash", "0".repeat(64).into()),
        ("agent_metadata_bytes", Value::Binary(inner.to_vec())),
    ])
}

fn bytes(fields: &[(&str, Value)]) -> Result<Bytes> {
    let fields = fields.iter();
    let map = fields.map(|(name, value)| (Value::from(*name), value.clone()));
    let mut bytes = Vec::new();
    rmpv::encode::write_value(&mut bytes, &Value::Map(map.collect()))?;
    Ok(bytes.into())
}
