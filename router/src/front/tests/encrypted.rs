//! TLS: a real client over a real connection, a certificate that changes, and clients that do not speak it.

use std::path::Path;
use std::time::Duration;

use rcgen::generate_simple_self_signed;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::super::tls::{self, IdentityFiles};
use super::connections::{Served, read_until, served};
use super::*;
use wire::FinishReason::Stop;

/// A client that trusts the certificate which it writes.
fn issue(folder: &Path) -> TlsConnector {
    let made = generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
    std::fs::write(folder.join("tls.crt"), made.cert.pem()).unwrap();
    std::fs::write(folder.join("tls.key"), made.signing_key.serialize_pem()).unwrap();
    let mut roots = RootCertStore::empty();
    roots.add(made.cert.der().clone()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    TlsConnector::from(Arc::new(config))
}

async fn connect(served: &Served, client: &TlsConnector) -> std::io::Result<TlsStream<TcpStream>> {
    let stream = TcpStream::connect(served.address).await.unwrap();
    let name = ServerName::try_from("localhost").unwrap();
    client.connect(name, stream).await
}

async fn guarded(mut setup: Setup, folder: &Path) -> (Served, Arc<IdentityFiles>) {
    let files = Arc::new(tls::open(folder.join("tls.crt"), folder.join("tls.key")).unwrap());
    setup.access.identity = Some(files.clone());
    (served(setup).await, files)
}

#[tokio::test]
async fn a_stream_over_tls_comes_token_by_token() {
    let folder = tempfile::tempdir().unwrap();
    let client = issue(folder.path());
    let (mut served, _files) = guarded(Setup::new(Vec::new()), folder.path()).await;
    let mut stream = connect(&served, &client).await.unwrap();
    let body = json!({"model": "tiny", "prompt": "hi", "stream": true}).to_string();
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    stream
        .write_all(format!("{head}{body}").as_bytes())
        .await
        .unwrap();
    let (_, sink) = served.started.recv().await.unwrap();
    for text in ["a", "b"] {
        sink.events.send(token(ids(text)[0])).await.unwrap();
        read_until(&mut stream, &format!("\"text\":\"{text}\"")).await;
    }
    sink.events
        .send(says("", Stop).pop().unwrap())
        .await
        .unwrap();
    read_until(&mut stream, "[DONE]").await;
}

#[tokio::test]
async fn a_new_certificate_is_used_from_the_next_connection_on() {
    let folder = tempfile::tempdir().unwrap();
    let old = issue(folder.path());
    let (served, files) = guarded(Setup::new(Vec::new()), folder.path()).await;
    let mut open = connect(&served, &old).await.unwrap();
    let new = issue(folder.path());
    files.look();
    assert!(connect(&served, &old).await.is_err());
    connect(&served, &new).await.unwrap();
    // A broken file changes nothing.
    std::fs::write(folder.path().join("tls.crt"), "broken").unwrap();
    files.look();
    connect(&served, &new).await.unwrap();
    // Who was there before stays.
    open.write_all(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
        .await
        .unwrap();
    read_until(&mut open, "ok\n").await;
}

#[tokio::test]
async fn clients_that_do_not_shake_hands_are_let_go_and_others_served() {
    let folder = tempfile::tempdir().unwrap();
    let client = issue(folder.path());
    let mut setup = Setup::new(Vec::new());
    setup.config.head_timeout = Duration::from_millis(300);
    let (hasty, _files) = guarded(setup, folder.path()).await;
    // Where a handshake may take as long as a busy machine needs.
    let (patient, _files) = guarded(Setup::new(Vec::new()), folder.path()).await;
    let mut silent = TcpStream::connect(hasty.address).await.unwrap();
    let _silent_too = TcpStream::connect(patient.address).await.unwrap();
    let mut plain = TcpStream::connect(patient.address).await.unwrap();
    plain
        .write_all(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
        .await
        .unwrap();
    connect(&patient, &client).await.unwrap();
    for stream in [&mut silent, &mut plain] {
        let mut rest = Vec::new();
        // Closed or reset.
        let _ = stream.read_to_end(&mut rest).await;
        assert!(!String::from_utf8_lossy(&rest).contains("200"));
    }
}
