//! A router beside a real API server, with just the rights that it has in a cluster: pools and policies become what it serves, and
//! it serves on while the API server is away. The operator and the workers are real, the node is only said to be there.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use baton_e2e::cluster::imagined::ImaginedNode;
use baton_e2e::cluster::operated::{Operated, Operator};
use baton_e2e::http::Client;
use baton_e2e::openai::Ask;
use baton_e2e::process::Process;
use baton_e2e::record::Record;
use baton_e2e::{scenario, wait};
use rustix::process::Signal;
use serde_json::Value;

#[path = "router_in_cluster/unreadable.rs"]
mod unreadable;

/// Workers of the tiny model register within seconds.
const SOON: Duration = Duration::from_secs(90);
const NAMESPACE: &str = "tried";
const ACCOUNT: &str = "system:serviceaccount:tried:baton-router";

/// What the chart gives the router, and no more.
const RIGHTS: &str = r#"
apiVersion: v1
kind: Namespace
metadata: {name: tried}
---
apiVersion: v1
kind: ServiceAccount
metadata: {name: baton-router, namespace: tried}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {name: baton-router, namespace: tried}
rules:
- {apiGroups: [""], resources: [pods], verbs: [get, list, watch]}
- {apiGroups: [serving.baton.dev], resources: [prefillpools, decodepools, routepolicies], verbs: [get, list, watch]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: baton-router, namespace: tried}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: baton-router}
subjects: [{kind: ServiceAccount, name: baton-router, namespace: tried}]
"#;

fn pools() -> String {
    let pool = |kind: &str, name: &str| {
        format!(
            "apiVersion: serving.baton.dev/v1alpha1\nkind: {kind}\nmetadata: {{name: {name}, namespace: {NAMESPACE}, labels: {{tier: {name}}}}}\n\
             spec: {{model: {{name: tiny, source: {{uri: \"builtin://tiny?seed=7\"}}}}, engine: {{type: Builtin}}, kvPool: {{blocks: 256}}}}\n---\n"
        )
    };
    pool("PrefillPool", "prefill") + &pool("DecodePool", "decode")
}

/// A policy for the two; `more` are fields of its spec.
fn policy(more: &str) -> String {
    format!(
        "apiVersion: serving.baton.dev/v1alpha1\nkind: RoutePolicy\nmetadata: {{name: tiny, namespace: {NAMESPACE}}}\n\
         spec: {{model: tiny, overrides: Allowed, prefillPools: [{{name: prefill}}], {more}}}\n"
    )
}

const DECODE: &str = "decodePools: [{name: decode}]";

struct Scene {
    baton: Operated,
    router: Process,
    api: Client,
    admin: Client,
    _operator: Operator,
    _node: ImaginedNode,
}

/// Everything but pools and policies.
async fn start() -> Result<Option<Scene>> {
    let Some(baton) = Operated::start()? else {
        return Ok(None);
    };
    baton.kubectl().apply(RIGHTS)?;
    let folder = baton.cluster.folder()?.join("pods");
    std::fs::create_dir_all(&folder)?;
    let node = ImaginedNode::start(baton.kubectl(), "imagined", &folder)?;
    let operator = baton.operator("operator", "one")?;

    let token = ["create", "token", "baton-router", "--namespace=tried"];
    let token = baton.kubectl().run(&token)?;
    let kubeconfig = baton.cluster.folder()?.join("router.kubeconfig");
    std::fs::copy(baton.kubectl().kubeconfig(), &kubeconfig)?;
    let token = format!("--token={}", token.trim());
    for arguments in [
        ["config", "set-credentials", "router", &token],
        ["config", "set-context", "--current", "--user=router"],
    ] {
        let mut own = baton.kubectl().command(&arguments);
        let output = own.env("KUBECONFIG", &kubeconfig).output()?;
        ensure!(output.status.success(), "{output:?}");
    }

    let folder = baton.cluster.folder()?.join("router");
    std::fs::create_dir_all(&folder)?;
    let state = folder.join("state").to_string_lossy().into_owned();
    let free = "127.0.0.1:0";
    let mut router = Process::start(
        "baton-router",
        &folder,
        &[
            "--kubernetes",
            "--listen",
            free,
            "--admin",
            free,
            "--state-dir",
            &state,
        ],
        &[
            ("KUBECONFIG", &kubeconfig.to_string_lossy()),
            ("POD_NAME", "baton-router-0"),
            ("POD_NAMESPACE", NAMESPACE),
        ],
    )?;
    let (api, admin) = wait::until_blocking("the router says where it listens", SOON, || {
        let log = router.errors();
        if let Some(status) = router.ended() {
            return Err(format!("it ended with {status}: {log}"));
        }
        let address = |name: &str| {
            let mut words = log.split_whitespace();
            let found = words.find_map(|word| word.strip_prefix(name));
            found
                .and_then(|address| address.parse().ok())
                .map(Client::new)
        };
        address("listen=").zip(address("admin=")).ok_or(log)
    })?;
    Ok(Some(Scene {
        baton,
        router,
        api,
        admin,
        _operator: operator,
        _node: node,
    }))
}

