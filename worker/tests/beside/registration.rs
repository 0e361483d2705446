//! What is registered: the card as observed, load, text, drain; and what is said when the server is not what it was declared.

use std::time::Duration;

use baton_protocol::card::{Dispatch, Split, TextCheck};
use baton_protocol::identity::FactSource;
use baton_protocol::wire;

use crate::double::{BLOCK, BLOCKS, Engine, Publishes, free_port, model_folder};
use crate::watcher::{PATIENCE, Router, client, config, daemon, get};

#[tokio::test(flavor = "multi_thread")]
async fn a_server_is_registered_as_it_is_seen() {
    let engine = Engine::start(0, Publishes::Listening).await;
    engine.set(|says| (says.running, says.waiting, says.late_reads) = (3, 2, 1));
    let folder = model_folder();
    let daemon = daemon(config(engine.port, Some(folder.path()))).await;
    let mut router = Router::watch(&daemon).await;
    let card = router.card.clone();
    assert_eq!(
        (card.engine.kind.as_str(), card.engine.version.as_str()),
        ("VLLM", "0.32.0")
    );
    let url = format!("http://127.0.0.1:{}", engine.port);
    let split = Split::None;
    let model = String::new();
    assert_eq!(card.dispatch, Dispatch::OpenAiHttp { url, model, split });
    assert_eq!(
        (card.capacity.blocks, card.capacity.block_size),
        (BLOCKS, BLOCK)
    );
    assert_eq!(card.capacity.max_context, 4096);
    assert_eq!(card.text, TextCheck::Verified);
    let adapters: Vec<_> = card
        .route_filter
        .adapters
        .iter()
        .map(|one| one.name.as_str())
        .collect();
    assert_eq!(adapters, ["tuned"]);
    let identity = &card.identity;
    assert!(identity.weights.known().unwrap().starts_with("blake3:"));
    assert_eq!(identity.kv_dtype.known().unwrap(), "BF16");
    for source in [
        identity.weights.source(),
        identity.attention.source(),
        identity.rope.source(),
        identity.block_size.source(),
        card.route_filter.tokenizer.source(),
    ] {
        assert_eq!(source, FactSource::Observed);
    }
    // Nobody told how it lies in memory: it pairs with no other.
    assert_eq!(card.layout.order.known(), None);

    router
        .until("a report", |router| router.load.load_sequence > 0)
        .await;
    let load = router.load;
    assert_eq!(
        (
            load.running_sequences,
            load.queued_sequences,
            load.late_reads
        ),
        (3, 2, 1)
    );
    assert_eq!(load.blocks.unwrap().active, BLOCKS / 4);

    let mut client = client(&daemon);
    let digest = card.route_filter.chat_template.known().unwrap().clone();
    let mut file = client
        .artifact(wire::ArtifactRequest { digest })
        .await
        .unwrap()
        .into_inner();
    let chunk = file.message().await.unwrap().unwrap();
    let artifact: serde_json::Value = serde_json::from_slice(&chunk.data).unwrap();
    assert!(
        artifact["chat_template"]
            .as_str()
            .unwrap()
            .contains("<|im_start|>")
    );
    let refused = client
        .prefill(wire::PrefillRequest::default())
        .await
        .unwrap_err();
    assert!(
        refused
            .message()
            .contains("called over HTTP: send the request to http://"),
        "{refused}"
    );

    let (status, body) = get(&daemon, "/v1/card").await;
    assert_eq!((status, body.contains("\"OpenAiHttp\"")), (200, true));
    let (_, body) = get(&daemon, "/v1/load").await;
    assert!(body.contains("\"lateReads\":1"), "{body}");
    let (_, metrics) = get(&daemon, "/metrics").await;
    assert!(
        metrics.contains("baton_engine_late_reads_total{pool=\"decode\"} 1"),
        "{metrics}"
    );
    daemon.stop().await;
    engine.end().await;
}

