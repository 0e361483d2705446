//! The front over real connections: tokens as they come, clients that leave, a shutdown that lets runs end.

use std::net::SocketAddr;
use std::time::Duration;

use baton_system::network::Listener;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::*;
use wire::FinishReason::Stop;

pub(super) struct Served {
    pub(super) address: SocketAddr,
    pub(super) started: Started,
    pub(super) shutdown: CancellationToken,
    pub(super) task: JoinHandle<()>,
}

pub(super) async fn served(setup: Setup) -> Served {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (front, started) = setup.front();
    let shutdown = front.shutdown().clone();
    let task = tokio::spawn(async move { front.serve(Listener::Machine(listener)).await });
    Served {
        address,
        started,
        shutdown,
        task,
    }
}

pub(super) async fn send(address: SocketAddr, fields: &Value) -> TcpStream {
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
pub(super) async fn read_until(stream: &mut (impl AsyncRead + Unpin), text: &str) -> String {
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
async fn what_does_not_end_after_a_shutdown_is_told_so_and_closed() {
    for (fields, said) in [
        (json!({"stream": true}), "event: error\ndata: {"),
        (json!({}), "HTTP/1.1 503 Service Unavailable"),
    ] {
        let mut setup = Setup::new(vec![token(0)]);
        setup.config.drain_timeout = Duration::from_millis(50);
        let mut served = served(setup).await;
        let mut client = send(served.address, &fields).await;
        let (_, sink) = served.started.recv().await.unwrap();
        if fields["stream"] == true {
            read_until(&mut client, "data: ").await;
        }
        served.shutdown.cancel();
        let mut rest = String::new();
        client.read_to_string(&mut rest).await.unwrap();
        assert!(rest.contains(said), "{rest}");
        assert!(rest.contains("\"code\":\"shutting_down\""), "{rest}");
        assert!(!rest.contains("[DONE]"), "{rest}");
        sink.client_gone.cancelled().await;
        served.task.await.unwrap();
    }
}

#[tokio::test]
async fn while_a_run_ends_others_are_sent_elsewhere_and_health_is_told() {
    let mut served = served(Setup::new(vec![token(0)])).await;
    let mut client = send(served.address, &json!({"stream": true})).await;
    let (_, sink) = served.started.recv().await.unwrap();
    read_until(&mut client, "data: ").await;
    // Open, and idle: of no use any more.
    let mut idle = TcpStream::connect(served.address).await.unwrap();
    idle.write_all(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
        .await
        .unwrap();
    read_until(&mut idle, "ok\n").await;
    served.shutdown.cancel();
    let mut rest = Vec::new();
    idle.read_to_end(&mut rest).await.unwrap();
    assert!(rest.is_empty());

    let mut late = send(served.address, &json!({})).await;
    let mut answer = String::new();
    late.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 503 "), "{answer}");
    for part in ["retry-after: 1", "connection: close", "shutting_down"] {
        assert!(answer.contains(part), "{part}: {answer}");
    }
    assert!(served.started.try_recv().is_err());
    let mut probe = TcpStream::connect(served.address).await.unwrap();
    probe
        .write_all(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
        .await
        .unwrap();
    read_until(&mut probe, "200 OK").await;

    sink.events
        .send(says("", Stop).pop().unwrap())
        .await
        .unwrap();
    read_until(&mut client, "[DONE]").await;
    served.task.await.unwrap();
}

#[tokio::test]
async fn a_head_that_does_not_come_is_not_waited_for() {
    let mut setup = Setup::new(Vec::new());
    setup.config.head_timeout = Duration::from_millis(20);
    let served = served(setup).await;
    let began = std::time::Instant::now();
    for part in ["", "POST /v1/completions HTTP/1.1\r\nhost"] {
        let mut client = TcpStream::connect(served.address).await.unwrap();
        client.write_all(part.as_bytes()).await.unwrap();
        let mut rest = String::new();
        client.read_to_string(&mut rest).await.unwrap();
        assert!(!rest.contains("200"), "{rest}");
    }
    assert!(began.elapsed() >= Duration::from_millis(40));
}

#[tokio::test]
async fn idle_connections_make_room_and_busy_ones_do_not() {
    let mut setup = Setup::new(vec![token(0)]);
    setup.config.max_connections = 2;
    let seen = setup.seen();
    let mut served = served(setup).await;
    let mut idle = Vec::new();
    for _ in 0..10 {
        idle.push(TcpStream::connect(served.address).await.unwrap());
    }
    let mut busy = Vec::new();
    for _ in 0..2 {
        let mut client = send(served.address, &json!({"stream": true})).await;
        busy.push((served.started.recv().await.unwrap().1, {
            read_until(&mut client, "data: ").await;
            client
        }));
    }
    for mut idle in idle {
        assert_eq!(idle.read(&mut [0]).await.unwrap(), 0, "it was sent away");
    }
    let mut refused = send(served.address, &json!({})).await;
    let mut answer = String::new();
    refused.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 503 "), "{answer}");
    assert!(answer.contains("retry-after: 1") && answer.contains("\"overloaded\""));
    // Ten idle ones and two that sent: all but the last two made room for another.
    seen(&[
        "baton_connections{state=\"busy\"} 2",
        "baton_connections{state=\"idle\"} 0",
        "baton_connection_events_total{event=\"accepted\"} 12",
        "baton_connection_events_total{event=\"displaced\"} 10",
        "baton_connection_events_total{event=\"refused\"} 1",
    ]);
    // The busy ones never noticed; when one has ended there is room.
    let (sink, mut client) = busy.pop().unwrap();
    sink.events
        .send(says("", Stop).pop().unwrap())
        .await
        .unwrap();
    read_until(&mut client, "[DONE]").await;
    send(served.address, &json!({})).await;
    served.started.recv().await.unwrap();
}

#[tokio::test]
async fn bodies_that_do_not_come_keep_nobody_from_being_served() {
    let mut setup = Setup::new(says("x", Stop));
    setup.config.max_in_flight = 2;
    let mut served = served(setup).await;
    let mut slow = Vec::new();
    for _ in 0..50 {
        let mut client = TcpStream::connect(served.address).await.unwrap();
        let head =
            "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n{";
        client.write_all(head.as_bytes()).await.unwrap();
        slow.push(client);
    }
    let mut client = send(served.address, &json!({})).await;
    read_until(&mut client, "200 OK").await;
    served.started.recv().await.unwrap();
}

#[tokio::test]
async fn a_client_that_stops_reading_is_given_up() {
    let mut setup = Setup::new(Vec::new());
    setup.config.write_timeout = Duration::from_millis(100);
    let seen = setup.seen();
    let mut served = served(setup).await;
    let fields = json!({"stream": true, "logprobs": true, "top_logprobs": 20});
    let mut client = send(served.address, &fields).await;
    let (_, sink) = served.started.recv().await.unwrap();
    let event = || RunEvent::Token {
        id: 1,
        logprobs: Some(wire::Logprobs {
            chosen: -0.5,
            top: (0..20)
                .map(|id| wire::TokenLogprob { id, logprob: -0.5 })
                .collect(),
        }),
    };
    sink.events.send(event()).await.unwrap();
    read_until(&mut client, "data: ").await;
    // More than the networks of both sides hold. It ends because the client is given up.
    let filling = async { while sink.events.send(event()).await.is_ok() {} };
    tokio::time::timeout(Duration::from_secs(60), filling)
        .await
        .unwrap();
    sink.client_gone.cancelled().await;
    served.shutdown.cancel();
    served.task.await.unwrap();
    seen(&[
        "baton_connection_events_total{event=\"stalled\"} 1",
        "baton_connections{state=\"busy\"} 0",
    ]);
}

#[tokio::test]
async fn a_client_that_closes_its_sending_side_is_gone() {
    let mut served = served(Setup::new(vec![token(0)])).await;
    for fields in [json!({"stream": true}), json!({})] {
        let mut client = send(served.address, &fields).await;
        let (_, sink) = served.started.recv().await.unwrap();
        if fields["stream"] == true {
            read_until(&mut client, "data: ").await;
        }
        client.shutdown().await.unwrap();
        sink.client_gone.cancelled().await;
    }
}
