//! The operator as a process beside a control plane, with just the rights that it has in a cluster.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::Cluster;
use super::faulty::Faulty;
use super::kubectl::Kubectl;
use crate::binaries::repository;
use crate::process::Process;
use crate::wait;

/// The operator's namespace and account.
const ACCOUNT: &str = "system:serviceaccount:baton-system:baton-operator";

/// A control plane with Baton's kinds and the operator's account.
#[derive(Debug)]
pub struct Operated {
    pub cluster: Cluster,
    kubeconfig: PathBuf,
}

/// One operator process.
#[derive(Debug)]
pub struct Operator {
    pub process: Process,
    pub address: SocketAddr,
}

/// One write that the API server has seen.
#[derive(Debug, Clone)]
pub struct Write {
    pub user: String,
    pub verb: String,
    /// `pods`, `pods/status`.
    pub resource: String,
    pub name: String,
    pub code: u64,
}

impl Write {
    /// By the operator, and not to its lease.
    pub fn is_the_operators(&self) -> bool {
        self.user == ACCOUNT && self.resource != "leases"
    }

    pub fn has_succeeded(&self) -> bool {
        (200..300).contains(&self.code)
    }
}

impl Operated {
    /// Starts it; none where the machine cannot have a cluster.
    ///
    /// # Errors
    /// It does not start.
    pub fn start() -> Result<Option<Self>> {
        let Some(cluster) = Cluster::to_break(0)? else {
            return Ok(None);
        };
        let kinds = repository().join("crds/generated");
        let kubectl = cluster.kubectl();
        kubectl.run(&["apply", "--filename", &kinds.to_string_lossy()])?;
        kubectl.definitions_are_served()?;
        kubectl.apply(RIGHTS)?;
        let token = kubectl.run(&[
            "create",
            "token",
            "baton-operator",
            "--namespace=baton-system",
        ])?;
        let kubeconfig = cluster.folder()?.join("operator.kubeconfig");
        std::fs::copy(kubectl.kubeconfig(), &kubeconfig)?;
        let program = cluster.folder()?.join("bin/kubectl");
        let own = Kubectl::new(&program, &kubeconfig);
        let token = format!("--token={}", token.trim());
        own.run(&["config", "set-credentials", "operator", &token])?;
        own.run(&[
            "config",
            "set-context",
            "--current",
            "--user=operator",
            "--namespace=baton-system",
        ])?;
        Ok(Some(Self {
            cluster,
            kubeconfig,
        }))
    }

    pub fn kubectl(&self) -> &Kubectl {
        self.cluster.kubectl()
    }

    /// A way to the API server for an operator, that fails as told; `name`: of a folder for what it writes.
    ///
    /// # Errors
    /// It does not start.
    pub async fn faulty(&self, name: &str) -> Result<Faulty> {
        let folder = self.cluster.folder()?.join(name);
        Faulty::before(self.kubectl(), &self.kubeconfig, &folder).await
    }

    /// Starts an operator that is named so and competes for the lease of that name.
    ///
    /// # Errors
    /// It does not start, or ends at once.
    pub fn operator(&self, name: &str, lease: &str) -> Result<Operator> {
        self.operator_by(name, lease, &self.kubeconfig)
    }

    /// The same with another way to the API server.
    ///
    /// # Errors
    /// As [`Operated::operator`].
    pub fn operator_by(&self, name: &str, lease: &str, kubeconfig: &Path) -> Result<Operator> {
        let folder = self.cluster.folder()?.join(name);
        std::fs::create_dir_all(&folder)?;
        let mut process = Process::start(
            "baton-operator",
            &folder,
            &[
                "--listen",
                "127.0.0.1:0",
                "--worker-image",
                "localhost/baton-worker:none",
            ],
            &[
                ("KUBECONFIG", &kubeconfig.to_string_lossy()),
                ("BATON_IDENTITY", name),
                ("BATON_LEASE_NAME", lease),
            ],
        )?;
        let started = Duration::from_secs(20);
        let address = wait::until_blocking("the operator says where it listens", started, || {
            let log = process.errors();
            if let Some(status) = process.ended() {
                return Err(format!("it ended with {status}: {log}"));
            }
            let mut words = log.split_whitespace();
            let address = words.find_map(|word| word.strip_prefix("listen="));
            address.map(str::to_owned).ok_or(log)
        })?;
        Ok(Operator {
            process,
            address: address.parse()?,
        })
    }

