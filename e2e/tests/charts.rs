//! The charts as real helm renders and installs them: what comes out, what it may do, which values are refused, secrets that stay.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use baton_e2e::binaries::repository;
use baton_e2e::cluster::Cluster;
use baton_e2e::cluster::helm::Helm;
use baton_e2e::cluster::kubectl::Kubectl;
use serde_json::Value;

const SOON: Duration = Duration::from_secs(60);

/// `helm template` with random values left out.
const RENDERED: [&str; 7] = [
    "template",
    "baton",
    "charts/baton",
    "--namespace",
    "baton",
    "--set",
    "secrets.create=false",
];

#[test]
fn charts_are_what_was_looked_at_and_install_on_a_cluster() -> Result<()> {
    let Some(cluster) = Cluster::control_plane()? else {
        return Ok(());
    };
    let Some(helm) = Helm::found(cluster.kubectl().kubeconfig())? else {
        return Ok(());
    };
    rendered_as_committed(&helm)?;
    charts_pass_lint(&helm)?;
    values_that_cannot_be_meant_are_refused(&helm)?;
    only_listed_scrapers_reach_workers(&helm)?;
    routers_are_given_keys_and_a_certificate(&helm)?;
    the_admin_port_is_never_published(&helm)?;
    installed(&helm, cluster.kubectl())?;
    secrets_stay(&helm, cluster.kubectl())?;
    pods_are_hardened(cluster.kubectl())?;
    rights_are_no_more_than_needed(cluster.kubectl())?;
    two_operators_of_one_namespace_are_refused(&helm, cluster.kubectl())?;
    Ok(())
}

fn rendered_as_committed(helm: &Helm) -> Result<()> {
    let file = "e2e/tests/charts/baton.yaml";
    let committed = std::fs::read_to_string(repository().join(file)).unwrap_or_default();
    ensure!(
        helm.run(&RENDERED)? == committed,
        "{file} is not what the chart renders: look at the difference, and if it is meant run `helm {} > {file}`",
        RENDERED.join(" ")
    );
    Ok(())
}

fn charts_pass_lint(helm: &Helm) -> Result<()> {
    let said = helm.run(&["lint", "--strict", "charts/baton-crds", "charts/baton"])?;
    ensure!(said.contains("0 chart(s) failed"), "{said}");
    Ok(())
}

fn values_that_cannot_be_meant_are_refused(helm: &Helm) -> Result<()> {
    for (value, part) in [
        ("router.replica=3", "replica"),
        ("router.replicas=many", "router"),
        ("operator.resources.request.cpu=1", "request"),
        ("topologyLevels[0].name=Host", "topologyLevels"),
        ("router.service.type=Local", "type"),
        ("image=x", "image"),
        ("networkPolicy.scrapers[0].namespace=monitoring", "scrapers"),
    ] {
        let error = match helm.run(&["template", "baton", "charts/baton", "--set", value]) {
            Ok(_) => bail!("{value} was taken"),
            Err(error) => format!("{error:#}"),
        };
        ensure!(
            error.contains("don't meet the specifications of the schema") && error.contains(part),
            "{value}: {error}"
        );
    }
    Ok(())
}

/// Besides what always may: rules for what belongs to Baton, and one more for each who is listed.
fn only_listed_scrapers_reach_workers(helm: &Helm) -> Result<()> {
    let rendered = |set: &str| {
        let template = ["template", "baton", "charts/baton", "--show-only"];
        let file = "templates/network.yaml";
        helm.run(&[&template[..], &[file, "--set-json", set]].concat())
    };
    let peers = r#"networkPolicy.scrapers=[{"ipBlock":{"cidr":"10.9.0.0/16"}}]"#;
    let (closed, open) = (rendered("networkPolicy.scrapers=[]")?, rendered(peers)?);
    ensure!(
        !closed.contains("ipBlock") && closed.matches("- from:").count() == 1,
        "{closed}"
    );
    ensure!(open.contains("cidr: 10.9.0.0/16"), "{open}");
    // Nobody is let in by an empty rule, and the operator of another release only by its labels.
    ensure!(!closed.contains("namespaceSelector: {}"), "{closed}");
    let elsewhere = rendered("operator.replicas=0")?;
    ensure!(elsewhere.contains("namespaceSelector: {}"), "{elsewhere}");
    ensure!(
        rendered("networkPolicy.enabled=false").is_err(),
        "it is rendered though it is off"
    );
    Ok(())
}

