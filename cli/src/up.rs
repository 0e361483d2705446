//! `baton up`: the resources of some files, served on this machine by child processes.
//!
//! | module | subject |
//! |---|---|
//! | `plan` | which workers there are and what each is told (pure) |
//! | `state_dir`, `processes`, `ports` | what the state directory holds; addresses kept over restarts |
//! | `engine`, `attach`, `group` | servers of vLLM and SGLang beside their daemons; their processes, which must not outlive us |
//! | `child`, `supervise`, `backoff` | a child that cannot outlive us, kept running, ended in bounded time |
//! | `ready` | when all is ready, and what is shown until then |
//! | `traffic`, `prompts`, `tour`, `check` | what `--tour` and `--check` send, and what they make of it |

pub(crate) mod attach;
mod backoff;
mod check;
mod child;
mod engine;
pub(crate) mod group;
pub(crate) mod interrupt;
mod plan;
mod ports;
pub(crate) mod processes;
mod prompts;
mod ready;
mod state_dir;
mod supervise;
mod tour;
mod traffic;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use baton_crds::{ModelLocation, Pool, PoolRole, Resources, Weights};
use baton_placement::policy::Policy;
use serde_json::{Value, json};

use self::child::{Maker, Program};
use self::engine::{Engines, Server};
use self::interrupt::Interrupt;
use self::plan::WorkerPlan;
use self::ports::Ports;
use self::processes::{Process, Processes, write_whole};
use self::ready::Fleet;
use self::state_dir::StateDir;
use self::supervise::Supervisor;
use crate::arguments::{Output, UpArguments};
use crate::client::{self, Client};
use crate::failure::Verdict;
use crate::model;
use crate::{manifests, terminal};

/// Where one worker is reached.
#[derive(Debug, Clone)]
struct Addresses {
    control: SocketAddr,
    transfer: SocketAddr,
    admin: SocketAddr,
    /// The server that the worker is the daemon of.
    server: Option<Server>,
}

/// # Errors
/// The resources cannot be served here; a child never became ready; a file cannot be written.
pub(crate) async fn up(arguments: UpArguments) -> anyhow::Result<Verdict> {
    let resources = manifests::fleet(&arguments.files)?;
    let workers = plan::workers(&resources).map_err(|problems| manifests::refused(&problems))?;
    let policies = resources
        .policies
        .iter()
        .map(|policy| manifests::policy(policy, &resources))
        .collect::<anyhow::Result<Vec<Policy>>>()?;
    if arguments.check {
        check::possible(&policies)?;
    }
    let folder = own_folder()?;
    let path = std::env::var_os("PATH");
    let attached = attach::by_pool(&arguments.attach, &resources)?;
    let engines = Engines::find(&arguments, &resources, &attached, path.as_deref(), &folder)
        .map_err(|problems| manifests::refused(&problems))?;
    let token = client::token(arguments.admin_token_file.as_deref())?;
    let state = StateDir::open(&arguments.state_dir)?;
    let interrupt = Interrupt::listen()?;

    let mut ports = Ports::default();
    let listen = ports.take(arguments.listen, "--listen")?;
    let admin = ports.take(arguments.admin, "--admin")?;
    let addresses = workers
        .iter()
        .map(|worker| {
            let engine = resources.pools[worker.pool].spec.engine.engine_type;
            Ok(Addresses {
                control: ports.free()?,
                transfer: ports.free()?,
                admin: ports.free()?,
                server: match engine.is_server() {
                    true => {
                        let servers = attached.get(&worker.pool);
                        let one = servers.and_then(|all| all.get(worker.replica)).copied();
                        Some(Server::place(worker, engine, one, &state, &mut ports)?)
                    }
                    false => None,
                },
            })
        })
        .collect::<anyhow::Result<Vec<Addresses>>>()?;

    let programs = Programs::in_folder(&folder)?;
    let cache = model::cache_folder(arguments.cache.as_deref(), |name| std::env::var_os(name))?;
    let weights = tokio::select! {
        weights = obtain(&workers, &resources, &cache) => weights?,
        () = interrupt.first() => return Ok(interrupted(&arguments)),
    };
    let router = router_program(
        &programs,
        &state,
        &policies,
        &workers,
        &addresses,
        [listen, admin],
        arguments.admin_token_file.as_deref(),
    )?;
    let starts = workers
        .iter()
        .zip(&addresses)
        .map(|(worker, addresses)| {
            let weights = worker
                .location
                .as_ref()
                .and_then(|location| weights.get(&format!("{location:?}")));
            let pool = &resources.pools[worker.pool];
            let described = addresses.server.as_ref().map(|server| {
                let patience = i64::try_from(arguments.ready_seconds).unwrap_or(i64::MAX);
                server.described(patience)
            });
            let configuration =
                plan::worker_configuration(worker, &resources, weights, described.as_ref());
            let server = match (&addresses.server, weights) {
                (Some(server), Some(weights)) => {
                    engines.start(worker, pool, weights, server, &state)?
                }
                _ => None,
            };
            let daemon =
                worker_program(&programs, &state, worker, pool, &configuration, addresses)?;
            Ok((daemon, server))
        })
        .collect::<anyhow::Result<Vec<(Program, Option<Program>)>>>()?;

    let processes = Arc::new(Processes::new(&state.path)?);
    let mut supervisor = Supervisor::new(processes);
    let client = Client::new(&admin.to_string())?.with_token(token);
    let mut fleet = Fleet::new(client.clone());
    // From here on the children hold the ports themselves.
    drop(ports);
    fleet.add(
        "router",
        supervisor.keep(router, process("router", "router", listen)),
    );
    for ((worker, addresses), (daemon, server)) in workers.iter().zip(&addresses).zip(starts) {
        let role = match worker.role {
            PoolRole::Prefill => "prefill",
            PoolRole::Decode => "decode",
        };
        if let (Some(program), Some(server)) = (server, &addresses.server) {
            let name = program.name.clone();
            let health = supervisor.keep_beneath(program, process(&name, "engine", server.http));
            fleet.add_under(&name, &worker.name, health);
        }
        fleet.add(
            &worker.name,
            supervisor.keep(daemon, process(&worker.name, role, addresses.control)),
        );
    }

    let hurry = supervisor.hurry();
    let outcome = tokio::select! {
        outcome = serve(&arguments, &mut fleet, &policies, listen, client) => outcome,
        error = supervisor.failed() => Err(error),
        () = interrupt.first() => Ok(interrupted(&arguments)),
    };
    tokio::select! {
        () = supervisor.end() => {}
        () = async { interrupt.second().await; hurry.cancel(); std::future::pending().await } => {}
    }
    outcome
}