    /// Waits until the operator has written nothing for five seconds: what follows from the last change has been told by then, and
    /// what is written again and again is still met by whoever counts longer than that. Returns where to count from.
    ///
    /// # Errors
    /// It never is.
    pub async fn at_rest(&self, within: Duration) -> Result<usize> {
        const REST: Duration = Duration::from_secs(5);
        let deadline = Instant::now() + within;
        let (_, mut from) = self.writes(0)?;
        let mut since = Instant::now();
        while since.elapsed() < REST {
            ensure!(
                Instant::now() < deadline,
                "the operator never came to rest within {within:?}"
            );
            tokio::time::sleep(Duration::from_millis(500)).await;
            let (writes, to) = self.writes(from)?;
            from = to;
            if writes.iter().any(Write::is_the_operators) {
                since = Instant::now();
            }
        }
        Ok(from)
    }

    /// Every write since the log was `from` bytes long, and how long it is now.
    ///
    /// # Errors
    /// The log cannot be read.
    pub fn writes(&self, from: usize) -> Result<(Vec<Write>, usize)> {
        let log = self.cluster.folder()?.join("logs/audit.jsonl");
        let log = std::fs::read_to_string(log)?;
        // The last line may be half written.
        let end = log.rfind('\n').map_or(0, |at| at + 1);
        let mut writes = Vec::new();
        for line in log[from.min(end)..end].lines() {
            let event: Value = serde_json::from_str(line)?;
            let text = |pointer: &str| {
                let value = event.pointer(pointer).and_then(Value::as_str);
                value.unwrap_or_default().to_owned()
            };
            let part = text("/objectRef/subresource");
            let slash = if part.is_empty() { "" } else { "/" };
            writes.push(Write {
                user: text("/user/username"),
                verb: text("/verb"),
                resource: format!("{}{slash}{part}", text("/objectRef/resource")),
                name: text("/objectRef/name"),
                code: event
                    .pointer("/responseStatus/code")
                    .and_then(Value::as_u64)
                    .unwrap_or_default(),
            });
        }
        Ok((writes, end))
    }
}

impl Operator {
    /// The value of a metric without labels.
    ///
    /// # Errors
    /// It does not answer, or has no such metric.
    pub async fn metric(&self, name: &str) -> Result<f64> {
        let text = crate::http::Client::new(self.address)
            .get("/metrics")
            .await?
            .well()?
            .text();
        let line = text
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        Ok(line
            .with_context(|| format!("no {name} in {text}"))?
            .parse()?)
    }

    /// Waits until it leads.
    ///
    /// # Errors
    /// It does not within that time.
    pub async fn leads(&self, within: Duration) -> Result<()> {
        wait::until("the operator leads", within, async || {
            match self.metric("baton_operator_leading").await {
                Ok(1.0) => Ok(()),
                Ok(_) => Err("it does not".to_owned()),
                Err(error) => Err(format!("{error:#}")),
            }
        })
        .await
    }
}

/// What the chart gives the operator, and no more: an operator that needs another right fails here.
const RIGHTS: &str = r#"
apiVersion: v1
kind: Namespace
metadata: {name: baton-system}
---
apiVersion: v1
kind: ServiceAccount
metadata: {name: baton-operator, namespace: baton-system}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: baton-operator}
rules:
- {apiGroups: [serving.baton.dev], resources: [prefillpools, decodepools, routepolicies], verbs: [list, watch]}
- {apiGroups: [serving.baton.dev], resources: [prefillpools/status, decodepools/status, routepolicies/status], verbs: [patch]}
- {apiGroups: [serving.baton.dev], resources: [prefillpools/finalizers, decodepools/finalizers], verbs: [update]}
- {apiGroups: [""], resources: [pods], verbs: [get, list, watch, create, patch, delete]}
- {apiGroups: [""], resources: [pods/status], verbs: [patch]}
- {apiGroups: [""], resources: [nodes], verbs: [list, watch]}
- {apiGroups: [""], resources: [secrets], verbs: [create]}
- {apiGroups: [policy], resources: [poddisruptionbudgets], verbs: [list, watch, create, patch, delete]}
- {apiGroups: [events.k8s.io], resources: [events], verbs: [create]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: baton-operator}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: baton-operator}
subjects: [{kind: ServiceAccount, name: baton-operator, namespace: baton-system}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {name: baton-operator, namespace: baton-system}
rules:
- {apiGroups: [coordination.k8s.io], resources: [leases], verbs: [create, get, update]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: baton-operator, namespace: baton-system}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: baton-operator}
subjects: [{kind: ServiceAccount, name: baton-operator, namespace: baton-system}]
"#;