impl Scene {
    fn apply(&self, manifest: &str) -> Result<String> {
        self.baton.kubectl().apply(manifest)
    }

    async fn ready(&self) -> Result<String, String> {
        let answer = self.admin.get("/readyz").await;
        let answer = answer.map_err(|error| format!("{error:#}"))?;
        let text = answer.text();
        if answer.status == 200 {
            Ok(text)
        } else {
            Err(text)
        }
    }

    /// Waits until `GET /v1/policies` is as wanted.
    async fn policies(&self, what: &str, wanted: impl Fn(&Value) -> bool) -> Result<Value> {
        wait::until(what, SOON, async || {
            let seen = self.admin.get_json("/v1/policies").await;
            let seen = seen.map_err(|error| format!("{error:#}"))?;
            if wanted(&seen) {
                Ok(seen)
            } else {
                Err(seen.to_string())
            }
        })
        .await
    }

    /// Waits until so many workers can be placed on and the first version of the policy is in force: two watches, in any order.
    async fn workers(&self, count: usize) -> Result<Value> {
        self.policies("the first version is in force", |seen| {
            generation(seen) == Some(1)
        })
        .await?;
        wait::until("the workers are there", SOON, async || {
            let seen = self.admin.get_json("/v1/fleet").await;
            let seen = seen.map_err(|error| format!("{error:#}"))?;
            let all = seen["workers"].as_array().cloned().unwrap_or_default();
            let ready = all.iter().filter(|one| one["state"] == "Ready").count();
            if ready == count {
                Ok(seen)
            } else {
                Err(seen.to_string())
            }
        })
        .await
    }
}

fn generation(policies: &Value) -> Option<u64> {
    policies["policies"][0]["generation"].as_u64()
}

fn ask(salt: &str) -> Ask {
    let prompt: Vec<u32> = (0..300).map(|place| (place * 11) % 200 + 3).collect();
    Ask::ids("tiny", &prompt, 16)
        .with("ignore_eos", true)
        .with("cache_salt", salt)
}

