//! The router's front door as real clients abuse it: ten thousand that say nothing, two thousand that send too slowly, bodies made to
//! be large in memory, readers that stop, halves of connections; keys that change, and the end of a router.

#[path = "front_door/bodies.rs"]
mod bodies;
#[path = "front_door/sending.rs"]
mod sending;

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use baton_e2e::fleet::Fleet;
use baton_e2e::http::Client;
use baton_e2e::lone_router::LoneRouter;
use baton_e2e::manifest::Manifest;
use baton_e2e::openai::Ask;
use baton_e2e::record::Record;
use baton_e2e::{scenario, skipped, wait};
use futures::{StreamExt, stream};
use rustix::process::{Resource, Rlimit, Signal, getrlimit, setrlimit};
use sending::Sending;
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio_util::task::AbortOnDropHandle;

const IDLE: u64 = 10_000;
const SLOW: u64 = 2_000;

/// A body must be there within this: long enough for all to be connected, short enough to be waited for.
const BODY_SECONDS: &str = "20";

/// An idle connection, or one of a slow body: twice what docs/api.md says of an idle one, for the allocator's gaps.
const CONNECTION_KIB: u64 = 40;

/// Lease of the manifests and a little.
const LEASE: Duration = Duration::from_secs(6);
const SOON: Duration = Duration::from_secs(30);

/// What a router that ends gives to streams under way.
const DRAIN_SECONDS: &str = "15";
/// Tokens of [`Manifest::slow`], of 20 ms each, of a stream that ends within that, even where each comes four times as late: 3 s.
const SHORT: u32 = 150;
/// The same of one that does not, however long it takes until the router is told to end: a minute.
const LONG: u32 = 3000;

/// As many descriptors as may be; `None`, and said, where they are too few.
fn descriptors(needed: u64) -> Option<()> {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        ..limit
    };
    setrlimit(Resource::Nofile, raised).ok()?;
    let enough = limit.maximum.is_none_or(|most| most > needed + 1_000);
    if !enough {
        skipped(&format!(
            "fewer than {needed} files and a thousand may be open (ulimit -Hn)"
        ));
    }
    enough.then_some(())
}

/// KiB of a field of `/proc/PID/status`.
fn memory(router: &LoneRouter, field: &str) -> Result<u64> {
    let status = std::fs::read_to_string(format!("/proc/{}/status", router.id()))?;
    let line = status.lines().find_map(|line| line.strip_prefix(field));
    let value = line.with_context(|| format!("no {field}"))?;
    let digits: String = value.chars().filter(char::is_ascii_digit).collect();
    Ok(digits.parse()?)
}

/// `memory_bound_mib` of the start-up line.
fn bound_mib(router: &LoneRouter) -> Result<u64> {
    let log = router.whole_log();
    let (_, rest) = log.split_once("memory_bound_mib=").context("no bound")?;
    let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
    Ok(digits.parse()?)
}

async fn is_served(client: &Client) -> Result<()> {
    let ask = Ask::ids("tiny", &[5, 6, 7], 3).with("ignore_eos", true);
    let answer = tokio::time::timeout(SOON, ask.send(client)).await??;
    ensure!(answer.output.output_tokens == 3, "{answer:?}");
    Ok(())
}

/// Sends a byte more on each connection every second until all have their answer.
async fn dribble(mut slow: Vec<Sending>) -> Vec<Sending> {
    while !slow.iter().all(Sending::is_answered) {
        tokio::time::sleep(Duration::from_secs(1)).await;
        for sending in slow.iter_mut().filter(|sending| !sending.is_answered()) {
            // It may be closed meanwhile.
            sending.send(b" ").await;
        }
    }
    slow
}

