//! What routers serve by: asked of their admin port, seldom.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use parking_lot::Mutex;
use serde::Deserialize;

use crate::fetch::Fetch;
use crate::policy::{InForce, Router};

/// Admin port of a router's pod.
const ADMIN: u16 = 8001;
const PATH: &str = "/policyz";
/// A router that serves by what is wanted.
const RE_READ: Duration = Duration::from_secs(60);
/// First pause before a router is asked again that does not yet, or does not answer; it doubles.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(15);
/// Asked at a time.
const AT_A_TIME: usize = 16;

/// Answers by the uid of the router's pod.
#[derive(Debug, Default)]
pub struct Routers {
    fetch: Fetch,
    entries: Mutex<BTreeMap<String, Entry>>,
}

#[derive(Clone, Debug)]
struct Entry {
    answer: Result<Vec<InForce>, String>,
    asked: Duration,
    /// Times in a row that it was not what is wanted.
    behind: u32,
}

impl Routers {
    /// What the routers `pods` say, and after how long they have to be asked again. `wanted`: the policy and its generation.
    pub async fn ask(
        &self,
        pods: &[Arc<Pod>],
        wanted: (&str, i64),
        now: Duration,
    ) -> (Vec<Router>, Option<Duration>) {
        let reachable: Vec<(String, String, IpAddr)> = pods
            .iter()
            .filter(|pod| pod.metadata.deletion_timestamp.is_none())
            .filter_map(|pod| {
                let status = pod.status.as_ref()?;
                let address = status.pod_ip.as_deref()?.parse().ok()?;
                let runs = status.phase.as_deref() == Some("Running");
                runs.then(|| (pod.name_any(), pod.uid().unwrap_or_default(), address))
            })
            .collect();
        let due: Vec<(String, IpAddr)> = {
            let entries = self.entries.lock();
            reachable
                .iter()
                .filter(|(_, uid, _)| {
                    entries
                        .get(uid)
                        .is_none_or(|entry| entry.due(wanted) <= now)
                })
                .map(|(_, uid, address)| (uid.clone(), *address))
                .collect()
        };
        let answers = futures::stream::iter(due)
            .map(|(uid, address)| async move {
                let answer = self.policies_at(SocketAddr::new(address, ADMIN)).await;
                (uid, answer)
            })
            .buffer_unordered(AT_A_TIME)
            .collect::<Vec<_>>()
            .await;

        let mut entries = self.entries.lock();
        for (uid, answer) in answers {
            let before = entries.get(&uid).map_or(0, |entry| entry.behind);
            let mut entry = Entry {
                answer,
                asked: now,
                behind: 0,
            };
            if !entry.serves(wanted) {
                entry.behind = before.saturating_add(1);
            }
            entries.insert(uid, entry);
        }
        let mut next: Option<Duration> = None;
        let routers = reachable
            .into_iter()
            .filter_map(|(pod, uid, _)| {
                let entry = entries.get(&uid)?;
                let pause = entry.due(wanted).saturating_sub(now);
                next = Some(next.map_or(pause, |known| known.min(pause)));
                Some(Router {
                    pod,
                    answer: entry.answer.clone(),
                })
            })
            .collect();
        (routers, next)
    }

    /// Forgets routers that are not there any more.
    pub fn retain(&self, there: impl Fn(&str) -> bool) {
        self.entries.lock().retain(|uid, _| there(uid));
    }

    /// `admin`: whoever may make a pod can put anybody there, so nothing is sent that is not for everybody.
    async fn policies_at(&self, admin: SocketAddr) -> Result<Vec<InForce>, String> {
        let body = self.fetch.get(admin, PATH).await;
        let body = body.map_err(|error| error.to_string())?;
        parse(&body).map_err(|error| format!("http://{admin}{PATH}: {error}"))
    }
}

impl Entry {
    fn serves(&self, (name, generation): (&str, i64)) -> bool {
        self.answer.as_ref().is_ok_and(|policies| {
            policies
                .iter()
                .any(|policy| policy.name == name && policy.generation >= Some(generation))
        })
    }