/// Its card would depend on how busy the machine was.
#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_slow_to_say_what_it_runs_is_asked_again() {
    let engine = Engine::start(0, Publishes::Nothing).await;
    engine.set(|says| (says.dtype, says.slow) = (Some("torch.float16"), true));
    let daemon = daemon(config(engine.port, None)).await;
    let card = Router::watch(&daemon).await.card;
    let dtype = &card.identity.kv_dtype;
    let seen = (dtype.known().map(String::as_str), dtype.source());
    assert_eq!(seen, (Some("F16"), FactSource::Observed));
    daemon.stop().await;
    engine.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_with_other_tokens_is_unverified_at_the_first_difference() {
    let engine = Engine::start(0, Publishes::Nothing).await;
    engine.set(|says| says.other_tokens = true);
    let folder = model_folder();
    let daemon = daemon(config(engine.port, Some(folder.path()))).await;
    let card = Router::watch(&daemon).await.card;
    let TextCheck::Unverified { reason } = card.text else {
        panic!("the tokens differ");
    };
    assert!(
        reason.starts_with("sample text 1: at place 1 the model's files give token"),
        "{reason}"
    );
    let told = |words: &str| card.notices.iter().any(|notice| notice.starts_with(words));
    assert!(
        told("events: the server publishes none"),
        "{:?}",
        card.notices
    );
    daemon.stop().await;
    engine.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_the_models_files_what_cannot_be_seen_is_unknown_or_declared() {
    let engine = Engine::start(0, Publishes::Nothing).await;
    let mut config = config(engine.port, None);
    config.engine.block_size = 8;
    let daemon = daemon(config).await;
    let card = Router::watch(&daemon).await.card;
    assert_eq!(card.identity.weights.source(), FactSource::Declared);
    assert_eq!(card.identity.weights.known().unwrap(), "declared:tiny@m1");
    assert_eq!(card.identity.attention.source(), FactSource::Unknown);
    assert_eq!(card.route_filter.tokenizer.source(), FactSource::Unknown);
    assert!(matches!(card.text, TextCheck::Unverified { .. }));
    // What is observed counts, and what was declared is said.
    assert_eq!(card.capacity.block_size, BLOCK);
    let told = |words: &str| card.notices.iter().any(|notice| notice.starts_with(words));
    assert!(
        told("engine.blockSize: declared is 8, the server has 4"),
        "{:?}",
        card.notices
    );
    assert!(told("model.source is absent"));
    assert!(told("tokenizer: unverified: model.source is absent"));
    daemon.stop().await;
    engine.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_daemon_serves_before_its_server_does_and_says_what_it_waits_for() {
    let port = free_port().await;
    let daemon = daemon(config(port, None)).await;
    assert_eq!(get(&daemon, "/healthz").await.0, 200);
    let (status, why) = get(&daemon, "/readyz").await;
    assert_eq!(status, 503);
    assert!(
        why.starts_with("worker d0: its server is not registered"),
        "{why}"
    );
    let refused = client(&daemon)
        .watch(wire::WatchRequest::default())
        .await
        .unwrap_err();
    assert_eq!(refused.code(), tonic::Code::Unavailable);
    let engine = Engine::start(port, Publishes::Nothing).await;
    Router::watch(&daemon).await;
    assert_eq!(get(&daemon, "/readyz").await.0, 200);
    daemon.stop().await;
    engine.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_does_not_come_or_is_another_ends_the_daemon_with_a_sentence() {
    let port = free_port().await;
    let mut impatient = config(port, None);
    impatient.engine.start_timeout_seconds = 1;
    let daemon_alone = daemon(impatient).await;
    let why = tokio::time::timeout(PATIENCE, daemon_alone.failed())
        .await
        .unwrap()
        .unwrap();
    assert!(
        why.starts_with("worker d0: engine.startTimeoutSeconds: the server was not there after 1 s: nothing listens at"),
        "{why}"
    );

    let engine = Engine::start(0, Publishes::Nothing).await;
    engine.set(|says| says.model = "other");
    let daemon = daemon(config(engine.port, None)).await;
    let why = tokio::time::timeout(PATIENCE, daemon.failed())
        .await
        .unwrap()
        .unwrap();
    assert!(
        why.contains("model.name: the server at")
            && why.contains("serves other, not tiny: start it with --served-model-name tiny"),
        "{why}"
    );
    engine.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drain_lasts_until_the_server_runs_nothing() {
    let engine = Engine::start(0, Publishes::Nothing).await;
    engine.set(|says| says.running = 1);
    let daemon = daemon(config(engine.port, None)).await;
    let mut router = Router::watch(&daemon).await;
    router
        .until("a report", |router| router.load.running_sequences == 1)
        .await;
    let (_, report) = get(&daemon, "/drain?waitSeconds=1").await;
    assert!(
        report.contains("\"drained\":false") && report.contains("\"operations\":1"),
        "{report}"
    );
    router.until("the notice", |router| router.draining).await;
    assert_eq!(get(&daemon, "/readyz").await.0, 503);
    let drained = get(&daemon, "/drain?waitSeconds=60");
    let ends = async {
        tokio::time::sleep(Duration::from_millis(500)).await;
        engine.set(|says| says.running = 0);
    };
    let ((_, report), ()) = tokio::join!(drained, ends);
    assert!(report.contains("\"drained\":true"), "{report}");
    daemon.stop().await;
    engine.end().await;
}

/// A long prompt keeps a server from answering: its life ends, and its answers go on.
#[tokio::test(flavor = "multi_thread")]
async fn a_drain_does_not_end_because_the_server_answers_nobody() {
    let engine = Engine::start(0, Publishes::Nothing).await;
    engine.set(|says| says.running = 1);
    let daemon = daemon(config(engine.port, None)).await;
    let mut router = Router::watch(&daemon).await;
    engine.set(|says| says.healthy = false);
    router.ended().await;
    let (_, report) = get(&daemon, "/drain?waitSeconds=2").await;
    assert!(report.contains("\"drained\":false"), "{report}");
    let drained = get(&daemon, "/drain?waitSeconds=60");
    let ((_, report), ()) = tokio::join!(drained, engine.end());
    assert!(report.contains("\"drained\":true"), "{report}");
    daemon.stop().await;
}

/// A kubelet that restarts a server calls its `preStop`, and with it the drain, although the pod stays.
#[tokio::test(flavor = "multi_thread")]
async fn a_drain_ends_with_the_process_that_it_was_of() {
    let engine = Engine::start(0, Publishes::Nothing).await;
    let port = engine.port;
    let daemon = daemon(config(port, None)).await;
    let mut router = Router::watch(&daemon).await;
    get(&daemon, "/drain?waitSeconds=0").await;
    router.until("the notice", |router| router.draining).await;

    // It was only away: who told it to drain still means it.
    engine.set(|says| says.healthy = false);
    router.ended().await;
    engine.set(|says| says.healthy = true);
    let mut router = Router::watch(&daemon).await;
    assert_eq!(get(&daemon, "/readyz").await.0, 503);

    engine.end().await;
    router.ended().await;
    let engine = Engine::start(port, Publishes::Nothing).await;
    let mut router = Router::watch(&daemon).await;
    assert_eq!(get(&daemon, "/readyz").await.0, 200);
    router
        .until("a report", |router| router.load.load_sequence > 0)
        .await;
    assert!(!router.load.draining && !router.draining);
    daemon.stop().await;
    engine.end().await;
}

/// An engine whose process lives and whose computing part is dead.
#[tokio::test(flavor = "multi_thread")]
async fn a_server_whose_engine_is_dead_is_away() {
    let engine = Engine::start(0, Publishes::Nothing).await;
    let daemon = daemon(config(engine.port, None)).await;
    let mut router = Router::watch(&daemon).await;
    engine.set(|says| says.healthy = false);
    router.ended().await;
    assert_eq!(get(&daemon, "/readyz").await.0, 503);
    daemon.stop().await;
    engine.end().await;
}
