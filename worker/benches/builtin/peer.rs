//! llama.cpp's own bench on the same file, one thread, without a GPU.

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use super::figures::Table;
use super::{Case, DECODE, DECODED, PREFILL};

/// Of the arguments, those that every run has.
const ALWAYS: [&str; 8] = ["-t", "1", "-ngl", "0", "-r", "1", "-o", "json"];
/// Leaves out llama.cpp's repacked weights, and with them its AMX kernels: where a virtual machine shows AMX and does not let it run,
/// they end the process by an illegal instruction.
const PLAIN: [&str; 2] = ["--repack", "0"];

pub(crate) struct Peer {
    bench: PathBuf,
    plain: Cell<bool>,
}

fn list(numbers: &[usize]) -> String {
    let numbers: Vec<String> = numbers.iter().map(usize::to_string).collect();
    numbers.join(",")
}

fn output(command: &mut Command) -> Result<Vec<u8>> {
    let shown = format!("{command:?}");
    let output = command.output().with_context(|| shown.clone())?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        bail!(
            "{shown}: {}: {}",
            output.status,
            said.lines().last().unwrap_or_default()
        );
    }
    Ok(output.stdout)
}

impl Peer {
    fn new(bench: PathBuf) -> Self {
        Self {
            bench,
            plain: Cell::new(false),
        }
    }

    /// Runs the bench, from the first failure on without what may not work here.
    fn run(&self, file: &Path, arguments: &[String]) -> Result<Vec<u8>> {
        let run = |plain: bool| {
            let mut command = Command::new(&self.bench);
            command.arg("-m").arg(file).args(ALWAYS).args(arguments);
            if plain {
                command.args(PLAIN);
            }
            output(&mut command)
        };
        if !self.plain.get() {
            match run(false) {
                Ok(found) => return Ok(found),
                Err(problem) => println!("llama.cpp: from now on with {PLAIN:?}: {problem:#}"),
            }
            self.plain.set(true);
        }
        run(true)
    }

    /// The one that `LLAMA_BENCH` names, or the one on the PATH; else what to do to have one.
    pub(crate) fn find() -> Result<Self, String> {
        if let Some(bench) = std::env::var_os("LLAMA_BENCH").filter(|bench| !bench.is_empty()) {
            let bench = PathBuf::from(bench);
            return if bench.is_file() {
                Ok(Self::new(bench))
            } else {
                Err(format!("LLAMA_BENCH: {} is no file", bench.display()))
            };
        }
        std::env::var_os("PATH")
            .iter()
            .flat_map(std::env::split_paths)
            .map(|folder| folder.join("llama-bench"))
            .find(|bench| bench.is_file())
            .map(Self::new)
            .ok_or_else(|| {
                "no llama-bench: `make bench-peers` builds one, LLAMA_BENCH=PATH names one"
                    .to_owned()
            })
    }

    /// Makes a file with 8-bit weights, by the `llama-quantize` beside the bench.
    pub(crate) fn requantise(&self, file: &Path, folder: &Path) -> Result<PathBuf> {
        let quantize = self.bench.with_file_name("llama-quantize");
        ensure!(
            quantize.is_file(),
            "there is no llama-quantize beside {}",
            self.bench.display()
        );
        let bytes = folder.join("q8_0.gguf");
        output(
            Command::new(quantize)
                .arg("--allow-requantize")
                .args([file, &*bytes])
                .args(["Q8_0", "1"]),
        )?;
        Ok(bytes)
    }

    pub(crate) fn measure(&self, file: &Path, subject: &str, table: &mut Table) -> Result<()> {
        let prefill = ["-p", &list(&PREFILL), "-n", "0"].map(str::to_owned);
        let decode =
            ["-p", "0", "-n", &DECODED.to_string(), "-d", &list(&DECODE)].map(str::to_owned);
        for arguments in [prefill.as_slice(), &decode] {
            let found = self.run(file, arguments)?;
            let found: Vec<Value> =
                serde_json::from_slice(&found).context("llama-bench: its JSON")?;
            for run in &found {
                let number = |field: &str| {
                    run[field]
                        .as_f64()
                        .with_context(|| format!("llama-bench: its JSON lacks {field}"))
                };
                let case = match number("n_prompt")? as usize {
                    0 => Case::Decode(number("n_depth")? as usize),
                    tokens => Case::Prefill(tokens),
                };
                table.push(subject, case, number("avg_ts")?);
            }
        }
        Ok(())
    }
}
