//! What vLLM's NixlConnector tells whoever is about to read from it, over ZeroMQ: Baton's daemon asks it to know what it is beside.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Result, ensure};
use bytes::Bytes;
use rmpv::Value;
use tokio_util::task::AbortOnDropHandle;
use zeromq::{
    DealerSocket, RouterSocket, Socket as _, SocketRecv as _, SocketSend as _, ZmqMessage,
};

/// `["get_meta_msg", 0, 0]`: of pipeline rank 0, tensor rank 0.
const QUESTION: &[u8] = b"\x93\xc4\x0cget_meta_msg\0\0";
const TOKEN_BYTES: u32 = 32 << 10;
/// For an answer that takes no computing.
const PATIENCE: Duration = Duration::from_secs(5);

/// The socket of one server, closed when dropped.
#[derive(Debug)]
pub struct Handshakes {
    pub address: SocketAddr,
    _answers: AbortOnDropHandle<Result<()>>,
}

/// Of whom it tells.
#[derive(Clone, Copy, Debug)]
pub struct Teller<'a> {
    pub engine_id: &'a str,
    /// Tokens of a block.
    pub block_size: u32,
    pub blocks: u32,
}

impl Handshakes {
    /// Listens at `host:port`.
    ///
    /// # Errors
    /// It cannot.
    pub async fn open(at: &str, teller: Teller<'_>) -> Result<Self> {
        let mut socket = RouterSocket::new();
        let bound = socket.bind(&format!("tcp://{at}")).await?.to_string();
        let address = bound.trim_start_matches("tcp://").parse()?;
        let answer = metadata(teller)?;
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

/// Asks the connector at `host:port`, as a decode server does before it reads, whether it is still the one that handed KV over.
///
/// # Errors
/// Nothing answers there, or another engine does.
pub async fn is_there(address: &str, engine_id: &str) -> Result<()> {
    let asked = async {
        let mut socket = DealerSocket::new();
        socket.connect(&format!("tcp://{address}")).await?;
        let mut question = ZmqMessage::from(Bytes::new());
        question.push_back(Bytes::from_static(QUESTION));
        socket.send(question).await?;
        anyhow::Ok(socket.recv().await?.into_vec())
    };
    let frames = tokio::time::timeout(PATIENCE, asked).await??;
    let id = engine_id.as_bytes();
    let names = |frame: &Bytes| frame.windows(id.len().max(1)).any(|part| part == id);
    ensure!(
        frames.iter().any(names),
        "{address} is another engine than {engine_id}"
    );
    Ok(())
}

/// A map with a map in it, as bytes.
fn metadata(teller: Teller<'_>) -> Result<Bytes> {
    let block_bytes = teller.block_size * TOKEN_BYTES;
    let inner = bytes(&[
        ("engine_id", teller.engine_id.into()),
        ("kv_caches_base_addr", Value::Array(vec![0.into()])),
        ("num_blocks", teller.blocks.into()),
        ("block_lens", Value::Array(vec![block_bytes.into()])),
        ("kv_cache_layout", "LBHNC".into()),
        ("block_size", teller.block_size.into()),
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
