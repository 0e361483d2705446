//! What a stand-in's prefix cache holds, told as vLLM tells it: over ZeroMQ, all of it in a replay, and nothing new after it.

use anyhow::{Context as _, Result};
use bytes::Bytes;
use tokio_util::task::AbortOnDropHandle;
use zeromq::{PubSocket, RouterSocket, Socket as _, SocketRecv as _, SocketSend as _, ZmqMessage};

/// The sockets of one server, closed when dropped.
#[derive(Debug)]
pub struct Events {
    /// As a configuration of vLLM names them.
    pub endpoint: String,
    pub replay: String,
    _sockets: AbortOnDropHandle<Result<()>>,
}

impl Events {
    /// Listens at both, as a configuration of vLLM names them. `held`: batches of events in their order.
    ///
    /// # Errors
    /// It cannot.
    pub async fn open(endpoint: &str, replay: &str, held: Vec<Bytes>) -> Result<Self> {
        let mut published = PubSocket::new();
        let bound = published.bind(&listened(endpoint)).await?;
        let mut replays = RouterSocket::new();
        let replay = replays.bind(&listened(replay)).await?;
        Ok(Self {
            endpoint: anywhere(&bound.to_string())?,
            replay: anywhere(&replay.to_string())?,
            _sockets: AbortOnDropHandle::new(tokio::spawn(answer(replays, held, published))),
        })
    }
}

/// vLLM's asterisk is every address.
fn listened(endpoint: &str) -> String {
    endpoint.replace('*', "0.0.0.0")
}

/// The server listens, and whoever reads knows its host.
fn anywhere(endpoint: &str) -> Result<String> {
    let (_, port) = endpoint
        .rsplit_once(':')
        .context("an endpoint has a port")?;
    Ok(format!("tcp://*:{port}"))
}

/// `[who, "", number]` is answered with `[who, "", topic, number, batch]` from that number on, and number -1 at the end. The socket on
/// which nothing is published stays open meanwhile.
async fn answer(mut socket: RouterSocket, held: Vec<Bytes>, _published: PubSocket) -> Result<()> {
    loop {
        let question = socket.recv().await?.into_vec();
        let [who, .., from] = question.as_slice() else {
            continue;
        };
        let Ok(from) = <[u8; 8]>::try_from(from.as_ref()).map(u64::from_be_bytes) else {
            continue;
        };
        let missed = (0..).zip(&held).skip_while(|(number, _)| *number < from);
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
