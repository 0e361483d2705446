//! Servers of engines that are programs of their own, each with its daemon beside it: where their programs are, and how each is started.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::Context;
use baton_crds::engine::{ConnectorFiles, EnginePorts, EventSockets};
use baton_crds::pool::{Connector, EngineType};
use baton_crds::{EngineStart, Pool, Problem, Resources, ServerOfWorker, Weights};

use super::attach::{self, Attachment};
use super::child::{Maker, Program};
use super::plan::WorkerPlan;
use super::ports::Ports;
use super::state_dir::StateDir;
use crate::arguments::UpArguments;

/// What a Unix socket's address holds, with its closing zero.
const LONGEST_SOCKET: usize = 108;

/// Programs and files of the engines that the pools need.
#[derive(Debug, Default)]
pub(crate) struct Engines {
    vllm: Option<PathBuf>,
    sglang: Option<PathBuf>,
    /// Where Python finds Baton's connector.
    connector: Option<PathBuf>,
}

/// One server: where it listens, and by whom it is asked.
#[derive(Debug, Clone)]
pub(crate) struct Server {
    pub(crate) http: SocketAddr,
    ports: EnginePorts,
    /// Of Baton's connector; made by the daemon.
    socket: String,
    /// Somebody else has started it.
    attached: bool,
}

/// Servers that run already, by the index of their pool.
pub(crate) type Attached<'a> = BTreeMap<usize, Vec<&'a Attachment>>;

/// The name of a worker's server, in `processes.json` and of its log.
pub(crate) fn name_of(worker: &str) -> String {
    format!("{worker}-engine")
}

impl Engines {
    /// # Errors
    /// A pool needs a program that is not there; it says which, and how to name another place.
    pub(crate) fn find(
        arguments: &UpArguments,
        resources: &Resources,
        attached: &Attached<'_>,
        path: Option<&OsStr>,
        beside: &Path,
    ) -> Result<Self, Vec<Problem>> {
        let mut engines = Self::default();
        let mut problems = Vec::new();
        let pools = resources.pools.iter().enumerate();
        let started = pools.filter(|(index, _)| !attached.contains_key(index));
        for (_, pool) in started.filter(|(_, pool)| pool.spec.replicas > 0) {
            let mut wrong = |field: &str, message: String| {
                problems.push(pool.origin.problem(pool.title(), field, message));
            };
            let engine = &pool.spec.engine;
            match engine.engine_type {
                EngineType::Builtin | EngineType::Simulated => continue,
                EngineType::Vllm => {
                    engines.vllm = program(&arguments.vllm, path);
                    if engines.vllm.is_none() {
                        let place = missing(&arguments.vllm);
                        wrong(
                            "spec.engine.type",
                            format!(
                                "engine VLLM needs the program vllm, {place}: install vLLM, or say where it is with --vllm or BATON_VLLM"
                            ),
                        );
                    }
                }
                EngineType::SgLang => {
                    engines.sglang = program(&arguments.sglang, path);
                    if engines.sglang.is_none() {
                        let place = missing(&arguments.sglang);
                        wrong(
                            "spec.engine.type",
                            format!(
                                "engine SGLang needs a Python that has sglang, {place}: install SGLang, and say where its Python is with --sglang or BATON_SGLANG"
                            ),
                        );
                    }
                }
            }
            if engine.connector() == Connector::Baton && engines.connector.is_none() {
                engines.connector = package(arguments.vllm_connector.as_deref(), beside);
                if engines.connector.is_none() {
                    wrong(
                        "spec.engine.connector",
                        "Baton's connector for vLLM, the Python package baton_vllm, was not found: say in which folder it is with --vllm-connector or BATON_VLLM_CONNECTOR".to_owned(),
                    );
                }
            }
        }
        if problems.is_empty() {
            Ok(engines)
        } else {
            Err(problems)
        }
    }

