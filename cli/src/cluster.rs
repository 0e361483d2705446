//! Routers of a cluster, reached as a person with `kubectl` reaches them: the pod that took a run, its admin port forwarded, its
//! token read.
//!
//! - [`kubectl`]: the program, and what its failures mean.
//! - [`forward`]: one port of one pod on loopback.
//!
//! What is absent: a Kubernetes client. `kubectl` has the user's context, credentials and plugins for them.

mod forward;
mod kubectl;

use std::path::Path;

use anyhow::{Context, anyhow};
use baton_crds::labels;
use baton_placement::record::DecisionRecord;
use serde_json::Value;

use crate::arguments::ClusterArguments;
use crate::client::{Client, token};
use crate::failure::wrong_input;
use crate::records::Records;
use forward::Forward;
use kubectl::{Failure, Kubectl};

/// Routers to ask again and again.
#[derive(Debug)]
pub(crate) struct Routers {
    /// By name.
    clients: Vec<(String, Client)>,
    /// They stand as long as this.
    _forwards: Vec<Forward>,
}

impl Routers {
    /// One that is reached without `kubectl`.
    pub(crate) fn one(client: Client) -> Self {
        Self {
            clients: vec![(client.base().to_owned(), client)],
            _forwards: Vec::new(),
        }
    }

