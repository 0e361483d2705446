//! Images made without a container engine: the same bytes each time, nobody's root, with the licences of what is in them.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use baton_e2e::binaries::{program, repository};
use baton_e2e::skipped;
use serde_json::Value;

#[test]
fn an_image_built_twice_is_the_same_bit_for_bit() -> Result<()> {
    let scratch = tempfile::tempdir()?;
    let (first, second) = (scratch.path().join("one"), scratch.path().join("two"));
    let (Some(one), Some(other)) = (built(&first)?, built(&second)?) else {
        return Ok(());
    };
    let (one, other) = (std::fs::read(one)?, std::fs::read(other)?);
    ensure!(!one.is_empty() && one == other, "two builds differ");
    Ok(())
}

#[test]
fn an_image_is_run_by_nobody_in_particular_and_carries_its_licences() -> Result<()> {
    let scratch = tempfile::tempdir()?;
    let Some(archive) = built(scratch.path())? else {
        return Ok(());
    };
    let index: Value = serde_json::from_str(&member(&archive, "index.json")?)?;
    let manifest = blob(&archive, &index["manifests"][0]["digest"])?;
    let config = blob(&archive, &manifest["config"]["digest"])?;
    ensure!(
        config["config"]["User"] == "65532:65532",
        "{}",
        config["config"]
    );
    ensure!(
        config["config"]["Entrypoint"][0] == "/usr/local/bin/baton-worker",
        "{}",
        config["config"]
    );

    // What docker reads names the very blobs that the layout's manifest names.
    let docker: Value = serde_json::from_str(&member(&archive, "manifest.json")?)?;
    let layers = manifest["layers"].as_array().context("no layers")?;
    let names: Vec<String> = layers
        .iter()
        .map(|layer| path(&layer["digest"]))
        .collect::<Result<_>>()?;
    ensure!(docker[0]["Layers"] == serde_json::json!(names), "{docker}");
    ensure!(docker[0]["RepoTags"][0] == "localhost/baton-worker:dev");

    let files: Vec<String> = names
        .iter()
        .map(|name| listing(&archive, name))
        .collect::<Result<Vec<_>>>()?
        .concat();
    for needed in [
        "usr/local/bin/baton-worker",
        "usr/local/share/baton/vllm/baton_vllm/connector.py",
        "usr/share/doc/baton/copyright",
        "usr/share/doc/libc6/copyright",
        "etc/passwd",
    ] {
        ensure!(
            files
                .iter()
                .any(|file| file.ends_with(&format!(" {needed}"))),
            "{needed} is missing: {files:#?}"
        );
    }
    for file in &files {
        let (mode, rest) = file.split_once(' ').unwrap_or((file, ""));
        ensure!(rest.starts_with("0/0"), "not root's: {file}");
        ensure!(!mode.contains('s'), "runs as its owner: {file}");
    }
    Ok(())
}

/// The worker's image, made in that folder; nothing where the machine cannot make any.
fn built(folder: &Path) -> Result<Option<PathBuf>> {
    let worker = program("baton-worker")?;
    let output = Command::new(repository().join("images/build"))
        .args(["worker", "--where-possible", "--output"])
        .arg(folder)
        .arg("--binaries")
        .arg(worker.parent().context("a program without a folder")?)
        .output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "images/build: {said}");
    let archive = folder.join("baton-worker.tar");
    if !archive.exists() {
        skipped(said.trim());
        return Ok(None);
    }
    Ok(Some(archive))
}

fn tar(arguments: &[&str], archive: &Path, member: &str) -> Result<Vec<u8>> {
    let output = Command::new("tar")
        .args(arguments)
        .arg(archive)
        .arg(member)
        .output()?;
    ensure!(output.status.success(), "{member} is not in the archive");
    Ok(output.stdout)
}

fn member(archive: &Path, name: &str) -> Result<String> {
    Ok(String::from_utf8(tar(&["-xOf"], archive, name)?)?)
}

fn path(digest: &Value) -> Result<String> {
    let text = digest.as_str().context("no digest")?;
    Ok(format!("blobs/{}", text.replace(':', "/")))
}

fn blob(archive: &Path, digest: &Value) -> Result<Value> {
    Ok(serde_json::from_str(&member(archive, &path(digest)?)?)?)
}

/// `mode owner path` of each entry of a layer.
fn listing(archive: &Path, layer: &str) -> Result<Vec<String>> {
    let scratch = tempfile::NamedTempFile::new()?;
    std::fs::write(scratch.path(), tar(&["-xOf"], archive, layer)?)?;
    let output = Command::new("tar")
        .args(["--numeric-owner", "-tvf"])
        .arg(scratch.path())
        .output()?;
    ensure!(output.status.success(), "{layer} is no tar");
    let text = String::from_utf8(output.stdout)?;
    Ok(text
        .lines()
        .map(|line| line.split_whitespace().collect::<Vec<_>>())
        // mode owner size date time path [-> target]
        .map(|words| [words[0], words[1], words[5]].join(" "))
        .collect())
}