/// Ending what serves is what an interrupt is for; a check that was cut short has shown nothing.
fn interrupted(arguments: &UpArguments) -> Verdict {
    if arguments.check {
        Verdict::Bad
    } else {
        Verdict::Good
    }
}

/// Until the check is done, or for ever.
async fn serve(
    arguments: &UpArguments,
    fleet: &mut Fleet,
    policies: &[Policy],
    listen: SocketAddr,
    admin: Client,
) -> anyhow::Result<Verdict> {
    fleet
        .ready(Duration::from_secs(arguments.ready_seconds))
        .await?;
    announce(arguments, &fleet.view().await?, listen, admin.base())?;
    let traffic = traffic::Traffic::new(listen, admin.clone())?;
    if arguments.check {
        return check::check(&traffic, policies, arguments.output.output).await;
    }
    if arguments.tour {
        let output = arguments.output.output;
        // What is served is served, whatever becomes of the tour.
        if let Err(error) = tour::tour(&traffic, policies, output).await {
            terminal::note(&format!("the tour ends here: {error:#}"));
        }
        let serving = "serving until Ctrl-C; try: baton ask \"Tell me a story about a fox.\"";
        match output {
            Output::Table => terminal::line(serving)?,
            Output::Json => terminal::note(serving),
        }
    }
    std::future::pending().await
}

/// Says that all is ready. Results go to standard output: with `--check` in JSON, that is the check's and nothing else.
fn announce(
    arguments: &UpArguments,
    fleet: &Value,
    listen: SocketAddr,
    admin: &str,
) -> anyhow::Result<()> {
    let ready = format!("ready http://{listen} admin {admin}");
    match arguments.output.output {
        Output::Table => {
            terminal::lines(ready::workers(fleet))?;
            terminal::line(&ready)
        }
        Output::Json if arguments.check => {
            terminal::note(&ready);
            Ok(())
        }
        Output::Json => terminal::json(&json!({
            "ready": format!("http://{listen}"),
            "admin": admin,
            "workers": fleet["workers"],
        })),
    }
}

/// The models of all workers, by the text of their location.
async fn obtain(
    workers: &[WorkerPlan],
    resources: &Resources,
    cache: &Path,
) -> anyhow::Result<BTreeMap<String, Weights>> {
    let mut weights = BTreeMap::new();
    for (location, pool) in plan::locations(workers) {
        let title = || format!("{}: spec.model.source", resources.pools[pool].title());
        let engine = resources.pools[pool].spec.engine.engine_type;
        let found = match &location {
            ModelLocation::File(path) if engine.is_server() => {
                engine::model_folder(path).with_context(title)?;
                Weights::Path(path.clone())
            }
            location => model::obtain(location, cache).await.with_context(title)?,
        };
        weights.insert(format!("{location:?}"), found);
    }
    Ok(weights)
}