/// Mounted whole: a file that is mounted by itself would never be read anew.
fn routers_are_given_keys_and_a_certificate(helm: &Helm) -> Result<()> {
    let mut told = RENDERED.to_vec();
    for value in [
        "router.apiKeysSecret=keys",
        "router.tlsSecret=certificate",
        "router.extraVolumes[0].name=more",
        "router.extraVolumes[0].emptyDir.medium=Memory",
        "router.extraVolumeMounts[0].name=more",
        "router.extraVolumeMounts[0].mountPath=/more",
    ] {
        told.extend(["--set", value]);
    }
    let text = helm.run(&told)?;
    for line in [
        "value: /etc/baton-api-keys/keys.json",
        "{name: api-keys, mountPath: /etc/baton-api-keys, readOnly: true}",
        "secret: {secretName: keys}",
        "value: /etc/baton-tls/tls.crt",
        "value: /etc/baton-tls/tls.key",
        "{name: tls, mountPath: /etc/baton-tls, readOnly: true}",
        "secret: {secretName: certificate}",
        "mountPath: /more",
        "medium: Memory",
    ] {
        ensure!(text.contains(line), "{line} is not in {text}");
    }
    ensure!(!text.contains("subPath"), "{text}");
    Ok(())
}

fn the_admin_port_is_never_published(helm: &Helm) -> Result<()> {
    let mut told = RENDERED.to_vec();
    told.extend(["--set", "router.service.type=LoadBalancer"]);
    let text = helm.run(&told)?;
    let services: Vec<&str> = text
        .split("\n---\n")
        .filter(|object| object.contains("\nkind: Service\n"))
        .collect();
    let find = |kind: &str| services.iter().find(|service| service.contains(kind));
    let public = find("type: LoadBalancer").context("no public Service")?;
    ensure!(!public.contains("targetPort: admin"), "{public}");
    let admin = find("targetPort: admin").context("no Service of the admin port")?;
    ensure!(admin.contains("type: ClusterIP"), "{admin}");
    Ok(())
}

/// Each would replace the other's pods.
fn two_operators_of_one_namespace_are_refused(helm: &Helm, kubectl: &Kubectl) -> Result<()> {
    let second = |watched: &str| {
        let watched = format!("operator.watchNamespace={watched}");
        let install = ["install", "second", "charts/baton", "--namespace=default"];
        let tried = ["--dry-run=server", "--set", watched.as_str()];
        helm.run(&[&install[..], &tried].concat())
    };
    let refused = |watched: &str, by: &str| match second(watched) {
        Ok(_) => bail!("a second operator of namespace \"{watched}\" was installed"),
        Err(error) => {
            let error = format!("{error:#}");
            let by = format!("the operator of release baton in namespace baton looks after {by}");
            ensure!(error.contains(&by), "{error}");
            Ok(())
        }
    };
    refused("", "all namespaces")?;
    refused("team-b", "all namespaces")?;
    for team in ["team-a", "team-b"] {
        kubectl.run(&["create", "namespace", team])?;
    }
    let narrowed = "operator.watchNamespace=team-a";
    let upgrade = ["upgrade", "baton", "charts/baton", "--namespace=baton"];
    helm.run(&[&upgrade[..], &["--set", narrowed]].concat())?;
    refused("", "namespace team-a")?;
    refused("team-a", "namespace team-a")?;
    second("team-b").map(|_| ())
}

fn installed(helm: &Helm, kubectl: &Kubectl) -> Result<()> {
    kubectl.run(&["create", "namespace", "baton"])?;
    let label = "pod-security.kubernetes.io/enforce=restricted";
    kubectl.run(&["label", "namespace", "baton", label])?;
    let install = |chart: &str| {
        let path = format!("charts/{chart}");
        helm.run(&["upgrade", "--install", chart, &path, "--namespace", "baton"])
    };
    install("baton-crds")?;
    let said = install("baton")?;
    ensure!(
        said.contains("examples/cluster/no-gpu.yaml | kubectl apply -n baton -f -"),
        "{said}"
    );
    kubectl.definitions_are_served()?;
    // Going back is possible, and does not take every pool with it.
    helm.run(&["uninstall", "baton-crds", "--namespace", "baton"])?;
    let names = kubectl.run(&["get", "crd", "--output=name"])?;
    ensure!(names.matches("serving.baton.dev").count() == 3, "{names}");
    install("baton-crds")?;
    Ok(())
}