    /// The server of a worker, as it is started. `None` where the engine is in the worker.
    ///
    /// # Errors
    /// A path is not text.
    pub(crate) fn start(
        &self,
        worker: &WorkerPlan,
        pool: &Pool,
        weights: &Weights,
        server: &Server,
        state: &StateDir,
    ) -> anyhow::Result<Option<Program>> {
        if server.attached {
            return Ok(None);
        }
        let package = match &self.connector {
            Some(folder) => super::text(folder)?,
            None => String::new(),
        };
        let start = EngineStart {
            spec: &pool.spec,
            role: worker.role,
            weights,
            listen: "127.0.0.1",
            reached: "127.0.0.1",
            ports: server.ports,
            events: EventSockets::DaemonListens,
            connector: ConnectorFiles {
                socket: &server.socket,
                package: &package,
            },
        };
        let program = match pool.spec.engine.engine_type {
            EngineType::Builtin | EngineType::Simulated => None,
            EngineType::Vllm => self.vllm.clone(),
            EngineType::SgLang => self.sglang.clone(),
        };
        let (Some(command), Some(path)) = (start.command(), program) else {
            return Ok(None);
        };
        let name = name_of(&worker.name);
        let own = command.environment.into_iter();
        Ok(Some(Program {
            log: state.log(&name),
            name,
            path,
            arguments: command.arguments,
            environment: own
                .map(|(name, value)| (name.to_owned(), value))
                .chain(environment(pool))
                .collect(),
            maker: Maker::Others,
        }))
    }
}

impl Server {
    /// The place of a worker's server: that of the one that runs already, or a new one.
    ///
    /// # Errors
    /// No port is free, or the state directory's path is too long for a socket.
    pub(crate) fn place(
        worker: &WorkerPlan,
        engine: EngineType,
        attachment: Option<&Attachment>,
        state: &StateDir,
        ports: &mut Ports,
    ) -> anyhow::Result<Self> {
        let socket = state.path.join(format!("{}.sock", worker.name));
        let socket = super::text(&socket)?;
        anyhow::ensure!(
            socket.len() < LONGEST_SOCKET,
            "the path {socket} is too long for a socket: give a shorter --state-dir"
        );
        let (http, connector) = match attachment {
            Some(attachment) => {
                let usual = attach::usual_connector_port(engine);
                (attachment.http, attachment.connector_port.unwrap_or(usual))
            }
            None => (ports.free()?, ports.free()?.port()),
        };
        Ok(Self {
            http,
            ports: EnginePorts {
                http: http.port(),
                events: ports.free()?.port(),
                replay: ports.free()?.port(),
                connector,
            },
            socket,
            attached: attachment.is_some(),
        })
    }

    /// What its daemon is told of it.
    pub(crate) fn described(&self, start_timeout_seconds: i64) -> ServerOfWorker {
        ServerOfWorker {
            url: format!("http://{}", self.http),
            connector_port: self.ports.connector,
            connector_host: Some("127.0.0.1".to_owned()),
            connector_socket: self.socket.clone(),
            start_timeout_seconds,
        }
    }
}

/// The author's variables. Those whose value is a cluster's were refused.
pub(crate) fn environment(pool: &Pool) -> impl Iterator<Item = (String, String)> + '_ {
    pool.spec.engine.env.iter().map(|variable| {
        let value = variable.value.clone().unwrap_or_default();
        (variable.name.clone(), value)
    })
}

/// A program by its path, or by its name in the folders of PATH.
fn program(wanted: &Path, path: Option<&OsStr>) -> Option<PathBuf> {
    if wanted.components().count() > 1 {
        return runs(wanted).then(|| wanted.to_path_buf());
    }
    std::env::split_paths(path?)
        .map(|folder| folder.join(wanted))
        .find(|found| runs(found))
}

fn runs(file: &Path) -> bool {
    file.metadata()
        .is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0)
}

