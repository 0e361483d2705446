//! The operator against a real API server, with real workers as the pods of a node that is only said to be there: who leads, what a
//! killed one leaves behind, and that a cluster at rest is left in peace.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Result, ensure};
use baton_e2e::cluster::imagined::ImaginedNode;
use baton_e2e::cluster::kubectl::condition;
use baton_e2e::cluster::operated::Operated;
use baton_e2e::scenario;
use rustix::process::Signal;
use serde_json::Value;

/// Workers of the tiny model register within seconds, and idle ones drain at once.
const SOON: Duration = Duration::from_secs(90);
/// A lease is 30 s, and a candidate looks every 2 s.
const AFTER_A_DEATH: Duration = Duration::from_secs(45);
/// For how long nobody does anything: workers are asked again within it.
const QUIET: Duration = Duration::from_secs(65);
/// Kills of one test, and the seed of when they come.
const KILLS: u32 = 12;
const SEED: u64 = 20_261_130;

const REPLICAS: usize = 3;

fn pools(blocks: u32) -> String {
    let spec = |replicas: usize| {
        format!(
            "{{replicas: {replicas}, model: {{name: tiny, source: {{uri: \"builtin://tiny?seed=7\"}}}}, engine: {{type: Builtin}}, kvPool: {{blocks: {blocks}}}}}"
        )
    };
    format!(
        "apiVersion: serving.baton.dev/v1alpha1\nkind: DecodePool\nmetadata: {{name: decode, namespace: tried}}\nspec: {}\n---\n\
         apiVersion: serving.baton.dev/v1alpha1\nkind: PrefillPool\nmetadata: {{name: prefill, namespace: tried}}\nspec: {}\n---\n\
         apiVersion: serving.baton.dev/v1alpha1\nkind: RoutePolicy\nmetadata: {{name: tiny, namespace: tried}}\n\
         spec: {{model: tiny, prefillPools: [{{name: prefill}}], decodePools: [{{name: decode}}]}}\n",
        spec(REPLICAS),
        spec(1)
    )
}

/// A control plane with a namespace and a node.
fn start() -> Result<Option<(Operated, ImaginedNode)>> {
    let Some(baton) = Operated::start()? else {
        return Ok(None);
    };
    baton.kubectl().run(&["create", "namespace", "tried"])?;
    let folder = baton.cluster.folder()?.join("pods");
    std::fs::create_dir_all(&folder)?;
    let node = ImaginedNode::start(baton.kubectl(), "imagined", &folder)?;
    Ok(Some((baton, node)))
}

/// Both pools are ready for the generation that was applied last.
fn ready(baton: &Operated) -> Result<()> {
    for pool in ["decodepool/decode", "prefillpool/prefill"] {
        let what = format!("{pool} is ready");
        let all = [pool, "--namespace=tried"];
        baton.kubectl().until(&what, SOON, &all, |pool| {
            let current = pool["status"]["observedGeneration"] == pool["metadata"]["generation"];
            match condition(pool, "Ready").0.as_str() {
                "True" if current => Ok(()),
                _ => Err(pool["status"].to_string()),
            }
        })?;
    }
    Ok(())
}

fn pods(baton: &Operated, pool: &str) -> Result<Vec<Value>> {
    let selector = format!("--selector=serving.baton.dev/pool={pool}");
    baton
        .kubectl()
        .list(&["pods", "--namespace=tried", &selector])
}

