//! helm in the version that the charts are tested with, at the root of the repository.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::binaries::repository;

/// One cluster's.
#[derive(Debug)]
pub struct Helm {
    program: PathBuf,
    kubeconfig: PathBuf,
}

impl Helm {
    /// Where the program that makes clusters keeps it, or in `PATH`; built where it is not there yet. None, and a line that says so, where
    /// the machine has none and cannot build it.
    ///
    /// # Errors
    /// It is not built.
    pub fn found(kubeconfig: &Path) -> Result<Option<Self>> {
        if !super::possible("helm")? {
            return Ok(None);
        }
        let said = super::program(&["tool", "helm"])?;
        let path = said.lines().last().context("no path of helm")?;
        Ok(Some(Self {
            program: path.into(),
            kubeconfig: kubeconfig.to_owned(),
        }))
    }

    /// What it prints.
    ///
    /// # Errors
    /// Its exit status is not zero; the error is what it said.
    pub fn run(&self, arguments: &[&str]) -> Result<String> {
        let output = Command::new(&self.program)
            .env("KUBECONFIG", &self.kubeconfig)
            .current_dir(repository())
            .args(arguments)
            .output()?;
        if !output.status.success() {
            bail!("{}", String::from_utf8_lossy(&output.stderr));
        }
        Ok(String::from_utf8(output.stdout)?)
    }
}