fn missing(wanted: &Path) -> String {
    let shown = wanted.display();
    if wanted.components().count() > 1 {
        format!("and {shown} is no program")
    } else {
        format!("and there is no {shown} in PATH")
    }
}

/// The folder that has `baton_vllm`: as given, else of a build or of an installation that this program belongs to.
fn package(given: Option<&Path>, beside: &Path) -> Option<PathBuf> {
    let known = ["../../worker/connectors/vllm", "../share/baton/vllm"];
    let known = known.map(|folder| beside.join(folder));
    let folders: Vec<PathBuf> = match given {
        Some(folder) => vec![folder.to_path_buf()],
        None => known.to_vec(),
    };
    folders
        .into_iter()
        .filter_map(|folder| folder.canonicalize().ok())
        .find(|folder| folder.join("baton_vllm").is_dir())
}

/// # Errors
/// The model's folder is not there, or is none.
pub(crate) fn model_folder(path: &Path) -> anyhow::Result<()> {
    let shown = path.display();
    let found = std::fs::metadata(path).with_context(|| {
        format!("cannot read the model's folder {shown}: give one that is there")
    })?;
    anyhow::ensure!(
        found.is_dir() && path.join("config.json").is_file(),
        "{shown} is no model's folder: it must hold config.json, tokenizer and weights"
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use baton_crds::read_fleet;
    use clap::Parser;

    use super::*;
    use crate::arguments::{Arguments, Command};

    fn up(flags: &[&str]) -> UpArguments {
        let words = ["baton", "up", "-f", "f.yaml"];
        let parsed = Arguments::try_parse_from(words.iter().chain(flags)).unwrap();
        match parsed.command {
            Command::Up(up) => up,
            other => panic!("{other:?}"),
        }
    }

    fn resources(engine: &str) -> Resources {
        let text = format!(
            "apiVersion: serving.baton.dev/v1alpha1\nkind: DecodePool\nmetadata: {{name: decode}}\nspec:\n  model: {{name: m, source: {{hostPath: /m}}}}\n  engine: {engine}\n---\n\
             apiVersion: serving.baton.dev/v1alpha1\nkind: RoutePolicy\nmetadata: {{name: m}}\nspec: {{model: m, decodePools: [{{name: decode}}]}}\n"
        );
        match read_fleet([("f.yaml", text.as_str())]) {
            Ok(resources) => resources,
            Err(problems) => panic!("{problems:#?}"),
        }
    }

    fn make(file: &Path, mode: u32) {
        std::fs::write(file, "").unwrap();
        std::fs::set_permissions(file, PermissionsExt::from_mode(mode)).unwrap();
    }

    fn problem(engine: &str, flags: &[&str], path: &Path) -> String {
        let none = Attached::new();
        let path_of_programs = Some(path.as_os_str());
        let found = Engines::find(
            &up(flags),
            &resources(engine),
            &none,
            path_of_programs,
            path,
        );
        found.unwrap_err()[0].to_string()
    }

    #[test]
    fn a_program_that_is_missing_is_named_with_its_pool_and_its_flag() {
        let folder = tempfile::tempdir().unwrap();
        // It is there, and cannot be run.
        make(&folder.path().join("vllm"), 0o644);
        assert_eq!(
            problem("{type: VLLM}", &[], folder.path()),
            "f.yaml:6: DecodePool decode: spec.engine.type: engine VLLM needs the program vllm, and there is no vllm in PATH: \
             install vLLM, or say where it is with --vllm or BATON_VLLM"
        );
        assert!(
            problem("{type: VLLM}", &["--vllm", "/no/such"], folder.path())
                .contains("and /no/such is no program")
        );
        assert!(
            problem("{type: SGLang}", &["--sglang", "snake"], folder.path())
                .contains("and there is no snake in PATH: install SGLang")
        );
        make(&folder.path().join("vllm"), 0o755);
        assert!(
            problem("{type: VLLM, connector: Baton}", &[], folder.path())
                .contains("spec.engine.connector: Baton's connector for vLLM"),
        );
    }

    #[test]
    fn a_server_is_started_with_the_pools_words_last() {
        let folder = tempfile::tempdir().unwrap();
        make(&folder.path().join("vllm"), 0o755);
        std::fs::create_dir_all(folder.path().join("python/baton_vllm")).unwrap();
        let resources = resources(
            "{type: VLLM, connector: Baton, args: [--enforce-eager], env: [{name: OMP_NUM_THREADS, value: \"1\"}]}",
        );
        let package = folder.path().join("python");
        let flags = up(&["--vllm-connector", package.to_str().unwrap()]);
        let found = Engines::find(
            &flags,
            &resources,
            &Attached::new(),
            Some(folder.path().as_os_str()),
            folder.path(),
        );
        let workers = super::super::plan::workers(&resources).unwrap();
        let state = StateDir::open(&folder.path().join("state")).unwrap();
        let mut ports = Ports::default();
        let server =
            Server::place(&workers[0], EngineType::Vllm, None, &state, &mut ports).unwrap();
        let weights = Weights::Path("/m".into());
        let pool = &resources.pools[0];
        let started = found
            .unwrap()
            .start(&workers[0], pool, &weights, &server, &state)
            .unwrap()
            .unwrap();
        assert_eq!(started.name, "decode-0-engine");
        assert_eq!(started.path, folder.path().join("vllm"));
        assert_eq!(started.maker, Maker::Others);
        assert!(started.log.ends_with("logs/decode-0-engine.log"));
        assert_eq!(started.arguments.last().unwrap(), "--enforce-eager");
        let python = ("PYTHONPATH".to_owned(), package.display().to_string());
        assert!(started.environment.contains(&python), "{started:?}");
        let author = ("OMP_NUM_THREADS".to_owned(), "1".to_owned());
        assert_eq!(started.environment.last(), Some(&author));
        let told = server.described(600);
        assert_eq!(told.url, format!("http://{}", server.http));
        assert!(told.connector_socket.ends_with("/decode-0.sock"));
    }

    #[test]
    fn a_server_that_runs_already_is_not_started_and_its_program_not_looked_for() {
        let folder = tempfile::tempdir().unwrap();
        let resources = resources("{type: VLLM}");
        let flags = up(&["--attach", "decode=127.0.0.1:8100"]);
        let attached = attach::by_pool(&flags.attach, &resources).unwrap();
        let found = Engines::find(&flags, &resources, &attached, None, folder.path()).unwrap();
        let workers = super::super::plan::workers(&resources).unwrap();
        let state = StateDir::open(&folder.path().join("state")).unwrap();
        let (worker, ports) = (&workers[0], &mut Ports::default());
        let one = Some(attached[&0][0]);
        let server = Server::place(worker, EngineType::Vllm, one, &state, ports).unwrap();
        let told = server.described(600);
        assert_eq!(told.url, "http://127.0.0.1:8100");
        assert_eq!(told.connector_port, 5600, "NIXL's own default");
        let weights = Weights::Path("/m".into());
        let pool = &resources.pools[0];
        let started = found.start(worker, pool, &weights, &server, &state);
        assert!(started.unwrap().is_none());
    }

    #[test]
    fn a_folder_without_a_model_is_said() {
        let folder = tempfile::tempdir().unwrap();
        let error = model_folder(folder.path()).unwrap_err().to_string();
        assert!(
            error
                .ends_with("is no model's folder: it must hold config.json, tokenizer and weights"),
            "{error}"
        );
        std::fs::write(folder.path().join("config.json"), "{}").unwrap();
        model_folder(folder.path()).unwrap();
        let error = model_folder(Path::new("/no/such")).unwrap_err().to_string();
        assert!(error.contains("/no/such"), "{error}");
    }
}