#[test]
fn silent_and_slow_clients_keep_nobody_out_and_take_little_memory() {
    if descriptors(IDLE + SLOW).is_none() {
        return;
    }
    scenario(async {
        let fleet = Fleet::of(&Manifest::tiny()).await?;
        let limit = ["--body-timeout-seconds", BODY_SECONDS];
        let router = LoneRouter::with(&fleet, &[], &limit).await?;
        is_served(&router.api).await?;
        let before = memory(&router, "VmRSS:")?;

        let address = router.api.address();
        let connect = move |_| async move { TcpStream::connect(address).await };
        let idle: Vec<_> = stream::iter(0..IDLE)
            .map(connect)
            .buffer_unordered(64)
            .collect()
            .await;
        let slow = move |_| async move {
            let mut sending = Sending::begin(address, "content-length: 100000").await?;
            ensure!(sending.send(b"{").await, "a slow body is refused");
            Ok::<_, anyhow::Error>(sending)
        };
        let slow: Vec<Result<Sending>> = stream::iter(0..SLOW)
            .map(slow)
            .buffer_unordered(64)
            .collect()
            .await;
        let mut silent: Vec<Sending> = slow.into_iter().collect::<Result<_>>()?;
        let open = idle.iter().filter(|stream| stream.is_ok()).count() as u64;
        ensure!(open == IDLE, "{open} idle connections were taken");
        // The kernel takes a connection for a router that closes it at once: all are held by the router itself.
        wait::until("the router holds them all", SOON, async || {
            let held = std::fs::read_dir(format!("/proc/{}/fd", router.id()))
                .map_err(|error| error.to_string())?
                .count() as u64;
            (held >= IDLE + SLOW)
                .then_some(())
                .ok_or(format!("{held} descriptors"))
        })
        .await?;
        let dribbling = silent.split_off(silent.len() / 2);
        let dribbling = AbortOnDropHandle::new(tokio::spawn(dribble(dribbling)));

        for _ in 0..20 {
            is_served(&router.api).await?;
        }
        let taken = memory(&router, "VmRSS:")?.saturating_sub(before);
        ensure!(
            taken < (IDLE + SLOW) * CONNECTION_KIB,
            "{} connections take {taken} KiB",
            IDLE + SLOW
        );
        drop(idle);
        // A byte now and then is no body either.
        let dribbling = tokio::time::timeout(SOON, dribbling).await;
        let dribbling = dribbling.context("nobody is told that a body takes too long")??;
        for sending in silent.into_iter().chain(dribbling) {
            let (status, told) = sending.answer().await?;
            ensure!(
                status == 408 && told["error"]["code"] == "request_timeout",
                "{status}: {told}"
            );
        }
        is_served(&router.api).await?;
        drop(router);
        fleet.end().await
    });
}

#[test]
fn few_connections_are_enough_for_everybody_who_asks() {
    scenario(async {
        let fleet = Fleet::of(&Manifest::tiny()).await?;
        let router = LoneRouter::with(&fleet, &[], &["--max-connections", "20"]).await?;
        let mut silent = Vec::new();
        for _ in 0..500 {
            silent.push(TcpStream::connect(router.api.address()).await?);
        }
        is_served(&router.api).await?;
        drop(router);
        fleet.end().await
    });
}

