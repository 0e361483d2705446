//! Real vLLM servers under `baton up`, where this machine has vLLM: `e2e/engines/vllm`.

mod answers;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::binaries::repository;
use crate::fleet::Fleet;
use crate::http::Client;
use crate::metrics::Metrics;
use crate::{skipped, wait};

pub use answers::{assembled, comparable, differences};

/// Two servers import and load on two cores: a minute on an idle machine, minutes beside other work.
const READY: Duration = Duration::from_secs(900);
/// What the machine has none of.
const NOT_HERE: i32 = 3;
/// Metrics are written once a step or second.
const SOON: Duration = Duration::from_secs(30);

/// The model's name in the examples.
pub const MODEL: &str = "tiny";
/// Tokens of a block: the least that vLLM has on a processor.
pub const BLOCK: u64 = 32;
/// A server's engine runs its model in its own process, as vLLM does by itself on one GPU. On a processor the model has a process of its
/// own, as several GPUs have, which takes as long to start as the others.
pub const ONE_PROCESS: [&str; 2] = [
    "--distributed-executor-backend",
    "vllm.v1.executor.uniproc_executor.UniProcExecutor",
];

/// vLLM, and a model for it.
#[derive(Debug)]
pub struct Vllm {
    program: PathBuf,
    model: PathBuf,
    folder: TempDir,
}

/// What a test has otherwise than an example.
#[derive(Clone, Copy, Debug, Default)]
pub struct Changed<'a> {
    /// Before the arguments of both servers, as they stand in the list.
    pub arguments: &'a str,
    /// Texts of the example, and what takes their place.
    pub texts: &'a [(&'a str, &'a str)],
    /// In the environment of every process.
    pub variables: &'a [(&'a str, &'a str)],
}

impl Vllm {
    /// What this machine has; says why it has nothing.
    ///
    /// # Errors
    /// It has vLLM, and no model can be made.
    pub fn found() -> Result<Option<Self>> {
        let path = engines(&["path"])
            .output()
            .context("e2e/engines/vllm path")?;
        if path.status.code() == Some(NOT_HERE) {
            skipped(String::from_utf8_lossy(&path.stderr).trim());
            return Ok(None);
        }
        let folder = tempfile::tempdir()?;
        let model = folder.path().join("model");
        let vllm = Self {
            program: PathBuf::from(well(&path)?),
            model,
            folder,
        };
        vllm.make_model(&[])?;
        Ok(Some(vllm))
    }

    fn make_model(&self, more: &[&str]) -> Result<()> {
        let mut command = engines(&["model", crate::fleet::path(&self.model)?]);
        self.keeps_bytecode(command.args(more));
        well(&command.output()?)?;
        Ok(())
    }

    /// What Python compiles of vLLM is kept with it: a server has two or three processes, and without bytecode each compiles anew all that
    /// it imports, a third of the time that this takes. In a folder of its own, so that none lies among Baton's sources.
    fn bytecode(&self) -> PathBuf {
        self.program.with_file_name("../bytecode")
    }

    fn keeps_bytecode(&self, command: &mut Command) {
        command
            .env("PYTHONPYCACHEPREFIX", self.bytecode())
            .env_remove("PYTHONDONTWRITEBYTECODE");
    }

    /// The Python of vLLM's environment.
    pub fn python(&self) -> PathBuf {
        self.program.with_file_name("python")
    }

    /// A text of at least so many bytes in few tokens: the longest words that the model's tokenizer has whole.
    ///
    /// # Errors
    /// Its tokenizer cannot be read.
    pub fn long_text(&self, bytes: usize) -> Result<String> {
        /// Before a word that follows a space.
        const SPACE: char = 'Ġ';
        let tokenizer = self.vocabulary()?;
        let vocabulary = tokenizer["model"]["vocab"].as_object();
        let mut words: Vec<&str> = vocabulary
            .context("the tokenizer has no vocabulary")?
            .keys()
            .filter_map(|token| token.strip_prefix(SPACE))
            .filter(|word| word.bytes().all(|byte| byte.is_ascii_lowercase()))
            .collect();
        words.sort_unstable_by_key(|word| (std::cmp::Reverse(word.len()), *word));
        words.truncate(16);
        ensure!(words.len() == 16, "the tokenizer has no words");
        let mut text = String::with_capacity(bytes + 32);
        for word in words.iter().cycle() {
            if text.len() >= bytes {
                break;
            }
            text.push(' ');
            text.push_str(word);
        }
        Ok(text)
    }

