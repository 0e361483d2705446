//! A cluster that `BATON_E2E_KUBECONFIG` names: of one test at a time, reached through its API server, and left as it was found.
//!
//! kubectl and the nodes' images are its user's: the archives of `target/images` loaded into every node (`kind load image-archive`), or
//! pushed to the registry that `BATON_E2E_REGISTRY` names, as `REGISTRY/baton-router:dev` and so on.

use std::fs::File;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use tempfile::TempDir;

use super::helm::Helm;
use super::kubectl::Kubectl;
use super::proxy::Proxy;
use crate::http::Client;
use crate::told;

/// All that tests make outside of namespaces, and their namespaces. What is there before is not theirs, and so they do not begin.
const MADE: [(&str, &[&str]); 4] = [
    (
        "namespaces",
        &["baton", "elsewhere", "other", "shown", "team-a", "team-b"],
    ),
    (
        "customresourcedefinitions",
        &[
            "decodepools.serving.baton.dev",
            "prefillpools.serving.baton.dev",
            "routepolicies.serving.baton.dev",
        ],
    ),
    ("mutatingadmissionpolicies", &["lie"]),
    ("mutatingadmissionpolicybindings", &["lie"]),
];
/// What the chart makes outside of namespaces. Without the kinds, no other release is there.
const RIGHTS: [&str; 3] = [
    "clusterroles,clusterrolebindings",
    "--selector=app.kubernetes.io/part-of=baton",
    "--ignore-not-found",
];

/// For as long as a test uses it.
#[derive(Debug)]
pub struct Existing {
    kubectl: Kubectl,
    folder: TempDir,
    proxy: Proxy,
    /// Two tests at a time would take each other's namespaces away.
    _turn: File,
}

impl Existing {
    /// Waits for the other tests that use it, and looks whether it is free of Baton.
    ///
    /// # Errors
    /// It does not answer, or has what tests make.
    pub fn find(kubeconfig: &Path) -> Result<Self> {
        ensure!(
            kubeconfig.is_file(),
            "BATON_E2E_KUBECONFIG={} is not a file",
            kubeconfig.display()
        );
        let kubectl = Kubectl::new(Path::new("kubectl"), kubeconfig);
        let turn = File::create(std::env::temp_dir().join("baton-e2e-existing.lock"))?;
        turn.lock()?;
        let mut there = kubectl.run(&[&["get", "--output=name"], &RIGHTS[..]].concat())?;
        for (kind, names) in MADE {
            there += &found(&kubectl, kind, names)?;
        }
        let there: Vec<&str> = there.split_whitespace().collect();
        ensure!(
            there.is_empty(),
            "the cluster of BATON_E2E_KUBECONFIG has what tests make and take away again: name one without Baton, or, if a test that was \
             killed has left it, run `kubectl delete {}`",
            there.join(" ")
        );
        let folder = tempfile::tempdir()?;
        std::fs::create_dir(folder.path().join("bin"))?;
        let proxy = Proxy::start(&kubectl)
            .context("BATON_E2E_KUBECONFIG is used with the kubectl in PATH")?;
        Ok(Self {
            kubectl,
            folder,
            proxy,
            _turn: turn,
        })
    }

    pub fn kubectl(&self) -> &Kubectl {
        &self.kubectl
    }

    /// A folder for programs that go before those of `PATH`.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Baton's charts; `values` are of the chart `baton`, `name=value`.
    ///
    /// # Errors
    /// helm does not install them.
    pub fn install(&self, namespace: &str, values: &[&str]) -> Result<()> {
        let helm = Helm::found(self.kubectl.kubeconfig())?.context("no helm")?;
        let images = images(std::env::var("BATON_E2E_REGISTRY").ok().as_deref());
        let images: Vec<&str> = images.iter().map(String::as_str).collect();
        for (chart, values) in [
            ("baton-crds", vec![]),
            ("baton", [values, &images].concat()),
        ] {
            let path = format!("charts/{chart}");
            let set = values.iter().flat_map(|value| ["--set", value]);
            let place = ["--namespace", namespace, "--create-namespace"];
            let all = [
                "upgrade",
                "--install",
                chart,
                &path,
                "--wait",
                "--timeout=180s",
            ];
            let all: Vec<&str> = all.into_iter().chain(place).chain(set).collect();
            helm.run(&all).with_context(|| {
                format!("chart {chart}: are the images on every node, or in BATON_E2E_REGISTRY?")
            })?;
        }
        Ok(())
    }

    /// A client of a Service's port, through the API server: it sends each request to one of the Service's pods.
    pub fn service(&self, namespace: &str, name: &str, port: &str) -> Client {
        let path = format!("/api/v1/namespaces/{namespace}/services/{name}:{port}/proxy");
        Client::beneath(self.proxy.address, path)
    }
}

impl Drop for Existing {
    fn drop(&mut self) {
        let gone = ["--ignore-not-found", "--timeout=180s"];
        let mut left = self.kubectl.run(&[&["delete"], &RIGHTS[..]].concat()).err();
        for (kind, names) in MADE {
            if self.kubectl.knows(kind) {
                let all = [&["delete", kind][..], names, &gone].concat();
                left = self.kubectl.run(&all).err().or(left);
            }
        }
        if let Some(error) = left {
            told(&format!("the cluster is not as it was found: {error:#}"));
        }
    }
}

/// Those of these objects that are there, as `kind/name`.
fn found(kubectl: &Kubectl, kind: &str, names: &[&str]) -> Result<String> {
    if !kubectl.knows(kind) {
        return Ok(String::new());
    }
    let get = ["get", kind, "--output=name", "--ignore-not-found"];
    kubectl.run(&[&get[..], names].concat())
}

/// Values of the chart for images of a registry.
fn images(registry: Option<&str>) -> Vec<String> {
    let Some(registry) = registry else {
        return Vec::new();
    };
    let values = [
        ("operator.image", "operator"),
        ("operator.workerImage", "worker"),
        ("router.image", "router"),
    ];
    let value = |(value, part)| format!("{value}={registry}/baton-{part}:dev");
    values.into_iter().map(value).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_are_those_of_the_nodes_or_of_a_registry() {
        assert_eq!(images(None), Vec::<String>::new());
        assert_eq!(
            images(Some("registry.example/team")),
            [
                "operator.image=registry.example/team/baton-operator:dev",
                "operator.workerImage=registry.example/team/baton-worker:dev",
                "router.image=registry.example/team/baton-router:dev"
            ]
        );
    }
}
