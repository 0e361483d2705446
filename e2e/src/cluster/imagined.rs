//! A node that is only said to be there: pods that are bound to it become processes of this machine, each on a loopback address of
//! its own. The workers in them are real, and need neither root nor a container runtime.
//!
//! What a kubelet does for a pod and an operator can see is done here: phase, address, state of the container, `ContainersReady`, and
//! `Ready` once the readiness gates hold as well; a pod that is deleted ends and goes. Of the probes there is that of readiness, with the
//! pod's own limits, and `preStop` is left out: the process gets a SIGTERM.

use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::process::Signal;
use serde_json::{Value, json};

use super::kubectl::{Kubectl, condition};
use super::proxy::Proxy;
use crate::process::Process;

/// Between two looks at the pods.
const PAUSE: Duration = Duration::from_millis(100);
/// The controllers take a node for dead that is silent for 40 s.
const HEARTBEAT: Duration = Duration::from_secs(10);

/// A process that does not end when it is asked to is killed after this, which is shorter than a pod's own grace period.
const GRACE: Duration = Duration::from_secs(10);

/// Counts the pods of all nodes of this process, so that no two get one address.
static ADDRESSES: AtomicU32 = AtomicU32::new(0);

/// The node, for as long as the value lives.
#[derive(Debug)]
pub struct ImaginedNode {
    stop: Arc<AtomicBool>,
    loops: Option<JoinHandle<()>>,
}

impl ImaginedNode {
    /// A node of that name with many GPUs; `folder` takes what its pods write.
    ///
    /// # Errors
    /// The API server refuses it.
    pub fn start(kubectl: &Kubectl, name: &str, folder: &Path) -> Result<Self> {
        kubectl.apply(&json!({
            "apiVersion": "v1", "kind": "Node",
            "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name, "topology.kubernetes.io/zone": "imagined"}},
        }).to_string())?;
        let mut node = Loop {
            kubectl: kubectl.clone(),
            proxy: Proxy::start(kubectl)?,
            name: name.to_owned(),
            folder: folder.to_owned(),
            pods: BTreeMap::new(),
            beaten: None,
        };
        node.beat()?;
        let stop = Arc::new(AtomicBool::new(false));
        let stopping = stop.clone();
        let loops = std::thread::spawn(move || {
            let mut failed = false;
            while !stopping.load(Ordering::Relaxed) {
                // The API server may be away, or somebody has written in between: the next look sees.
                let looked = node.look();
                if let (Err(error), false) = (&looked, failed) {
                    crate::told(&format!("imagined node {}: {error:#}", node.name));
                }
                failed = looked.is_err();
                std::thread::sleep(PAUSE);
            }
        });
        Ok(Self {
            stop,
            loops: Some(loops),
        })
    }
}

impl Drop for ImaginedNode {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(loops) = self.loops.take() {
            // Its processes end with it.
            let _ = loops.join();
        }
    }
}

struct Loop {
    kubectl: Kubectl,
    proxy: Proxy,
    name: String,
    folder: PathBuf,
    /// By uid.
    pods: BTreeMap<String, Running>,
    beaten: Option<Instant>,
}

struct Running {
    process: Process,
    address: String,
    readiness: Readiness,
    /// What the pod's status was made of last.
    said: Option<(bool, bool)>,
}

