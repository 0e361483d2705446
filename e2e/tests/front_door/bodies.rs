//! Bodies that are large: in memory, on the way, or held back just before their end.

use std::collections::BTreeMap;

use anyhow::{Result, ensure};
use baton_e2e::fleet::Fleet;
use baton_e2e::lone_router::LoneRouter;
use baton_e2e::manifest::Manifest;
use baton_e2e::{scenario, wait};
use futures::{StreamExt, stream};
use serde_json::json;

use super::sending::Sending;
use super::{SOON, bound_mib, descriptors, is_served, memory};

/// Two hundred megabytes, in pieces.
const HUGE: usize = 200_000_000;
const PIECE: usize = 64 << 10;

/// Pieces of a body that is not yet too large, in which others are served.
const BEGUN: usize = 32;

/// What such a body may cost: the largest that is taken is 4 MiB, and a growing buffer has its old copy beside it.
const COSTS_KIB: u64 = 64 << 10;

/// Bodies that lack their last byte.
const HELD: usize = 2_000;
const HELD_BYTES: usize = 1 << 20;

/// Of them as many as there is room for: 32 of the largest, their first 16 KiB not counted.
const ROOM: usize = 33;

#[test]
fn two_hundred_megabytes_are_refused_and_cost_little_memory() {
    scenario(async {
        let fleet = Fleet::of(&Manifest::tiny()).await?;
        let router = LoneRouter::over(&fleet, &[]).await?;
        is_served(&router.api).await?;
        let spaces = " ".repeat(PIECE);
        let chunk = format!("{PIECE:x}\r\n{spaces}\r\n");
        for (framing, piece) in [
            (format!("content-length: {HUGE}"), &spaces),
            ("transfer-encoding: chunked".to_owned(), &chunk),
        ] {
            let before = memory(&router, "VmHWM:")?;
            let mut sending = Sending::begin(router.api.address(), &framing).await?;
            for number in 0..HUGE / PIECE {
                if number == BEGUN {
                    is_served(&router.api).await?;
                }
                if !sending.send(piece.as_bytes()).await {
                    break;
                }
            }
            let (status, told) = sending.answer().await?;
            ensure!(
                status == 413 && told["error"]["code"] == "request_too_large",
                "{framing}: {status}: {told}"
            );
            is_served(&router.api).await?;
            let grown = memory(&router, "VmHWM:")? - before;
            ensure!(grown < COSTS_KIB, "{framing}: {grown} KiB are taken");
        }
        drop(router);
        fleet.end().await
    });
}

#[test]
fn bodies_that_lack_their_last_byte_stay_within_the_bound() {
    if descriptors(HELD as u64).is_none() {
        return;
    }
    scenario(async {
        let fleet = Fleet::of(&Manifest::tiny()).await?;
        let largest = HELD_BYTES.to_string();
        // 2,100 times 128 KiB, 128 times 256 KiB, 224 times 1 MiB and 640 MiB: much less than the bodies are.
        let limits = [
            "--max-body-bytes",
            &largest,
            "--max-connections",
            "2100",
            "--max-in-flight",
            "64",
            "--max-waiting",
            "64",
            // The last are begun long after the first.
            "--body-timeout-seconds",
            "180",
        ];
        let router = LoneRouter::with(&fleet, &[], &limits).await?;
        is_served(&router.api).await?;
        let before = memory(&router, "VmRSS:")?;
        let bound = bound_mib(&router)? << 10;
        ensure!(
            bound < (HELD * HELD_BYTES / 1024) as u64 * 2 / 3,
            "{bound} KiB"
        );

        let request = r#"{"model":"tiny","prompt":[5,6,7],"max_tokens":3,"ignore_eos":true"#;
        let mut almost = request.to_owned();
        almost.extend(std::iter::repeat_n(' ', HELD_BYTES - 1 - request.len()));
        let (address, almost) = (router.api.address(), almost.as_str());
        let hold = move |_| async move {
            let framing = format!("content-length: {HELD_BYTES}");
            let mut sending = Sending::begin(address, &framing).await?;
            // One that is refused may be closed before all is sent.
            sending.send(almost.as_bytes()).await;
            Ok::<_, anyhow::Error>(sending)
        };
        let sent: Vec<Result<Sending>> = stream::iter(0..HELD)
            .map(hold)
            .buffer_unordered(64)
            .collect()
            .await;
        let mut sent: Vec<Sending> = sent.into_iter().collect::<Result<_>>()?;
        wait::until("those without room are told", SOON, async || {
            let open = sent.iter().filter(|sending| !sending.is_answered()).count();
            (open <= ROOM).then_some(()).ok_or(format!("{open} open"))
        })
        .await?;
        for _ in 0..20 {
            is_served(&router.api).await?;
        }

        for sending in &mut sent {
            // Of no use to those that were refused.
            sending.send(b"}").await;
        }
        let mut answers: BTreeMap<u16, usize> = BTreeMap::new();
        for sending in sent {
            let (status, told) = sending.answer().await?;
            let in_form = match status {
                200 => told["choices"].is_array(),
                503 => {
                    told["error"]["code"] == "overloaded" && told["error"]["message"].is_string()
                }
                _ => false,
            };
            ensure!(in_form, "{status}: {told}");
            *answers.entry(status).or_default() += 1;
        }
        // Who has room is served once the last byte is there.
        let served = answers.get(&200).copied().unwrap_or_default();
        ensure!((ROOM / 2..=ROOM).contains(&served), "{answers:?}");
        let most = memory(&router, "VmHWM:")?.saturating_sub(before);
        ensure!(most < bound, "{most} KiB are taken, {bound} KiB may be");
        is_served(&router.api).await?;
        drop(router);
        fleet.end().await
    });
}