    /// The number of a token of the model's vocabulary.
    ///
    /// # Errors
    /// It has none of that name.
    pub fn token(&self, name: &str) -> Result<u64> {
        let token = self.vocabulary()?["model"]["vocab"][name].as_u64();
        token.with_context(|| format!("the tokenizer has no token {name}"))
    }

    fn vocabulary(&self) -> Result<Value> {
        let file = self.model.join("tokenizer.json");
        let text = std::fs::read_to_string(&file).with_context(|| file.display().to_string())?;
        Ok(serde_json::from_str(&text)?)
    }

    /// Servers that start from now on find a model of other weights where theirs was, until [`Self::own_weights`].
    ///
    /// # Errors
    /// It cannot be made.
    pub fn other_weights(&self) -> Result<()> {
        std::fs::rename(&self.model, self.folder.path().join("own"))?;
        self.make_model(&["--seed", "1"])
    }

    /// # Errors
    /// They are where they were.
    pub fn own_weights(&self) -> Result<()> {
        std::fs::remove_dir_all(&self.model)?;
        Ok(std::fs::rename(
            self.folder.path().join("own"),
            &self.model,
        )?)
    }

    /// The fleet of an example: one server that prefills, one that decodes, each with its daemon.
    ///
    /// # Errors
    /// It does not become ready.
    pub async fn pair(&self, example: &str, changed: Changed<'_>) -> Result<Fleet> {
        let file = repository().join("examples").join(example);
        let mut text =
            std::fs::read_to_string(&file).with_context(|| file.display().to_string())?;
        let model = crate::fleet::path(&self.model)?;
        let arguments = format!("args: [{}, ", changed.arguments);
        let own = [
            ("/tmp/baton-tiny-model", model),
            ("args: [", arguments.as_str()),
            // Its own endpoints, which a user's server has not: to forget the cache.
            (
                "env:\n",
                "env:\n    - {name: VLLM_SERVER_DEV_MODE, value: \"1\"}\n",
            ),
        ];
        for (before, after) in own.iter().chain(changed.texts) {
            ensure!(text.contains(before), "{example} has no {before}");
            text = text.replace(before, after);
        }
        let connector = repository().join("worker/connectors/vllm");
        let program = self.with_later_words()?;
        let mut variables = changed.variables.to_vec();
        variables.push(("BATON_VLLM", crate::fleet::path(&program)?));
        variables.push(("BATON_VLLM_CONNECTOR", crate::fleet::path(&connector)?));
        Fleet::slow(&text, READY, &variables).await
    }

    /// Servers of a pool that start from now on have these flags after their pool's, so that they win: as if somebody had changed what a
    /// server is started with.
    ///
    /// # Errors
    /// They cannot be written.
    pub fn later_flags(&self, pool: &str, flags: &str) -> Result<()> {
        let file = self.folder.path().join(format!("{pool}.flags"));
        Ok(std::fs::write(file, flags)?)
    }

    /// Servers of a pool that start from now on have vLLM's own endpoints for development no more, as a user's have not.
    ///
    /// # Errors
    /// It cannot be written down.
    pub fn later_without_development(&self, pool: &str) -> Result<()> {
        let file = self.folder.path().join(format!("{pool}.user"));
        Ok(std::fs::write(file, "")?)
    }

    /// The program, with what is written of later ones, and with its bytecode.
    fn with_later_words(&self) -> Result<PathBuf> {
        use std::os::unix::fs::PermissionsExt;
        for pool in ["prefill", "decode"] {
            self.later_flags(pool, "")?;
        }
        let (program, folder) = (&self.program, self.folder.path());
        let (program, folder) = (crate::fleet::path(program)?, crate::fleet::path(folder)?);
        let bytecode = self.bytecode();
        let bytecode = crate::fleet::path(&bytecode)?;
        let script = self.folder.path().join("vllm");
        let text = format!(
            "#!/bin/sh\n\
             case \"$*\" in *kv_producer*) pool=prefill;; *) pool=decode;; esac\n\
             [ ! -e '{folder}'/$pool.user ] || unset VLLM_SERVER_DEV_MODE\n\
             unset PYTHONDONTWRITEBYTECODE\n\
             export PYTHONPYCACHEPREFIX='{bytecode}'\n\
             exec '{program}' \"$@\" $(cat '{folder}'/$pool.flags)\n"
        );
        std::fs::write(&script, text)?;
        std::fs::set_permissions(&script, PermissionsExt::from_mode(0o755))?;
        Ok(script)
    }
}