impl Loop {
    fn look(&mut self) -> Result<()> {
        if self.beaten.is_none_or(|at| at.elapsed() > HEARTBEAT) {
            self.beat()?;
        }
        let mine = format!("/api/v1/pods?fieldSelector=spec.nodeName%3D{}", self.name);
        let mut list = self.proxy.get(&mine)?;
        let pods = match list["items"].take() {
            Value::Array(pods) => pods,
            Value::Null if list["kind"] == "PodList" => Vec::new(),
            _ => bail!("GET {mine} gave no list: {list}"),
        };
        self.pods.retain(|uid, _| {
            pods.iter()
                .any(|pod| pod["metadata"]["uid"] == uid.as_str())
        });
        for pod in &pods {
            let (namespace, name) = (text(pod, "namespace"), text(pod, "name"));
            if !pod["metadata"]["deletionTimestamp"].is_null() {
                if let Some(mut running) = self.pods.remove(text(pod, "uid")) {
                    running.process.signal(Signal::TERM);
                    if running.process.wait(GRACE).is_err() {
                        running.process.signal(Signal::KILL);
                        running.process.wait(GRACE)?;
                    }
                }
                let namespace = format!("--namespace={namespace}");
                let forced = ["--grace-period=0", "--force", "--ignore-not-found"];
                let all = [&["delete", "pod", name, &namespace][..], &forced].concat();
                self.kubectl.run(&all)?;
            } else if is_worker(pod) {
                self.run(pod)
                    .with_context(|| format!("pod {namespace}/{name}"))?;
            }
        }
        Ok(())
    }

    /// The node is ready, and says so as kubelets do.
    fn beat(&mut self) -> Result<()> {
        let now = now()?;
        let amounts =
            json!({"cpu": "100", "memory": "100Gi", "pods": "500", "nvidia.com/gpu": "500"});
        let status = json!({"status": {"capacity": amounts, "allocatable": amounts, "conditions": [{
            "type": "Ready", "status": "True", "reason": "Imagined", "message": "", "lastHeartbeatTime": now, "lastTransitionTime": now,
        }]}});
        let status = status.to_string();
        self.kubectl.run(&[
            "patch",
            "node",
            &self.name,
            "--subresource=status",
            "--type=strategic",
            "--patch",
            &status,
        ])?;
        self.beaten = Some(Instant::now());
        Ok(())
    }

    fn run(&mut self, pod: &Value) -> Result<()> {
        let uid = text(pod, "uid").to_owned();
        if !self.pods.contains_key(&uid) {
            let running = self.start(pod)?;
            self.pods.insert(uid.clone(), running);
        }
        let Some(running) = self.pods.get_mut(&uid) else {
            return Ok(());
        };
        let answers = running.readiness.holds();
        let gates = pod["spec"]["readinessGates"].as_array();
        let held = gates.into_iter().flatten().all(|gate| {
            let name = gate["conditionType"].as_str().unwrap_or_default();
            condition(pod, name).0 == "True"
        });
        let now_said = (answers, answers && held);
        if running.said == Some(now_said) {
            return Ok(());
        }
        let word = |holds: bool| if holds { "True" } else { "False" };
        let at = now()?;
        let conditions: Vec<Value> = [
            ("Initialized", true),
            ("ContainersReady", answers),
            ("Ready", answers && held),
        ]
        .into_iter()
        .map(|(kind, holds)| json!({"type": kind, "status": word(holds), "lastTransitionTime": at}))
        .collect();
        let status = json!({"status": {
            "phase": "Running",
            "startTime": at,
            "podIP": running.address,
            "podIPs": [{"ip": running.address}],
            "hostIP": "127.0.0.1",
            "conditions": conditions,
            "containerStatuses": [{
                "name": "worker", "containerID": format!("imagined://{}", running.process.id()), "image": "imagined",
                "imageID": "imagined", "ready": answers, "started": true, "restartCount": 0, "state": {"running": {"startedAt": at}},
            }],
        }});
        let namespace = format!("--namespace={}", text(pod, "namespace"));
        self.kubectl.run(&[
            "patch",
            "pod",
            text(pod, "name"),
            &namespace,
            "--subresource=status",
            "--type=strategic",
            "--patch",
            &status.to_string(),
        ])?;
        running.said = Some(now_said);
        Ok(())
    }

