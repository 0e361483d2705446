//! Hand-offs over shared memory, and what a pair does where it cannot have it.

use baton_protocol::wire;
use baton_worker::config::{TransportName, WorkerConfig};
use baton_worker::transport::fault::Fault;

use crate::harness::{Run, With, Worker, config, remote, remote_by, worker, worker_with};

fn sharing(name: &str) -> WorkerConfig {
    let mut config = config(name);
    config.kv_pool.transports = vec![TransportName::Shm, TransportName::Tcp];
    config
}

async fn on(host: &'static str, name: &str) -> Worker {
    let with = With {
        host: Some(host),
        ..With::default()
    };
    worker_with(sharing(name), with).await
}

fn offered(worker: &Worker) -> Vec<&str> {
    let offers = &worker.running.card().transports;
    offers.iter().map(|offer| offer.kind.as_str()).collect()
}

/// Which transport a hand-off of some length took; its tokens are those of one worker alone.
async fn taken(prefill: &Worker, decode: &Worker) -> String {
    let reference = worker(config("reference")).await;
    let mut transport = String::new();
    for (name, prompt) in [("short", 5), ("full", 64), ("long", 700)] {
        let run = Run::new(name, prompt, 8);
        let expected = reference.generate(&run).await;
        let came = remote(prefill, decode, &run).await;
        assert_eq!(came.tokens, expected, "{name}");
        let moved = came.transferred.expect("it was transferred");
        assert_eq!(moved.blocks as usize, prompt.div_ceil(16));
        assert_eq!(moved.left, [], "nothing was in the way");
        transport = moved.transport;
    }
    reference.end().await;
    transport
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn workers_of_one_host_share_memory() {
    let (prefill, decode) = tokio::join!(on("here", "p"), on("here", "d"));
    assert_eq!(offered(&prefill), ["Shm", "Tcp"]);
    assert_eq!(taken(&prefill, &decode).await, "Shm");
    prefill.end().await;
    decode.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_that_is_closed_to_the_pair_is_left_for_tcp_and_the_reason_is_reported() {
    let (prefill, decode) = tokio::join!(on("here", "p"), on("here", "d"));
    let run = Run::new("closed", 64, 4);
    // Nobody listens there.
    let elsewhere = |descriptor: &mut wire::Descriptor| {
        for offer in &mut descriptor.transports {
            if offer.kind == "Shm" {
                offer.address.push_str("-gone");
            }
        }
    };
    let came = remote_by(&prefill, &decode, &run, true, elsewhere).await;
    let moved = came.transferred.expect("it was transferred");
    assert_eq!(moved.transport, "Tcp");
    let left = wire::TransportLeft {
        from: "Shm".to_owned(),
        to: "Tcp".to_owned(),
        cause: "socket".to_owned(),
    };
    assert_eq!(moved.left, [left]);
    prefill.end().await;
    decode.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn workers_of_two_hosts_take_tcp() {
    let (prefill, decode) = tokio::join!(on("here", "p"), on("there", "d"));
    assert_eq!(taken(&prefill, &decode).await, "Tcp");
    prefill.end().await;
    decode.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_that_cannot_share_says_so_and_is_read_over_tcp() {
    // A source that is wrong on purpose shows its bytes to nobody before they are made wrong.
    let with = With {
        host: Some("here"),
        fault: Some(Fault::FlipByte(1 << 40)),
        ..With::default()
    };
    let (prefill, decode) = tokio::join!(worker_with(sharing("p"), with), on("here", "d"));
    assert_eq!(offered(&prefill), ["Tcp"]);
    let notices = &prefill.running.card().notices;
    assert!(
        notices
            .iter()
            .any(|notice| notice.starts_with("Shm is not offered")),
        "{notices:?}"
    );
    assert_eq!(taken(&prefill, &decode).await, "Tcp");
    prefill.end().await;
    decode.end().await;

    let simulated = worker(sharing("nowhere")).await;
    assert_eq!(offered(&simulated), ["Tcp"], "no host, no shared memory");
    simulated.end().await;
}