fn engines(arguments: &[&str]) -> Command {
    let mut command = Command::new(repository().join("e2e/engines/vllm"));
    command.args(arguments);
    command
}

fn well(output: &Output) -> Result<String> {
    if !output.status.success() {
        bail!(
            "e2e/engines/vllm: {}",
            String::from_utf8_lossy(&output.stderr)
        );
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// One server of a fleet, asked directly.
#[derive(Clone, Copy, Debug)]
pub struct Server {
    pub client: Client,
}

impl Server {
    /// That of a worker of this pool.
    ///
    /// # Errors
    /// `baton up` has none.
    pub fn of(fleet: &Fleet, pool: &str) -> Result<Self> {
        let engines = fleet.processes()?;
        let found = engines
            .iter()
            .find(|process| process.role == "engine" && process.name.starts_with(pool))
            .with_context(|| format!("no server of {pool} in {engines:?}"))?;
        let address = found.address.trim_start_matches("http://");
        Ok(Self {
            client: Client::new(address.parse().with_context(|| found.address.clone())?),
        })
    }

    /// Its metrics.
    ///
    /// # Errors
    /// They cannot be read.
    pub async fn metrics(&self) -> Result<Metrics> {
        Metrics::parse(&self.client.get("/metrics").await?.well()?.text())
    }

    /// Prompt tokens whose KV came from elsewhere, since it started.
    ///
    /// # Errors
    /// Its metrics cannot be read.
    pub async fn transferred_tokens(&self) -> Result<f64> {
        let source = [("source", "external_kv_transfer")];
        Ok(self
            .metrics()
            .await?
            .count("vllm:prompt_tokens_by_source_total", &source))
    }

    /// Waits until it has no request, in any state.
    ///
    /// # Errors
    /// One stays.
    pub async fn rests(&self) -> Result<()> {
        wait::until("no request runs or waits", SOON, async || {
            match self.requests().await {
                Ok(0.0) => Ok(()),
                other => Err(format!("{other:?}")),
            }
        })
        .await
    }

    /// Requests that run or wait.
    ///
    /// # Errors
    /// Its metrics cannot be read.
    pub async fn requests(&self) -> Result<f64> {
        let metrics = self.metrics().await?;
        let count = |name| metrics.count(name, &[]);
        Ok(count("vllm:num_requests_running") + count("vllm:num_requests_waiting"))
    }

    /// Waits until no block is used, by a lease either.
    ///
    /// # Errors
    /// One is.
    pub async fn has_given_all_back(&self, within: Duration) -> Result<()> {
        wait::until("no block is used", within, async || {
            match self.metrics().await {
                Ok(metrics) if metrics.count("vllm:kv_cache_usage_perc", &[]) == 0.0 => Ok(()),
                Ok(metrics) => Err(format!(
                    "{} of all blocks",
                    metrics.count("vllm:kv_cache_usage_perc", &[])
                )),
                Err(error) => Err(format!("{error:#}")),
            }
        })
        .await
    }

    /// Waits until that is at least so many.
    ///
    /// # Errors
    /// It is not.
    pub async fn has_transferred(&self, tokens: f64) -> Result<()> {
        wait::until("tokens were transferred", SOON, async || {
            match self.transferred_tokens().await {
                Ok(found) if found >= tokens => Ok(()),
                other => Err(format!("{other:?}, {tokens} are due")),
            }
        })
        .await
    }

    /// Forgets what it has cached (a development endpoint).
    ///
    /// # Errors
    /// It does not.
    pub async fn forget(&self) -> Result<()> {
        wait::until("the cache is reset", SOON, async || {
            let answer = self
                .client
                .post("/reset_prefix_cache", &[], &json!({}))
                .await
                .map_err(|error| error.to_string())?;
            // Not while requests hold blocks.
            let done = answer.json().is_ok_and(|answer| answer["success"] == true);
            done.then_some(()).ok_or_else(|| answer.text())
        })
        .await
    }
}

/// Runs the plug-in's own tests in vLLM's environment, and returns what they said.
///
/// # Errors
/// One of them failed.
pub fn plug_in_tests(vllm: &Vllm) -> Result<String> {
    let folder = repository().join("worker/connectors/vllm");
    let mut command = Command::new(vllm.python());
    vllm.keeps_bytecode(&mut command);
    let output = command
        .args([
            "-W",
            "error::SyntaxWarning",
            "-m",
            "unittest",
            "discover",
            "-s",
            "tests",
            "-t",
            ".",
        ])
        .current_dir(Path::new(&folder))
        .output()?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(output.status.success(), "{said}");
    Ok(said)
}