    fn due(&self, wanted: (&str, i64)) -> Duration {
        let pause = if self.serves(wanted) {
            RE_READ
        } else {
            (FIRST_PAUSE * 2_u32.saturating_pow(self.behind.clamp(1, 8) - 1)).min(LONGEST_PAUSE)
        };
        self.asked + pause
    }
}

/// `GET /policyz` of a router.
#[derive(Deserialize)]
struct Answer {
    #[serde(default)]
    policies: Vec<Listed>,
    #[serde(default)]
    refused: Vec<Refused>,
}

#[derive(Deserialize)]
struct Listed {
    name: String,
    generation: i64,
}

#[derive(Deserialize)]
struct Refused {
    name: String,
    #[serde(default)]
    reason: String,
}

fn parse(body: &[u8]) -> serde_json::Result<Vec<InForce>> {
    let answer: Answer = serde_json::from_slice(body)?;
    let mut policies: Vec<InForce> = answer
        .policies
        .into_iter()
        .map(|listed| InForce {
            name: listed.name,
            generation: Some(listed.generation),
            refused: None,
        })
        .collect();
    for refused in answer.refused {
        let reason = Some(refused.reason);
        match policies
            .iter_mut()
            .find(|policy| policy.name == refused.name)
        {
            Some(policy) => policy.refused = reason,
            None => policies.push(InForce {
                name: refused.name,
                generation: None,
                refused: reason,
            }),
        }
    }
    Ok(policies)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_in_force_and_what_is_refused_is_told_apart() {
        let body = br#"{"policies":[{"name":"a","generation":3}],
            "refused":[{"name":"a","generation":4,"reason":"weights"},{"name":"b","generation":1,"reason":"taken"}]}"#;
        let policies = parse(body).unwrap();
        let of = |name: &str| policies.iter().find(|policy| policy.name == name).unwrap();
        assert_eq!(of("a").generation, Some(3));
        assert_eq!(of("a").refused.as_deref(), Some("weights"));
        assert_eq!(
            (of("b").generation, of("b").refused.as_deref()),
            (None, Some("taken"))
        );
        assert_eq!(parse(br#"{"policies":[],"refused":[]}"#).unwrap(), []);
        assert!(parse(b"3").is_err());
    }

    /// Anybody may label a pod as a router's.
    #[tokio::test]
    async fn a_stranger_that_poses_as_a_router_is_told_no_secret() {
        use axum::http::{HeaderMap, Uri};

        let heard = Arc::new(Mutex::new(Vec::new()));
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let hears = Arc::clone(&heard);
        let stranger = axum::Router::new().fallback(async move |uri: Uri, headers: HeaderMap| {
            hears.lock().push((uri.path().to_owned(), headers));
            r#"{"policies":[{"name":"a","generation":3}]}"#
        });
        let served = tokio::spawn(async move { axum::serve(listener, stranger).await });
        let policies = Routers::default().policies_at(address).await.unwrap();
        assert_eq!(policies[0].generation, Some(3));
        let heard = heard.lock();
        let (path, headers) = &heard[0];
        assert_eq!((heard.len(), path.as_str()), (1, "/policyz"));
        let sent: Vec<&str> = headers.keys().map(|name| name.as_str()).collect();
        assert_eq!(sent, ["host"], "{headers:?}");
        served.abort();
    }

    #[test]
    fn a_router_that_is_behind_is_asked_soon_and_less_and_less_often() {
        let policy = |generation| InForce {
            name: "a".into(),
            generation: Some(generation),
            refused: None,
        };
        let mut entry = Entry {
            answer: Ok(vec![policy(3)]),
            asked: Duration::from_secs(100),
            behind: 0,
        };
        assert_eq!(entry.due(("a", 3)), Duration::from_secs(160));
        assert_eq!(entry.due(("a", 2)), Duration::from_secs(160));
        let pauses: Vec<u64> = (1..=6)
            .map(|behind| {
                entry.behind = behind;
                entry.due(("a", 4)).as_secs() - 100
            })
            .collect();
        assert_eq!(pauses, [1, 2, 4, 8, 15, 15]);
        entry.behind = 0;
        assert_eq!(entry.due(("other", 1)).as_secs(), 101);
    }
}