#[test]
fn bodies_that_are_large_in_memory_stay_within_the_bound() {
    scenario(async {
        let fleet = Fleet::of(&Manifest::tiny()).await?;
        // 128 + 3·32 times 2 MiB, and 512 MiB, and little for connections and requests.
        let limits = [
            "--max-body-bytes",
            "2097152",
            "--max-connections",
            "200",
            "--max-in-flight",
            "20",
            "--max-waiting",
            "20",
        ];
        let router = LoneRouter::with(&fleet, &[], &limits).await?;
        is_served(&router.api).await?;
        let before = memory(&router, "VmRSS:")?;
        let bound = bound_mib(&router)? << 10;
        ensure!(bound < 1200 << 10, "{bound} KiB");

        let maps = format!("[{}0]", "{\"\":0},".repeat(290_000));
        let lists = format!("[{}0]", "[],".repeat(680_000));
        let text = "a ".repeat(1_000_000);
        let bodies: Vec<String> = [
            format!("{{\"model\":\"tiny\",\"prompt\":\"a\",\"x\":{maps}}}"),
            format!("{{\"model\":\"tiny\",\"prompt\":\"a\",\"x\":{lists}}}"),
            format!("{{\"model\":\"tiny\",\"prompt\":{lists}}}"),
            format!(
                "{{\"model\":\"tiny\",\"prompt\":[{}1]}}",
                "1,".repeat(1_000_000)
            ),
            json!({"model": "tiny", "prompt": text}).to_string(),
            json!({"model": "tiny", "prompt": "a", "chat_template_kwargs": {"a": text}})
                .to_string(),
        ]
        .to_vec();
        let api = router.api;
        let send = |index: usize| {
            let body = bodies[index % bodies.len()].clone();
            async move {
                let answer = api.open_bytes("/v1/completions", &[], body.into()).await?;
                answer.whole().await
            }
        };
        let flood = async {
            let answers: Vec<_> = stream::iter(0..36)
                .map(send)
                .buffer_unordered(12)
                .collect()
                .await;
            for answer in answers {
                let answer = answer?;
                let told = answer.json()?;
                let in_form = told["error"]["message"].is_string() || told["choices"].is_array();
                ensure!(in_form, "{}: {told}", answer.status);
            }
            Ok(())
        };
        let others = async {
            for _ in 0..5 {
                is_served(&router.api).await?;
            }
            Ok::<_, anyhow::Error>(())
        };
        tokio::try_join!(flood, others)?;
        let most = memory(&router, "VmHWM:")?.saturating_sub(before);
        ensure!(most < bound, "{most} KiB are taken, {bound} KiB may be");
        drop(router);
        fleet.end().await
    });
}