fn secrets_stay(helm: &Helm, kubectl: &Kubectl) -> Result<()> {
    let read = || -> Result<Vec<Value>> {
        ["baton-hash-key", "baton-admin-token"]
            .iter()
            .map(|name| Ok(kubectl.get(&["secret", name, "--namespace=baton"])?["data"].take()))
            .collect()
    };
    let before = read()?;
    ensure!(before[0]["key"] != before[1]["token"], "one value for two");
    let encoded = before[0]["key"].as_str().context("no key")?;
    // 64 hex digits in base64.
    ensure!(encoded.len() == 88, "the key is {} long", encoded.len());
    let upgrade = ["upgrade", "baton", "charts/baton", "--namespace", "baton"];
    helm.run(&upgrade)?;
    ensure!(read()? == before, "an upgrade made other secrets");
    helm.run(&["uninstall", "baton", "--namespace", "baton"])?;
    ensure!(read()? == before, "an uninstall took the secrets");
    helm.run(&[&upgrade[..], &["--install"]].concat())?;
    ensure!(read()? == before, "an install made other secrets");
    // One that somebody else made is used and not touched.
    let place = ["--namespace=elsewhere"];
    kubectl.run(&["create", "namespace", "elsewhere"])?;
    let make = [
        "create",
        "secret",
        "generic",
        "baton-hash-key",
        "--from-literal=key=theirs",
    ];
    kubectl.run(&[&make[..], &place[..]].concat())?;
    helm.run(&[
        "install",
        "second",
        "charts/baton",
        "--namespace",
        "elsewhere",
        "--set",
        "operator.replicas=0",
    ])?;
    let theirs = kubectl.get(&["secret", "baton-hash-key", "--namespace=elsewhere"])?;
    ensure!(theirs["data"]["key"] == "dGhlaXJz", "{theirs}");
    helm.run(&["uninstall", "second", "--namespace", "elsewhere"])?;
    kubectl.get(&["secret", "baton-hash-key", "--namespace=elsewhere"])?;
    Ok(())
}

/// Kubernetes' own strictest profile is enforced in the namespace, so that pods that break it are not there.
fn pods_are_hardened(kubectl: &Kubectl) -> Result<()> {
    let pods = ["pods", "--namespace=baton"];
    kubectl.until(
        "two operators and two routers are there",
        SOON,
        &pods,
        |list| match list["items"].as_array().map(Vec::len) {
            Some(4) => Ok(()),
            found => Err(format!("{found:?} pods: {list}")),
        },
    )?;
    for deployment in kubectl.list(&["deployments", "--namespace=baton"])? {
        let pod = &deployment["spec"]["template"]["spec"];
        ensure!(pod["enableServiceLinks"] == false, "{pod}");
        for container in pod["containers"].as_array().into_iter().flatten() {
            let security = &container["securityContext"];
            ensure!(security["readOnlyRootFilesystem"] == true, "{container}");
            ensure!(security["allowPrivilegeEscalation"] == false, "{container}");
            ensure!(
                security["capabilities"]["drop"] == serde_json::json!(["ALL"]),
                "{container}"
            );
        }
    }
    Ok(())
}

/// Nothing of everything, and no Secret is read: the operator may make one, the router may write nothing.
fn rights_are_no_more_than_needed(kubectl: &Kubectl) -> Result<()> {
    let ours = [
        "--selector=app.kubernetes.io/part-of=baton",
        "--all-namespaces",
    ];
    let mut kinds = BTreeSet::new();
    for kind in ["clusterroles", "roles"] {
        for role in kubectl.list(&[&[kind][..], &ours[..]].concat())? {
            kinds.insert(role["metadata"]["name"].to_string());
            for rule in role["rules"].as_array().into_iter().flatten() {
                let text = rule.to_string();
                ensure!(!text.contains('*'), "{text}");
                if text.contains("\"secrets\"") {
                    ensure!(rule["verbs"] == serde_json::json!(["create"]), "{text}");
                }
            }
        }
    }
    ensure!(kinds.len() >= 4, "{kinds:?}");
    let may = |account: &str, verb: &str, what: &str| -> bool {
        let who = format!("--as=system:serviceaccount:baton:{account}");
        let (what, part) = what.split_once('/').unwrap_or((what, ""));
        // `kubectl auth can-i patch pods/status` would ask for a pod of that name.
        let part = format!("--subresource={part}");
        let ask = [
            "auth",
            "can-i",
            verb,
            what,
            &part,
            &who,
            "--namespace=baton",
        ];
        kubectl.run(&ask).is_ok()
    };
    for (account, verb, what, expected) in [
        ("baton-operator", "create", "pods", true),
        ("baton-operator", "patch", "decodepools/status", true),
        ("baton-operator", "update", "decodepools", false),
        ("baton-operator", "get", "secrets", false),
        ("baton-operator", "get", "nodes", true),
        ("baton-operator", "patch", "nodes", false),
        ("baton-operator", "create", "pods/exec", false),
        ("baton-operator", "delete", "namespaces", false),
        ("baton-router", "watch", "pods", true),
        ("baton-router", "watch", "routepolicies", true),
        ("baton-router", "create", "pods", false),
        ("baton-router", "get", "secrets", false),
    ] {
        ensure!(
            may(account, verb, what) == expected,
            "{account} may {verb} {what}: expected {expected}"
        );
    }
    Ok(())
}
