//! SGLang: registered with its bootstrap server, followed by its events, refused in another mode.

use baton_protocol::card::{Dispatch, Split, TextCheck};
use baton_worker::config::WorkerConfig;
use serde_json::json;

use crate::double::{BLOCK, BLOCKS, Engine, Publishes, model_folder, stored};
use crate::watcher::{PATIENCE, Router, daemon, get};

fn config(port: u16, folder: &std::path::Path) -> WorkerConfig {
    let config: WorkerConfig = serde_json::from_value(json!({
        "name": "p0", "pool": "prefill", "role": "Prefill", "roles": ["Prefill"], "model": {"name": "tiny", "source": {"path": folder}},
        "engine": {"type": "SGLang", "url": format!("http://127.0.0.1:{port}"), "blockSize": BLOCK, "connector": "Sglang",
            "bootstrapPort": port, "startTimeoutSeconds": 60},
    }))
    .unwrap();
    config.check().unwrap();
    config
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prefill_server_is_registered_when_its_ranks_are() {
    let mut engine = Engine::start(0, Publishes::Listening).await;
    engine.set(|says| {
        says.sglang = Some("prefill");
        says.ranks_registered = false;
        says.measured = false;
        says.running = 2;
    });
    let folder = model_folder();
    let daemon = daemon(config(engine.port, folder.path())).await;
    let waits_for = async |reason: &str| {
        let waits = async {
            while !get(&daemon, "/readyz").await.1.contains(reason) {
                tokio::time::sleep(std::time::Duration::from_millis(50)).await;
            }
        };
        tokio::time::timeout(PATIENCE, waits).await.unwrap();
    };
    waits_for("has not heard of all ranks").await;
    engine.set(|says| says.ranks_registered = true);
    // Without metrics it would look idle, whatever it does.
    waits_for("--enable-metrics").await;
    engine.set(|says| says.measured = true);

    let mut router = Router::watch(&daemon).await;
    let card = router.card.clone();
    assert_eq!(
        (card.engine.kind.as_str(), card.engine.version.as_str()),
        ("SGLang", "0.5.23")
    );
    let (host, port) = ("127.0.0.1".to_owned(), engine.port);
    let Dispatch::OpenAiHttp { split, .. } = &card.dispatch else {
        panic!("a server is called over HTTP");
    };
    assert_eq!(*split, Split::Bootstrap { host, port });
    assert_eq!(
        (card.capacity.blocks, card.capacity.block_size),
        (BLOCKS, BLOCK)
    );
    assert_eq!(card.text, TextCheck::Verified);

    let tokens: Vec<u32> = (0..3 * BLOCK).collect();
    engine.publish(vec![stored(&[1, 2, 3], None, &tokens)]);
    router
        .until("a prompt", |router| router.credit(&tokens) == 3)
        .await;
    router
        .until("a report", |router| router.load.running_sequences == 2)
        .await;
    daemon.stop().await;
    engine.end().await;
}

/// It runs nothing any more, and a decode server has still to take what it computed.
#[tokio::test(flavor = "multi_thread")]
async fn a_prefill_server_is_not_empty_while_its_kv_is_on_its_way() {
    let engine = Engine::start(0, Publishes::Nothing).await;
    engine.set(|says| {
        says.sglang = Some("prefill");
        says.unsent = 1;
    });
    let folder = model_folder();
    let daemon = daemon(config(engine.port, folder.path())).await;
    Router::watch(&daemon).await;
    let (_, report) = get(&daemon, "/drain?waitSeconds=4").await;
    assert!(
        report.contains("\"drained\":false") && report.contains("\"leasesOpen\":1"),
        "{report}"
    );
    engine.set(|says| says.unsent = 0);
    let (_, report) = get(&daemon, "/drain?waitSeconds=60").await;
    assert!(report.contains("\"drained\":true"), "{report}");
    daemon.stop().await;
    engine.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_in_another_mode_ends_the_daemon_with_a_sentence() {
    let engine = Engine::start(0, Publishes::Nothing).await;
    engine.set(|says| says.sglang = Some("null"));
    let folder = model_folder();
    let daemon = daemon(config(engine.port, folder.path())).await;
    let why = tokio::time::timeout(PATIENCE, daemon.failed())
        .await
        .unwrap()
        .unwrap();
    assert!(
        why.contains("needs --disaggregation-mode prefill, the server runs with null"),
        "{why}"
    );
    engine.end().await;
}
