//! What the stand-in's prefix cache holds, told as vLLM tells it: over ZeroMQ, all of it in a replay, and nothing new after it.

use anyhow::{Context as _, Result};
use bytes::Bytes;
use rmpv::Value;
use tokio_util::task::AbortOnDropHandle;
use zeromq::{PubSocket, RouterSocket, Socket as _, SocketRecv as _, SocketSend as _, ZmqMessage};

use crate::LENGTHS;
use crate::fake::BLOCK_SIZE;
use crate::prompts;
use crate::text::Text;

/// Batches of events in their order, one for each text.
#[derive(Debug)]
pub(crate) struct Held(Vec<Bytes>);

impl Held {
    /// The shared beginnings whose number is `place` among each `of`.
    pub(crate) fn of(text: &Text, (place, of): (usize, usize)) -> Result<Self> {
        let mut batches = Vec::new();
        let mut next_hash = 1;
        for characters in LENGTHS {
            for number in (0..prompts::SHARED).filter(|number| number % of == place) {
                let tokens = text.chat_beginning(&prompts::shared(characters, number))?;
                let whole = tokens.len() / BLOCK_SIZE as usize;
                let hashes = next_hash..next_hash + whole as u64;
                next_hash = hashes.end;
                let tokens = &tokens[..whole * BLOCK_SIZE as usize];
                batches.push(batch(hashes.map(Value::from).collect(), tokens)?);
            }
        }
        Ok(Self(batches))
    }
}

/// `[time, [BlockStored], rank]`. Hashes are the engine's own names: anything that is not said twice.
fn batch(hashes: Vec<Value>, tokens: &[u32]) -> Result<Bytes> {
    let fields: [(&str, Value); 9] = [
        ("type", "BlockStored".into()),
        ("block_hashes", Value::Array(hashes)),
        ("parent_block_hash", Value::Nil),
        (
            "token_ids",
            tokens.iter().map(|token| Value::from(*token)).collect(),
        ),
        ("block_size", BLOCK_SIZE.into()),
        ("lora_id", Value::Nil),
        ("medium", "GPU".into()),
        ("group_idx", 0.into()),
        ("kv_cache_spec_kind", "full_attention".into()),
    ];
    let stored = fields.map(|(name, value)| (Value::from(name), value));
    let batch = Value::Array(vec![
        Value::F64(1.0),
        Value::Array(vec![Value::Map(stored.to_vec())]),
        0.into(),
    ]);
    let mut bytes = Vec::new();
    rmpv::encode::write_value(&mut bytes, &batch)?;
    Ok(bytes.into())
}

/// The sockets of one server, closed when dropped.
pub(crate) struct Events {
    /// As a configuration of vLLM names them.
    pub(crate) endpoint: String,
    pub(crate) replay: String,
    _replays: AbortOnDropHandle<Result<()>>,
    _published: PubSocket,
}

impl Events {
    pub(crate) async fn open(held: Held) -> Result<Self> {
        let mut published = PubSocket::new();
        let bound = published.bind("tcp://127.0.0.1:0").await?;
        let mut replays = RouterSocket::new();
        let replay = replays.bind("tcp://127.0.0.1:0").await?;
        Ok(Self {
            endpoint: anywhere(&bound.to_string())?,
            replay: anywhere(&replay.to_string())?,
            _replays: AbortOnDropHandle::new(tokio::spawn(answer(replays, held))),
            _published: published,
        })
    }
}

/// The server listens, and whoever reads knows its host.
fn anywhere(endpoint: &str) -> Result<String> {
    let (_, port) = endpoint
        .rsplit_once(':')
        .context("an endpoint has a port")?;
    Ok(format!("tcp://*:{port}"))
}

/// `[who, "", number]` is answered with `[who, "", topic, number, batch]` from that number on, and number -1 at the end.
async fn answer(mut socket: RouterSocket, held: Held) -> Result<()> {
    loop {
        let question = socket.recv().await?.into_vec();
        let [who, .., from] = question.as_slice() else {
            continue;
        };
        let Ok(from) = <[u8; 8]>::try_from(from.as_ref()).map(u64::from_be_bytes) else {
            continue;
        };
        let missed = (0..).zip(&held.0).skip_while(|(number, _)| *number < from);
        let end = (u64::MAX, &Bytes::new());
        for (number, payload) in missed.chain([end]) {
            let mut message = ZmqMessage::from(who.clone());
            message.push_back(Bytes::new());
            message.push_back(Bytes::new());
            message.push_back(Bytes::copy_from_slice(&number.to_be_bytes()));
            message.push_back(payload.clone());
            socket.send(message).await?;
        }
    }
}
