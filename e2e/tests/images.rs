//! Images made without a container engine: the same bytes each time, nobody's root, with the licences of what is in them. The
//! Containerfiles, which nothing here can build, say the same.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use baton_e2e::binaries::{program, repository};
use baton_e2e::skipped;
use serde_json::Value;

/// Images of one binary each.
const PARTS: [&str; 3] = ["operator", "router", "worker"];

#[test]
fn an_image_built_twice_is_the_same_bit_for_bit() -> Result<()> {
    let scratch = tempfile::tempdir()?;
    let (first, second) = (scratch.path().join("one"), scratch.path().join("two"));
    if !built(&first, &PARTS)? || !built(&second, &PARTS)? {
        return Ok(());
    }
    for part in PARTS {
        let read = |folder: &Path| std::fs::read(folder.join(format!("baton-{part}.tar")));
        let (one, other) = (read(&first)?, read(&second)?);
        ensure!(
            !one.is_empty() && one == other,
            "two builds of {part} differ"
        );
    }
    Ok(())
}

/// As `make images` made it: it is not made here, because its model may have to be fetched.
#[test]
fn the_quickstarts_image_has_its_model_and_the_models_licence() -> Result<()> {
    let folder = std::env::var_os("BATON_IMAGES")
        .map_or_else(|| repository().join("target/images"), PathBuf::from);
    let archive = folder.join("baton-worker-smollm2.tar");
    if !archive.is_file() {
        let archive = archive.display();
        skipped(&format!("{archive} is not there: run `make images`"));
        return Ok(());
    }
    let image = Image::read(archive)?;
    ensure!(image.config["User"] == "65532:65532", "{}", image.config);
    let manifest = repository().join("examples/cluster/quickstart.yaml");
    let manifest = std::fs::read_to_string(manifest)?;
    let models = manifest
        .lines()
        .filter_map(|line| line.trim().strip_prefix("uri: file://"));
    let models: BTreeSet<&str> = models.collect();
    ensure!(!models.is_empty(), "the quickstart names no file");
    for model in models {
        ensure!(image.has(model), "{model} is not in the image");
    }
    let licence = image.text("models/LICENSE")?;
    ensure!(licence.contains("Apache License"), "{licence}");
    Ok(())
}

#[test]
fn images_are_run_by_nobody_in_particular_and_carry_their_licences() -> Result<()> {
    let scratch = tempfile::tempdir()?;
    if !built(scratch.path(), &PARTS)? {
        return Ok(());
    }
    for part in PARTS {
        let image = Image::read(scratch.path().join(format!("baton-{part}.tar")))
            .with_context(|| format!("image of {part}"))?;
        as_meant(&image, part)?;
        every_linked_crate_is_in_the_licences(&image, part)?;
        containerfile_says_the_same(&image, part)?;
    }
    Ok(())
}

/// An archive, and what is in it.
struct Image {
    archive: PathBuf,
    /// `User`, `Entrypoint`, `ExposedPorts`, `Labels`.
    config: Value,
    /// Layers in it, from the lowest.
    layers: Vec<String>,
    /// `mode owner path` of each entry.
    files: Vec<String>,
}

impl Image {
    fn read(archive: PathBuf) -> Result<Self> {
        let index: Value = serde_json::from_str(&member(&archive, "index.json")?)?;
        let manifest = blob(&archive, &index["manifests"][0]["digest"])?;
        let config = blob(&archive, &manifest["config"]["digest"])?["config"].take();
        let layers = manifest["layers"].as_array().context("no layers")?;
        let layers: Vec<String> = layers
            .iter()
            .map(|layer| path(&layer["digest"]))
            .collect::<Result<_>>()?;
        let files: Vec<String> = layers
            .iter()
            .map(|name| listing(&archive, name))
            .collect::<Result<Vec<_>>>()?
            .concat();
        Ok(Self {
            archive,
            config,
            layers,
            files,
        })
    }

    fn has(&self, path: &str) -> bool {
        let entry = format!(" {}", path.trim_start_matches('/'));
        self.files.iter().any(|file| file.ends_with(&entry))
    }

    /// A file of a layer that has it.
    fn text(&self, path: &str) -> Result<String> {
        let scratch = tempfile::NamedTempFile::new()?;
        for layer in &self.layers {
            std::fs::write(scratch.path(), tar(&["-xOf"], &self.archive, layer)?)?;
            if let Ok(text) = member(scratch.path(), path) {
                return Ok(text);
            }
        }
        anyhow::bail!("{path} is not in the image")
    }
}

