//! Whatever keeps a pair from sharing memory, its KV comes over the next transport, and the reason is told.

use std::sync::Arc;

use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;

use super::lies::{arena, liar, loose};
use super::{NoBlocks, PATIENCE, Source, address, quick, request, transport};
use crate::transport::choice::{Way, Ways};
use crate::transport::shm::{ShmOptions, ShmTransport};
use crate::transport::tcp::TcpTransport;
use crate::transport::tcp::frame::Frame;
use crate::transport::{Obstacle, Transport};

type Told = Arc<Mutex<Vec<(&'static str, &'static str, Obstacle)>>>;

/// Fetches over `shm` at `address`, or else over TCP from the same source, and returns the transport that it came over.
async fn fetched(shm: ShmTransport, address: &str) -> (&'static str, Told) {
    let source = Source::at(super::address(), quick()).await;
    let stop = CancellationToken::new();
    let tcp = TcpTransport::default();
    let listening = tcp
        .listen("127.0.0.1:0", Arc::new(source.pool.clone()), stop.clone())
        .await
        .expect("a free port");
    let serving = tokio::spawn(listening.run);
    let ways = vec![
        Way {
            transport: Arc::new(shm),
            address: address.to_owned(),
        },
        Way {
            transport: Arc::new(tcp),
            address: listening.address,
        },
    ];
    let told = Told::default();
    let tell = Arc::clone(&told);
    let ways = Ways::new(
        ways,
        Box::new(move |left| tell.lock().push((left.from, left.to, left.obstacle))),
    );
    let ways = ways.expect("two of them");
    let request = request(address);
    let mut sink = NoBlocks;
    // Again after the first: the way that was left is not tried a second time.
    for _ in 0..2 {
        let fetch = ways.fetch(&request, &mut sink);
        let end = tokio::time::timeout(PATIENCE, fetch).await;
        assert_eq!(end.expect("it ends by itself").expect("served").end, 2);
    }
    let kind = ways.kind();
    stop.cancel();
    serving.await.expect("no panic");
    source.end().await;
    (kind, told)
}

async fn fallen(shm: ShmTransport, address: &str, obstacle: Obstacle) {
    let (kind, told) = fetched(shm, address).await;
    assert_eq!(kind, "Tcp");
    assert_eq!(*told.lock(), [("Shm", "Tcp", obstacle)]);
}

#[tokio::test]
async fn nobody_at_the_socket() {
    fallen(transport(), &address(), Obstacle::Socket).await;
}

#[tokio::test]
async fn another_user() {
    let mine = Source::at(address(), quick()).await;
    let stranger = ShmTransport::new(
        "host",
        ShmOptions {
            user: quick().user + 1,
            ..quick()
        },
    );
    fallen(stranger, &mine.address, Obstacle::Credentials).await;
    mine.end().await;
}

#[tokio::test]
async fn memory_that_cannot_be_mapped() {
    let liar = liar(vec![arena(2).0, Frame::Accepted], Some(loose())).await;
    fallen(transport(), &liar, Obstacle::Memory).await;
}

#[tokio::test]
async fn nothing_in_the_way_stays_with_shared_memory() {
    let mine = Source::at(address(), quick()).await;
    let (kind, told) = fetched(transport(), &mine.address).await;
    assert_eq!((kind, told.lock().len()), ("Shm", 0));
    mine.end().await;
}