    /// All that run in the namespace now.
    ///
    /// # Errors
    /// `kubectl` is missing or refused, or no router runs: each says what to do.
    pub(crate) async fn of_cluster(
        arguments: &ClusterArguments,
        token_file: Option<&Path>,
    ) -> anyhow::Result<Self> {
        let kubectl = Kubectl::new(arguments);
        let pods = routers(&kubectl).await?;
        let token = token_for(&kubectl, token_file).await?;
        let (mut clients, mut forwards) = (Vec::new(), Vec::new());
        for pod in &pods {
            let forward = Forward::to(&kubectl, pod, admin_port(pod)).await?;
            let client = Client::new(forward.address())?.with_token(token.clone());
            clients.push((name(pod).to_owned(), client));
            forwards.push(forward);
        }
        Ok(Self {
            clients,
            _forwards: forwards,
        })
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = (&str, &Client)> {
        let all = self.clients.iter();
        all.map(|(name, client)| (name.as_str(), client))
    }
}

/// Hex digits at the end of a run id; before them and a dash stands the router.
const RANDOM_DIGITS: usize = 32;
/// Where a router serves it, if its pod does not say.
const ADMIN_PORT: u16 = 8001;

/// The record of one run from the router that took it, or the newest record of all routers for `last`.
///
/// # Errors
/// `kubectl` is missing or refused, the pod is gone, or no router has the record: each says what to do.
pub(crate) async fn find(
    run: &str,
    arguments: &ClusterArguments,
    token_file: Option<&Path>,
) -> anyhow::Result<DecisionRecord> {
    let kubectl = Kubectl::new(arguments);
    let pods = if run == "last" {
        routers(&kubectl).await?
    } else {
        vec![router_of(run, &kubectl).await?]
    };
    let token = token_for(&kubectl, token_file).await?;
    let mut newest: Option<DecisionRecord> = None;
    for pod in &pods {
        let forward = Forward::to(&kubectl, pod, admin_port(pod)).await?;
        let client = Client::new(forward.address())?.with_token(token.clone());
        let found = Records::Router(Box::new(client)).find(run).await;
        let found =
            found.with_context(|| format!("through kubectl port-forward to pod {}", name(pod)))?;
        if let Some(record) = found
            && newest
                .as_ref()
                .is_none_or(|newest| newest.time < record.time)
        {
            newest = Some(record);
        }
    }
    newest.ok_or_else(|| {
        let names: Vec<&str> = pods.iter().map(name).collect();
        wrong_input(format!(
            "no record of run {run} at router {}: the run has not ended, or is older than the records that a router keeps in memory",
            names.join(", ")
        ))
    })
}

/// The router's name in a run id.
fn router_in(run: &str) -> Option<&str> {
    let (router, random) = run.rsplit_once('-')?;
    let hexadecimal =
        random.len() == RANDOM_DIGITS && random.bytes().all(|b| b.is_ascii_hexdigit());
    (hexadecimal && !router.is_empty() && !router.starts_with('-')).then_some(router)
}

/// The pod of the router that took a run.
async fn router_of(run: &str, kubectl: &Kubectl) -> anyhow::Result<Value> {
    let Some(router) = router_in(run) else {
        return Err(wrong_input(format!(
            "{run:?} is no run id: take it from x-baton-run of a response, or say last"
        )));
    };
    let pod = match kubectl.json(&["get", "pod", router]).await {
        Ok(pod) => pod,
        Err(Failure::NotFound(_)) => {
            return Err(wrong_input(format!(
                "router pod {router}, which took run {run}, is not in {}: it is gone and the record went with it, or it is in another namespace (-n) or cluster (--context)",
                kubectl.place()
            )));
        }
        Err(failure) => return Err(said(failure)),
    };
    if pod["metadata"]["labels"][labels::APP_NAME] != labels::ROUTER_APP {
        return Err(wrong_input(format!(
            "pod {router} is no router of Baton: take the run id from x-baton-run of a response"
        )));
    }
    Ok(pod)
}

/// All router pods that run.
async fn routers(kubectl: &Kubectl) -> anyhow::Result<Vec<Value>> {
    let selector = format!("{}={}", labels::APP_NAME, labels::ROUTER_APP);
    let running = "--field-selector=status.phase=Running";
    let arguments = ["get", "pods", "--selector", &selector, running];
    let mut list = kubectl.json(&arguments).await.map_err(said)?;
    match list["items"].take() {
        Value::Array(pods) if !pods.is_empty() => Ok(pods),
        _ => Err(wrong_input(format!(
            "no router runs in {}: name the namespace with -n",
            kubectl.place()
        ))),
    }
}

/// The token of the file, else of the cluster's Secret.
async fn token_for(kubectl: &Kubectl, file: Option<&Path>) -> anyhow::Result<Option<String>> {
    match file {
        Some(_) => token(file),
        None => admin_token(kubectl).await,
    }
}

/// What the admin port asks for; none where the routers were installed without.
async fn admin_token(kubectl: &Kubectl) -> anyhow::Result<Option<String>> {
    let secret = labels::ADMIN_TOKEN_SECRET;
    let template = format!(
        "go-template={{{{index .data {:?} | base64decode}}}}",
        labels::ADMIN_TOKEN_MEMBER
    );
    match kubectl
        .text(&["get", "secret", secret, "--output", &template])
        .await
    {
        Ok(token) => Ok(Some(token.trim().to_owned()).filter(|token| !token.is_empty())),
        Err(Failure::NotFound(_)) => Ok(None),
        Err(Failure::Forbidden(reason)) => Err(anyhow!(
            "you may not read Secret {secret} in {}, and the routers' admin port asks for its token: ask for that right, or give the token with --admin-token-file: {reason}",
            kubectl.place()
        )),
        Err(failure) => Err(said(failure)),
    }
}

/// A failure of `kubectl` as this command's: without the program nothing can be done, which is the user's to mend.
fn said(failure: Failure) -> anyhow::Error {
    match failure {
        Failure::Missing => wrong_input(failure.to_string()),
        other => other.into(),
    }
}

fn name(pod: &Value) -> &str {
    pod["metadata"]["name"].as_str().unwrap_or_default()
}

fn admin_port(pod: &Value) -> u16 {
    let containers = pod["spec"]["containers"].as_array();
    let ports = containers
        .into_iter()
        .flatten()
        .filter_map(|container| container["ports"].as_array())
        .flatten();
    let mut admin = ports.filter(|port| port["name"] == "admin");
    let number = admin.find_map(|port| port["containerPort"].as_u64());
    number
        .and_then(|number| u16::try_from(number).ok())
        .unwrap_or(ADMIN_PORT)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_run_id_names_the_pod_that_took_it() {
        let random = "0123456789abcdef0123456789abcdef";
        let run = |router: &str| format!("{router}{random}");
        assert_eq!(
            router_in(&run("baton-router-7d9f8c5b4-x2k9q-")),
            Some("baton-router-7d9f8c5b4-x2k9q")
        );
        assert_eq!(router_in(&run("r0-")), Some("r0"));
        for wrong in [
            run(""),
            run("-"),
            run("--flag-"),
            "r0-1".to_owned(),
            String::new(),
        ] {
            assert_eq!(router_in(&wrong), None, "{wrong}");
        }
    }

    #[test]
    fn the_admin_port_is_the_one_of_that_name() {
        let pod = json!({"spec": {"containers": [
            {"name": "sidecar"},
            {"name": "router", "ports": [{"name": "http", "containerPort": 8000}, {"name": "admin", "containerPort": 9001}]},
        ]}});
        assert_eq!(admin_port(&pod), 9001);
        assert_eq!(admin_port(&json!({})), ADMIN_PORT);
    }
}