/// Where this program is, and what belongs to it.
fn own_folder() -> anyhow::Result<PathBuf> {
    let this = std::env::current_exe().context("cannot say where this program is")?;
    // A link (`kubectl-baton`) may stand elsewhere.
    let this = this.canonicalize().unwrap_or(this);
    let folder = this.parent().context("a program is in a folder")?;
    Ok(folder.to_path_buf())
}

/// The programs that belong to this one.
#[derive(Debug)]
struct Programs {
    router: PathBuf,
    worker: PathBuf,
}

impl Programs {
    fn in_folder(folder: &Path) -> anyhow::Result<Self> {
        let find = |name: &str| {
            let path = folder.join(name);
            anyhow::ensure!(
                path.is_file(),
                "{} is missing: it belongs beside the baton program, run make build",
                path.display()
            );
            Ok(path)
        };
        Ok(Self {
            router: find("baton-router")?,
            worker: find("baton-worker")?,
        })
    }
}

fn process(name: &str, role: &str, address: SocketAddr) -> Process {
    Process {
        name: name.to_owned(),
        role: role.to_owned(),
        pid: 0,
        address: address.to_string(),
    }
}

fn router_program(
    programs: &Programs,
    state: &StateDir,
    policies: &[Policy],
    workers: &[WorkerPlan],
    addresses: &[Addresses],
    [listen, admin]: [SocketAddr; 2],
    token_file: Option<&Path>,
) -> anyhow::Result<Program> {
    let policy_file = write(
        state,
        "policies",
        &serde_json::to_value(policies).context("cannot write policies")?,
    )?;
    let listed = workers
        .iter()
        .zip(addresses)
        .map(|(worker, addresses)| (worker.name.as_str(), addresses.control));
    let workers_file = write(state, "workers", &plan::workers_file(listed))?;
    let mut arguments = vec![
        ("--listen", listen.to_string()),
        ("--admin", admin.to_string()),
        ("--policy-file", policy_file),
        ("--workers-file", workers_file),
        ("--state-dir", text(&state.path)?),
        ("--hash-key-file", hash_key(state)?),
        ("--drain-seconds", plan::DRAIN_SECONDS.to_string()),
    ];
    if let Some(file) = token_file {
        arguments.push(("--admin-token-file", text(file)?));
    }
    Ok(program(state, "router", &programs.router, &[], &arguments))
}

fn worker_program(
    programs: &Programs,
    state: &StateDir,
    worker: &WorkerPlan,
    pool: &Pool,
    configuration: &Value,
    addresses: &Addresses,
) -> anyhow::Result<Program> {
    let arguments = [
        ("--config", write(state, &worker.name, configuration)?),
        ("--control", addresses.control.to_string()),
        ("--transfer", addresses.transfer.to_string()),
        ("--admin", addresses.admin.to_string()),
        ("--hash-key-file", hash_key(state)?),
    ];
    let words = &["serve"];
    let mut program = program(state, &worker.name, &programs.worker, words, &arguments);
    // What the pool says to its engine goes to the process that the engine is in.
    if addresses.server.is_none() {
        let own = pool.spec.engine.args.iter().cloned();
        program.arguments.extend(own);
        program.environment.extend(engine::environment(pool));
    }
    Ok(program)
}

fn program(
    state: &StateDir,
    name: &str,
    path: &Path,
    words: &[&str],
    flags: &[(&str, String)],
) -> Program {
    let flags = flags
        .iter()
        .flat_map(|(flag, value)| [(*flag).to_owned(), value.clone()]);
    Program {
        name: name.to_owned(),
        path: path.to_path_buf(),
        arguments: words
            .iter()
            .map(|word| (*word).to_owned())
            .chain(flags)
            .collect(),
        environment: Vec::new(),
        maker: Maker::Ours,
        log: state.log(name),
    }
}

fn hash_key(state: &StateDir) -> anyhow::Result<String> {
    let file = state.hash_key(|key| {
        getrandom::fill(key)
            .map_err(|error| anyhow::anyhow!("the machine gives no random bytes: {error}"))
    })?;
    text(&file)
}

fn write(state: &StateDir, name: &str, value: &Value) -> anyhow::Result<String> {
    let file = plan::configuration_file(&state.path, name);
    write_whole(&file, &format!("{value:#}\n"))?;
    text(&file)
}

fn text(path: &Path) -> anyhow::Result<String> {
    let text = path
        .to_str()
        .with_context(|| format!("{} is not text: give another --state-dir", path.display()))?;
    Ok(text.to_owned())
}