    fn start(&self, pod: &Value) -> Result<Running> {
        let count = ADDRESSES.fetch_add(1, Ordering::Relaxed);
        // 127.64.0.0/10 by process and pod: tests that run at a time stay apart.
        let address = format!(
            "127.{}.{}.{}",
            64 + std::process::id() % 64,
            count / 250,
            1 + count % 250
        );
        let folder = self.folder.join(text(pod, "name"));
        std::fs::create_dir_all(&folder)?;
        let configuration = pod["metadata"]["annotations"]["serving.baton.dev/worker-config"]
            .as_str()
            .context("it has no configuration")?;
        let path = folder.join("worker.json");
        std::fs::write(&path, configuration)?;
        let namespace = format!("--namespace={}", text(pod, "namespace"));
        let key = folder.join("key");
        let secret = ["secret", "baton-hash-key", &namespace];
        let member = "--output=go-template={{.data.key | base64decode}}";
        let secret = self
            .kubectl
            .run(&[&["get"][..], &secret, &[member]].concat())
            .context("a kubelet would wait for the secret")?;
        std::fs::write(&key, secret)?;
        let process = Process::start(
            "baton-worker",
            &folder,
            &["serve"],
            &[
                ("BATON_CONFIG", &path.to_string_lossy()),
                ("BATON_CONTROL", &format!("{address}:7000")),
                ("BATON_TRANSFER", &format!("{address}:7001")),
                ("BATON_ADMIN", &format!("{address}:7002")),
                ("BATON_ADVERTISE", &address),
                ("BATON_HASH_KEY_FILE", &key.to_string_lossy()),
            ],
        )?;
        Ok(Running {
            process,
            readiness: Readiness::of(pod, &address),
            address,
            said: None,
        })
    }
}

fn is_worker(pod: &Value) -> bool {
    pod["metadata"]["labels"]["app.kubernetes.io/name"] == "baton-worker"
}

fn text<'a>(pod: &'a Value, field: &str) -> &'a str {
    pod["metadata"][field].as_str().unwrap_or_default()
}

/// Whole seconds of UTC, as Kubernetes writes times.
fn now() -> Result<String> {
    let output = Command::new("date").args(["-u", "+%FT%TZ"]).output()?;
    Ok(String::from_utf8(output.stdout)?.trim().to_owned())
}

/// A pod's readiness probe, made as a kubelet makes it: beside all else that is done on the node, so that a late answer holds nothing up,
/// and one alone changes nothing.
struct Readiness {
    ready: Arc<AtomicBool>,
    over: Arc<AtomicBool>,
}

impl Readiness {
    /// What the pod does not say is as Kubernetes has it.
    fn of(pod: &Value, address: &str) -> Self {
        let probe = &pod["spec"]["containers"][0]["readinessProbe"];
        let number = |name: &str, default: u64| probe[name].as_u64().unwrap_or(default);
        let period = Duration::from_secs(number("periodSeconds", 10));
        let within = Duration::from_secs(number("timeoutSeconds", 1));
        let failures = number("failureThreshold", 3);
        let made = Self {
            ready: Arc::default(),
            over: Arc::default(),
        };
        let (ready, over) = (made.ready.clone(), made.over.clone());
        let address = address.to_owned();
        // Nobody waits for its end: it may be waiting for an answer.
        std::thread::spawn(move || {
            let mut failed = 0;
            while !over.load(Ordering::Relaxed) {
                if answers(&address, within) {
                    failed = 0;
                    ready.store(true, Ordering::Relaxed);
                } else {
                    failed += 1;
                    if failed >= failures {
                        ready.store(false, Ordering::Relaxed);
                    }
                }
                // More often while it starts: tests wait for that.
                let started = ready.load(Ordering::Relaxed);
                std::thread::sleep(if started { period } else { PAUSE });
            }
        });
        made
    }

    fn holds(&self) -> bool {
        self.ready.load(Ordering::Relaxed)
    }
}

impl Drop for Readiness {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
    }
}

/// Whether the worker says that it is ready: what a kubelet's probe asks.
fn answers(address: &str, within: Duration) -> bool {
    let ask = || -> Result<bool> {
        let mut stream = TcpStream::connect((address, 7002))?;
        stream.set_read_timeout(Some(within))?;
        write!(
            stream,
            "GET /readyz HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\r\n"
        )?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer.starts_with("HTTP/1.1 200 "))
    };
    ask().unwrap_or(false)
}