#[test]
fn what_is_applied_is_served_and_a_policy_changes_under_requests() {
    scenario(async {
        let Some(mut scene) = start().await? else {
            return Ok(());
        };
        // With nothing at all: an installation waits for it.
        wait::until("an empty namespace is ready", SOON, async || {
            scene.ready().await
        })
        .await?;
        let unknown = ask("none").raw(&scene.api).await?;
        ensure!(unknown.status == 404, "{}", unknown.text());

        scene.apply(&pools())?;
        scene.apply(&policy(DECODE))?;
        let fleet = scene.workers(2).await?;
        for worker in fleet["workers"].as_array().context("workers")? {
            ensure!(worker["domains"]["host"] == "imagined", "{worker}");
            ensure!(
                worker["domains"]["rack"].is_null(),
                "a node without a rack: {worker}"
            );
        }
        let local = ask("a").mode("Aggregated").send(&scene.api).await?;
        let remote = ask("b").mode("Disaggregated").send(&scene.api).await?;
        ensure!(
            local.output == remote.output,
            "{:?} {:?}",
            local.output,
            remote.output
        );
        let record = Record::of(&scene.admin, &remote.run).await?;
        ensure!(
            record.kind()? == "Remote" && record.bytes() > 0,
            "{}",
            record.0
        );
        ensure!(remote.run.starts_with("baton-router-0-"), "{}", remote.run);

        // A stream that began under the first version ends under it.
        let mut stream = ask("c").with("max_tokens", 200).stream(&scene.api).await?;
        stream.text().await?.context("a first token")?;
        scene.apply(&policy(&format!("mode: Aggregated, {DECODE}")))?;
        scene
            .policies("the second version is in force", |seen| {
                generation(seen) == Some(2)
            })
            .await?;
        let run = stream.run.clone();
        stream.rest().await?;
        let old = Record::of(&scene.admin, &run).await?;
        ensure!(old.0["policy"]["generation"] == 1, "{}", old.0);
        let new = ask("d").send(&scene.api).await?;
        let new = Record::of(&scene.admin, &new.run).await?;
        ensure!(
            new.0["policy"]["generation"] == 2 && new.0["mode"] == "Aggregated",
            "{}",
            new.0
        );

        // A version that nobody could honour: admission does not know the other objects, the router does.
        scene.apply(&policy(
            "decodePools: [{selector: {matchLabels: {tier: none}}}]",
        ))?;
        let refused = scene
            .policies("the third version is refused", |seen| {
                seen["refused"][0]["generation"] == 3
            })
            .await?;
        ensure!(
            generation(&refused) == Some(2),
            "the last good version is no longer in force: {refused}"
        );
        let reason = refused["refused"][0]["reason"].as_str().unwrap_or_default();
        ensure!(reason.contains("spec.decodePools[0]"), "{reason}");
        ask("e").send(&scene.api).await?;
        scene.apply(&policy(
            "decodePools: [{selector: {matchLabels: {tier: decode}}}]",
        ))?;
        let mended = scene
            .policies("the fourth is in force", |seen| generation(seen) == Some(4))
            .await?;
        ensure!(mended["refused"] == serde_json::json!([]), "{mended}");

        unreadable::is_said_and_disturbs_nobody(&scene).await?;

        scene
            .baton
            .kubectl()
            .run(&["delete", "routepolicy/tiny", "--namespace=tried"])?;
        scene
            .policies("the policy is gone", |seen| {
                seen["policies"] == serde_json::json!([])
            })
            .await?;
        ensure!(ask("f").raw(&scene.api).await?.status == 404);
        ensure!(scene.ready().await.is_ok(), "ready once, it stays so");

        // It has read, and written nothing.
        let (writes, _) = scene.baton.writes(0)?;
        ensure!(
            writes.iter().any(|write| write.is_the_operators()),
            "the log has no writes at all"
        );
        ensure!(
            writes.iter().all(|write| write.user != ACCOUNT),
            "{writes:?}"
        );
        scene.router.signal(Signal::TERM);
        let status = scene.router.wait(SOON)?;
        ensure!(status.success(), "{status}: {}", scene.router.errors());
        Ok(())
    });
}

#[test]
fn requests_do_not_notice_that_the_api_server_is_away() {
    scenario(async {
        let Some(scene) = start().await? else {
            return Ok(());
        };
        scene.apply(&pools())?;
        scene.apply(&policy(DECODE))?;
        scene.workers(2).await?;
        let reference = ask("r").mode("Aggregated").send(&scene.api).await?;

        let stop = tokio_util::sync::CancellationToken::new();
        let (asked, until) = (scene.api, stop.clone());
        let load = tokio::spawn(async move {
            let mut count = 0_u32;
            while !until.is_cancelled() {
                let mode = ["Aggregated", "Disaggregated"][count as usize % 2];
                let answer = ask(&format!("turn {count}"))
                    .mode(mode)
                    .send(&asked)
                    .await?;
                ensure!(answer.output == reference.output, "{:?}", answer.output);
                count += 1;
            }
            Ok(count)
        });
        scene.baton.cluster.program("restart-api-server", &[])?;
        scene.apply(&policy(&format!("mode: Aggregated, {DECODE}")))?;
        scene
            .policies("what was applied after the return is in force", |seen| {
                generation(seen) == Some(2)
            })
            .await?;
        stop.cancel();
        let count = load.await??;
        ensure!(count > 0, "nobody has asked for anything");
        Ok(())
    });
}