/// A completion request as bytes.
fn request(body: &Value, id: &str, mode: &str) -> String {
    let body = body.to_string();
    format!(
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-request-id: {id}\r\nx-baton-mode: {mode}\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
}

async fn nothing_is_left(fleet: &Fleet, admin: &Client, id: &str) -> Result<()> {
    fleet
        .idle(LEASE + SOON)
        .await
        .with_context(|| id.to_owned())?;
    let record = Record::of_request(admin, id).await?;
    let status = &record.0["outcome"]["status"];
    ensure!(
        status == "Cancelled",
        "{id}: outcome {}",
        record.0["outcome"]
    );
    Ok(())
}

#[test]
fn half_a_connection_is_a_client_that_is_gone_in_every_phase() {
    scenario(async {
        let fleet = Fleet::of(&Manifest::slow()).await?;
        let prompt = |tokens: u32, salt: u32| -> Vec<u32> {
            (0..tokens)
                .map(|index| 3 + (index * 7 + salt * 13) % 200)
                .collect()
        };
        for (salt, (id, mode, tokens, role, figure)) in (1..).zip([
            (
                "local-prompt",
                "Aggregated",
                2500,
                "decode",
                "/queuedTokens",
            ),
            (
                "remote-prompt",
                "Disaggregated",
                2500,
                "prefill",
                "/queuedTokens",
            ),
            ("tokens", "Disaggregated", 50, "decode", "/runningSequences"),
        ]) {
            let busy = |worker: &Value| {
                let figure = worker.pointer(figure).and_then(Value::as_u64);
                figure.is_some_and(|count| count > 0)
            };
            for streamed in [true, false] {
                let id = format!("{id}-{streamed}");
                let body = json!({"model": "tiny", "prompt": prompt(tokens, 2 * salt + u32::from(streamed)), "max_tokens": 400,
                    "ignore_eos": true, "stream": streamed});
                let mut client = TcpStream::connect(fleet.api.address()).await?;
                client
                    .write_all(request(&body, &id, mode).as_bytes())
                    .await?;
                wait::until(&id, SOON, async || {
                    let workers = fleet
                        .workers(Some(role))
                        .await
                        .map_err(|error| error.to_string())?;
                    if workers.iter().any(busy) {
                        Ok(())
                    } else {
                        Err(format!("{workers:?}"))
                    }
                })
                .await?;
                client.shutdown().await?;
                nothing_is_left(&fleet, &fleet.admin, &id).await?;
            }
        }
        fleet.end().await
    });
}

#[test]
fn a_router_that_ends_lets_streams_end_and_says_so_to_the_others() {
    scenario(async {
        let fleet = Fleet::of(&Manifest::slow()).await?;
        let drain = ["--drain-seconds", DRAIN_SECONDS];
        let mut router = LoneRouter::with(&fleet, &[], &drain).await?;
        let ask = |tokens: u32| Ask::ids("tiny", &[5, 6, 7], tokens).with("ignore_eos", true);
        let (whole, api) = (ask(LONG), router.api);
        let whole = tokio::spawn(async move { whole.raw(&api).await });
        // A request that has not arrived would be turned away like any later one.
        wait::until("what is asked for whole runs", SOON, async || {
            let workers = fleet.workers(Some("decode")).await;
            let workers = workers.map_err(|error| error.to_string())?;
            let running = |worker: &Value| worker["runningSequences"].as_u64();
            let count: u64 = workers.iter().filter_map(running).sum();
            (count == 1).then_some(()).ok_or(format!("{count} run"))
        })
        .await?;
        let mut long = ask(LONG).request("long").stream(&router.api).await?;
        long.text().await?.context("no token")?;
        // Last, and nothing is waited for any more: it must not have ended before the router is told to.
        let mut short = ask(SHORT).stream(&router.api).await?;
        short.text().await?.context("no token")?;
        router.signal(Signal::TERM);
        wait::until("the router is not ready", SOON, async || {
            match router.admin.get("/readyz").await {
                Ok(answer) if answer.status == 503 => Ok(()),
                other => Err(format!("{other:?}")),
            }
        })
        .await?;
        let late = ask(1).raw(&router.api).await?;
        ensure!(late.status == 503, "{}", late.text());
        ensure!(
            late.header("retry-after") == Some("1"),
            "{:?}",
            late.headers
        );
        ensure!(
            late.header("connection") == Some("close"),
            "{:?}",
            late.headers
        );
        ensure!(
            late.json()?["error"]["code"] == "shutting_down",
            "{}",
            late.text()
        );

        short
            .rest()
            .await
            .context("there was time for the short one")?;
        let cut = loop {
            let Some(event) = long.events.next().await? else {
                bail!("the long stream ended without a word");
            };
            ensure!(event.data != "[DONE]", "there was no time for the long one");
            if event.name == "error" {
                break event.data;
            }
        };
        ensure!(cut.contains("shutting_down"), "{cut}");
        ensure!(
            long.events.next().await?.is_none(),
            "nothing comes after it"
        );
        let whole = whole.await??;
        ensure!(whole.status == 503, "{}", whole.text());
        let status = router.wait(SOON)?;
        ensure!(status.success(), "{status}: {}", router.log());
        fleet.idle(LEASE + SOON).await?;
        fleet.end().await
    });
}

/// Of `secret` and `secret-two`, by `printf %s KEY | sha256sum`.
const SECRET: &str = "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b";
const SECOND: &str = "cebdf378f2d2bd60d3e3693349e8f20f329daf11a276f849996f0a6377e2155b";

#[test]
fn keys_are_asked_for_and_change_without_a_restart() {
    scenario(async {
        let fleet = Fleet::of(&Manifest::tiny()).await?;
        let folder = tempfile::tempdir()?;
        let file = folder.path().join("keys.json");
        let write = |hash: &str| {
            std::fs::write(
                &file,
                format!(r#"[{{"name": "a", "hash": "sha256:{hash}"}}]"#),
            )
        };
        write(SECRET)?;
        let path = file.to_str().context("no text")?;
        let router = LoneRouter::with(&fleet, &[], &["--api-keys-file", path]).await?;
        let log = router.whole_log();
        ensure!(log.contains("with one of 1 API keys, without TLS"), "{log}");
        let ask = async |key: &str| {
            let headers = [("authorization", format!("Bearer {key}"))];
            let headers = headers
                .each_ref()
                .map(|(name, value)| (*name, value.as_str()));
            let body = json!({"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 1});
            let answer = router.api.post("/v1/completions", &headers, &body).await?;
            Ok::<_, anyhow::Error>(answer.status)
        };
        ensure!(ask("secret").await? == 200, "the key is known");
        ensure!(ask("secret-two").await? == 401, "the other is not yet");
        let swapped = async |known: &str, unknown: &str| {
            wait::until("the keys change", SOON, async || {
                match (ask(known).await, ask(unknown).await) {
                    (Ok(200), Ok(401)) => Ok(()),
                    other => Err(format!("{other:?}")),
                }
            })
            .await
        };
        write(SECOND)?;
        swapped("secret-two", "secret").await?;
        // What is wrong changes nothing, and is said.
        std::fs::write(&file, "[")?;
        wait::until("the fault is logged", SOON, async || {
            let log = router.whole_log();
            let said = log.contains("API keys (--api-keys-file): ")
                && log.contains("the last good version stays in force");
            if said { Ok(()) } else { Err(router.log()) }
        })
        .await?;
        swapped("secret-two", "secret").await?;
        drop(router);
        fleet.end().await
    });
}
