//! `--attach POOL=ADDRESS`: servers that run already, to which `baton up` adds the daemon and nothing else.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::str::FromStr;

use baton_crds::pool::EngineType;
use baton_crds::{Problem, Resources};

use crate::failure::wrong_input;

/// One server that runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Attachment {
    pool: String,
    pub(crate) http: SocketAddr,
    /// Port of NIXL's side channel or of SGLang's bootstrap server.
    pub(crate) connector_port: Option<u16>,
}

impl FromStr for Attachment {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let shape = || {
            format!(
                "found {text:?}, must be POOL=ADDRESS or POOL=ADDRESS+PORT, as decode=127.0.0.1:8100+5610"
            )
        };
        let (pool, place) = text.split_once('=').ok_or_else(shape)?;
        let (address, connector) = match place.split_once('+') {
            Some((address, port)) => (address, Some(port)),
            None => (place, None),
        };
        let http: SocketAddr = address.parse().map_err(|_| shape())?;
        let connector_port = connector
            .map(|port| port.parse().map_err(|_| shape()))
            .transpose()?;
        if pool.is_empty() {
            return Err(shape());
        }
        if !http.ip().is_loopback() {
            return Err(format!(
                "{http} is not of this machine's loopback: run Baton's daemon beside the server, where it is"
            ));
        }
        Ok(Self {
            pool: pool.to_owned(),
            http,
            connector_port,
        })
    }
}

/// The servers of each pool, by the pool's index, in the order in which they were given.
///
/// # Errors
/// A pool that is none, or has another number of replicas.
pub(crate) fn by_pool<'a>(
    attachments: &'a [Attachment],
    resources: &Resources,
) -> anyhow::Result<BTreeMap<usize, Vec<&'a Attachment>>> {
    let mut found: BTreeMap<usize, Vec<&Attachment>> = BTreeMap::new();
    for attachment in attachments {
        let name = &attachment.pool;
        let pools = &resources.pools;
        let index = pools.iter().position(|pool| pool.metadata.name == *name);
        let index = index.filter(|index| pools[*index].spec.engine.engine_type.is_server());
        let Some(index) = index else {
            let servers: Vec<&str> = pools
                .iter()
                .filter(|pool| pool.spec.engine.engine_type.is_server())
                .map(|pool| pool.metadata.name.as_str())
                .collect();
            let there = match servers.as_slice() {
                [] => "there is none".to_owned(),
                some => format!("there are: {}", some.join(", ")),
            };
            return Err(wrong_input(format!(
                "--attach names {name}, which is no pool of engine VLLM or SGLang; {there}"
            )));
        };
        found.entry(index).or_default().push(attachment);
    }
    let mut problems: Vec<Problem> = Vec::new();
    for (index, servers) in &found {
        let pool = &resources.pools[*index];
        let replicas = usize::try_from(pool.spec.replicas).unwrap_or_default();
        if servers.len() != replicas {
            let message = format!(
                "found {replicas}, and --attach names {} servers of this pool: give one for each replica, or none",
                servers.len()
            );
            problems.push(pool.origin.problem(pool.title(), "spec.replicas", message));
        }
    }
    if problems.is_empty() {
        Ok(found)
    } else {
        Err(crate::manifests::refused(&problems))
    }
}

/// Where a server's peers ask first, unless it was told otherwise.
pub(crate) fn usual_connector_port(engine: EngineType) -> u16 {
    match engine {
        EngineType::SgLang => 8998,
        _ => 5600,
    }
}

#[cfg(test)]
mod tests {
    use baton_crds::read_fleet;

    use super::*;

    fn resources() -> Resources {
        let text = "apiVersion: serving.baton.dev/v1alpha1\nkind: DecodePool\nmetadata: {name: decode}\nspec:\n  replicas: 2\n  model: {name: m, source: {hostPath: /m}}\n  engine: {type: VLLM}\n---\n\
                    apiVersion: serving.baton.dev/v1alpha1\nkind: RoutePolicy\nmetadata: {name: m}\nspec: {model: m, decodePools: [{name: decode}]}\n";
        read_fleet([("f.yaml", text)]).unwrap()
    }

    fn attachment(text: &str) -> Attachment {
        text.parse().unwrap()
    }

    #[test]
    fn a_server_is_named_by_its_pool_and_its_address() {
        let server = attachment("decode=127.0.0.1:8100+5610");
        assert_eq!(server.pool, "decode");
        assert_eq!(server.http.port(), 8100);
        assert_eq!(server.connector_port, Some(5610));
        assert_eq!(attachment("d=[::1]:80").connector_port, None);
        for text in [
            "decode",
            "=127.0.0.1:1",
            "d=127.0.0.1",
            "d=127.0.0.1:1+x",
            "d=localhost:1",
        ] {
            let error = text.parse::<Attachment>().unwrap_err();
            assert!(error.contains("must be POOL=ADDRESS"), "{error}");
        }
        let error = "d=10.0.0.7:80".parse::<Attachment>().unwrap_err();
        assert!(
            error.contains("run Baton's daemon beside the server"),
            "{error}"
        );
    }

    #[test]
    fn each_replica_of_a_pool_is_attached_or_none() {
        let resources = resources();
        let two = [
            attachment("decode=127.0.0.1:1"),
            attachment("decode=127.0.0.1:2"),
        ];
        let found = by_pool(&two, &resources).unwrap();
        assert_eq!(found[&0].len(), 2);
        assert_eq!(found[&0][1].http.port(), 2);
        let error = by_pool(&two[..1], &resources).unwrap_err().to_string();
        assert_eq!(
            error,
            "f.yaml:5: DecodePool decode: spec.replicas: found 2, and --attach names 1 servers of this pool: give one for each replica, or none"
        );
        let other = [attachment("prefill=127.0.0.1:1")];
        let error = by_pool(&other, &resources).unwrap_err().to_string();
        assert_eq!(
            error,
            "--attach names prefill, which is no pool of engine VLLM or SGLang; there are: decode"
        );
    }
}