fn as_meant(image: &Image, part: &str) -> Result<()> {
    let config = &image.config;
    ensure!(config["User"] == "65532:65532", "{config}");
    let program = format!("/usr/local/bin/baton-{part}");
    ensure!(config["Entrypoint"][0] == program.as_str(), "{config}");

    // What docker reads names the very blobs that the layout's manifest names.
    let docker: Value = serde_json::from_str(&member(&image.archive, "manifest.json")?)?;
    ensure!(
        docker[0]["Layers"] == serde_json::json!(image.layers),
        "{docker}"
    );
    ensure!(docker[0]["RepoTags"][0] == format!("localhost/baton-{part}:dev"));

    let connector = "usr/local/share/baton/vllm/baton_vllm/connector.py";
    for needed in [
        program.as_str(),
        "usr/share/doc/baton/copyright",
        "usr/share/doc/baton/third-party.txt",
        "usr/share/doc/baton/rust-standard-library.html",
        "usr/share/doc/libc6/copyright",
        "etc/passwd",
    ] {
        let files = &image.files;
        ensure!(image.has(needed), "{needed} is missing: {files:#?}");
    }
    ensure!(image.has(connector) == (part == "worker"), "{connector}");
    for file in &image.files {
        let (mode, rest) = file.split_once(' ').unwrap_or((file, ""));
        ensure!(rest.starts_with("0/0"), "not root's: {file}");
        ensure!(!mode.contains('s'), "runs as its owner: {file}");
    }
    Ok(())
}

/// The program itself says what it is made of: a crate that can panic leaves the paths of its sources.
fn every_linked_crate_is_in_the_licences(image: &Image, part: &str) -> Result<()> {
    let text = image.text("usr/share/doc/baton/third-party.txt")?;
    // `name version: licence; repository`, and on the line below the texts that it comes with.
    let lines: Vec<&str> = text.lines().collect();
    let listed: BTreeSet<String> = lines
        .windows(2)
        .filter(|pair| pair[1].starts_with("    "))
        .filter_map(|pair| Some(pair[0].split_once(": ")?.0.replacen(' ', "-", 1)))
        .collect();
    let linked = crates_in(&std::fs::read(program(&format!("baton-{part}"))?)?);
    ensure!(linked.len() > 50, "only {linked:?} are in baton-{part}");
    let missing: Vec<_> = linked.difference(&listed).collect();
    ensure!(
        missing.is_empty(),
        "baton-{part} is linked with {missing:?}, and third-party.txt of its image does not name them"
    );
    for words in [
        "TERMS AND CONDITIONS FOR USE, REPRODUCTION, AND DISTRIBUTION",
        "Permission is hereby granted, free of charge",
    ] {
        ensure!(text.contains(words), "no licence has {words:?}");
    }
    Ok(())
}

/// `name-version` of each crate of a registry whose path is in a program.
fn crates_in(program: &[u8]) -> BTreeSet<String> {
    const SOURCES: &[u8] = b"/registry/src/";
    let found = program
        .windows(SOURCES.len())
        .enumerate()
        .filter(|(_, bytes)| *bytes == SOURCES);
    let names = found.filter_map(|(at, _)| {
        // `REGISTRY/NAME-VERSION/src/…`
        let path = program[at..].get(SOURCES.len()..SOURCES.len() + 256)?;
        let mut parts = path.split(|byte| *byte == b'/').skip(1);
        let (name, _more) = (parts.next()?, parts.next()?);
        let plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"-_.+".contains(byte);
        let name = std::str::from_utf8(name).ok()?;
        name.bytes()
            .all(|byte| plain(&byte))
            .then(|| name.to_owned())
    });
    names.collect()
}

fn containerfile_says_the_same(image: &Image, part: &str) -> Result<()> {
    let name = format!("images/Containerfile.{part}");
    let file = std::fs::read_to_string(repository().join(&name))?;
    let config = &image.config;
    let mut lines = vec![
        format!("USER {}", config["User"].as_str().unwrap_or_default()),
        format!("ENTRYPOINT {}", config["Entrypoint"]),
        format!("RUN images/licences baton-{part} target/licences"),
        "COPY --from=build /source/target/licences /usr/share/doc/baton".to_owned(),
    ];
    let ports = config["ExposedPorts"].as_object().context("no ports")?;
    let ports: Vec<&str> = ports
        .keys()
        .map(|port| port.trim_end_matches("/tcp"))
        .collect();
    lines.push(format!("EXPOSE {}", ports.join(" ")));
    let labels = config["Labels"].as_object().context("no labels")?;
    lines.extend(
        labels
            .iter()
            .map(|(label, value)| format!("{label}={value}")),
    );
    for line in lines {
        ensure!(file.contains(&line), "{name} has no {line:?}");
    }
    // What it copies is in the image too.
    for copied in file
        .lines()
        .filter_map(|line| line.strip_prefix("COPY --from=build "))
    {
        let target = copied.split_whitespace().last().unwrap_or_default();
        ensure!(
            image.has(target) || image.has(&format!("{target}/")),
            "{name}: {target} is not in the image"
        );
    }
    Ok(())
}

/// Images of these parts, made in that folder; false where the machine cannot make any.
fn built(folder: &Path, parts: &[&str]) -> Result<bool> {
    let worker = program("baton-worker")?;
    let output = Command::new(repository().join("images/build"))
        .args(parts)
        .args(["--where-possible", "--output"])
        .arg(folder)
        .arg("--binaries")
        .arg(worker.parent().context("a program without a folder")?)
        .output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "images/build: {said}");
    let made = folder.join(format!("baton-{}.tar", parts[0])).exists();
    if !made {
        skipped(said.trim());
    }
    Ok(made)
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
