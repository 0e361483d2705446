//! The front over real connections: tokens as they come, clients that leave, a shutdown that lets runs end.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use baton_system::network::Listener;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::super::serve::serve;
use super::*;
use wire::FinishReason::Stop;

struct Served {
    address: SocketAddr,
    started: Started,
    shutdown: CancellationToken,
    task: JoinHandle<()>,
}

async fn served(setup: Setup) -> Served {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let shutdown = CancellationToken::new();
    let config = setup.config.clone();
    let (routes, started) = setup.build();
    let stop = shutdown.clone();
    let task = tokio::spawn(async move {
        serve(Listener::Machine(listener), routes, &config, stop).await;
    });
    Served {
        address,
        started,
        shutdown,
        task,
    }
}

async fn send(address: SocketAddr, fields: &Value) -> TcpStream {
    let body = with_fields(
        json!({"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}),
        fields,
    );
    let mut stream = TcpStream::connect(address).await.unwrap();
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    stream
        .write_all(format!("{head}{body}").as_bytes())
        .await
        .unwrap();
    stream
}

/// Reads until `text` has come.
async fn read_until(stream: &mut TcpStream, text: &str) -> String {
    let mut read = Vec::new();
    loop {
        let count = stream.read_buf(&mut read).await.unwrap();
        let so_far = String::from_utf8_lossy(&read).into_owned();
        if so_far.contains(text) {
            return so_far;
        }
        assert_ne!(count, 0, "the connection ended before {text:?}: {so_far}");
    }
}

#[tokio::test]
async fn each_token_is_sent_when_it_comes() {
    let mut served = served(Setup::new(Vec::new())).await;
    let mut client = send(served.address, &json!({"stream": true})).await;
    let (_, sink) = served.started.recv().await.unwrap();
    for text in ["a", "b", "c"] {
        sink.events.send(token(ids(text)[0])).await.unwrap();
        // The run does not go on before the client has this token.
        read_until(&mut client, &format!("\"content\":\"{text}\"")).await;
    }
    sink.events
        .send(says("", Stop).pop().unwrap())
        .await
        .unwrap();
    read_until(&mut client, "[DONE]").await;
}

#[tokio::test]
async fn a_client_that_hangs_up_ends_its_run() {
    let mut served = served(Setup::new(vec![token(0)])).await;
    for fields in [json!({"stream": true}), json!({})] {
        let mut client = send(served.address, &fields).await;
        let (_, sink) = served.started.recv().await.unwrap();
        if fields["stream"] == true {
            read_until(&mut client, "data: ").await;
        }
        drop(client);
        sink.client_gone.cancelled().await;
    }
}

#[tokio::test]
async fn a_shutdown_lets_a_run_end_and_takes_no_more() {
    let mut served = served(Setup::new(vec![token(ids("a")[0])])).await;
    let mut client = send(served.address, &json!({"stream": true})).await;
    let (_, sink) = served.started.recv().await.unwrap();
    read_until(&mut client, "data: ").await;
    served.shutdown.cancel();
    sink.events.send(token(ids("b")[0])).await.unwrap();
    read_until(&mut client, "\"content\":\"b\"").await;
    assert!(!served.task.is_finished());
    sink.events
        .send(says("", Stop).pop().unwrap())
        .await
        .unwrap();
    read_until(&mut client, "[DONE]").await;
    served.task.await.unwrap();
    assert!(TcpStream::connect(served.address).await.is_err());
}

#[tokio::test]
async fn a_run_that_does_not_end_after_a_shutdown_is_closed() {
    let mut setup = Setup::new(vec![token(0)]);
    setup.config.drain_timeout = Duration::from_millis(10);
    let mut served = served(setup).await;
    let mut client = send(served.address, &json!({"stream": true})).await;
    let (_, sink) = served.started.recv().await.unwrap();
    read_until(&mut client, "data: ").await;
    served.shutdown.cancel();
    sink.client_gone.cancelled().await;
    served.task.await.unwrap();
}

#[tokio::test]
async fn a_head_that_does_not_come_is_not_waited_for() {
    let mut setup = Setup::new(Vec::new());
    setup.config.head_timeout = Duration::from_millis(10);
    let served = served(setup).await;
    let mut client = TcpStream::connect(served.address).await.unwrap();
    client
        .write_all(b"POST /v1/completions HTTP/1.1\r\nhost")
        .await
        .unwrap();
    let mut rest = Vec::new();
    // Closed by the server; with or without a word.
    let _ = client.read_to_end(&mut rest).await;
}