#[test]
fn of_two_operators_one_leads_and_a_cluster_at_rest_is_left_in_peace() {
    scenario(async {
        let Some((baton, _node)) = start()? else {
            return Ok(());
        };
        let mut first = baton.operator("first", "one")?;
        first.leads(SOON).await?;
        baton.kubectl().apply(&pools(64))?;
        ready(&baton)?;

        // The second watches and does nothing; the first has nothing to do.
        let second = baton.operator("second", "one")?;
        let (_, from) = baton.writes(0)?;
        // The one wait for a length of time: that nothing happens cannot be seen earlier.
        tokio::time::sleep(QUIET).await;
        let (writes, _) = baton.writes(from)?;
        let ours: Vec<_> = writes
            .iter()
            .filter(|write| write.is_the_operators())
            .collect();
        ensure!(
            ours.is_empty(),
            "a cluster at rest was written to: {ours:#?}"
        );
        ensure!(
            writes
                .iter()
                .any(|write| write.resource == "leases" && write.name == "one"),
            "the log has no renewal of the lease: it is not the log"
        );
        ensure!(
            second.metric("baton_operator_leading").await? == 0.0,
            "both lead"
        );

        // Killed, it gives nothing back: the second waits until the lease has expired, and goes on with all that has happened.
        first.process.signal(Signal::KILL);
        baton.kubectl().run(&[
            "scale",
            "decodepool/decode",
            "--namespace=tried",
            &format!("--replicas={}", REPLICAS + 1),
        ])?;
        second.leads(AFTER_A_DEATH).await?;
        ready(&baton)?;
        ensure!(pods(&baton, "decode")?.len() == REPLICAS + 1);

        // Asked to end, it gives the lease back: the third need not wait.
        let third = baton.operator("third", "one")?;
        let mut second = second;
        second.process.signal(Signal::TERM);
        let status = second.process.wait(SOON)?;
        ensure!(status.success(), "{status}: {}", second.process.errors());
        third.leads(Duration::from_secs(10)).await?;
        Ok(())
    });
}

#[test]
fn an_operator_that_is_killed_anywhere_goes_on_where_it_was() {
    scenario(async {
        let Some((baton, _node)) = start()? else {
            return Ok(());
        };
        let mut random = SEED;
        let mut below = |bound: u64| {
            random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (random >> 33) % bound
        };
        // From nothing to all, then from revision to revision: whatever it is at, it is killed at it.
        for kill in 0..KILLS {
            baton.kubectl().apply(&pools(64 + 16 * (kill / 2)))?;
            // Each has a lease of its own: none of the dead ones renews, and their leases need not be waited for.
            let name = format!("killed-{kill}");
            let mut operator = baton.operator(&name, &name)?;
            operator.leads(SOON).await?;
            let pause = Duration::from_millis(below(2_500));
            tokio::time::sleep(pause).await;
            operator.process.signal(Signal::KILL);
            operator.process.wait(SOON)?;
        }
        let last = baton.operator("last", "last")?;
        ready(&baton)?;
        drop(last);

        for (pool, count) in [("decode", REPLICAS), ("prefill", 1)] {
            let pods = pods(&baton, pool)?;
            let revisions: Vec<&str> = pods
                .iter()
                .filter_map(|pod| pod["metadata"]["labels"]["serving.baton.dev/revision"].as_str())
                .collect();
            ensure!(
                pods.len() == count && revisions.iter().all(|revision| *revision == revisions[0]),
                "{pool} came to rest with {revisions:?}"
            );
        }
        nothing_twice(&baton)
    });
}

/// Read from the log of every write: no pod is deleted twice, and no pool ever has more pods than it wants.
fn nothing_twice(baton: &Operated) -> Result<()> {
    let (writes, _) = baton.writes(0)?;
    let mut deleted: BTreeMap<&str, u32> = BTreeMap::new();
    let mut live: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    let mut made = 0;
    for write in &writes {
        if write.resource != "pods" || !write.is_the_operators() || !write.has_succeeded() {
            continue;
        }
        let Some((pool, _)) = write.name.split_once('-') else {
            continue;
        };
        let pods = live.entry(pool).or_default();
        match write.verb.as_str() {
            "create" => {
                made += 1;
                pods.push(&write.name);
                let most = if pool == "decode" { REPLICAS } else { 1 };
                ensure!(
                    pods.len() <= most,
                    "{pool} has too many pods at once: {pods:?}"
                );
            }
            "delete" => {
                pods.retain(|name| *name != write.name);
                let times = deleted.entry(&write.name).or_default();
                *times += 1;
                ensure!(*times == 1, "{} was deleted twice", write.name);
            }
            _ => {}
        }
    }
    // The kills were not all before anything happened: six revisions of four pods, as far as each got.
    ensure!(made > 2 * (REPLICAS + 1), "only {made} pods were ever made");
    Ok(())
}
