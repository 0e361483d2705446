//! What a cluster with nodes might leave behind on the machine.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use baton_e2e::cluster::Cluster;
use serde_json::Value;

/// One cluster's traces.
#[derive(Debug)]
pub(crate) struct Remains {
    /// In the names of its network namespaces and control groups.
    prefix: String,
    /// In the arguments of its processes, in nodes too.
    folder: String,
}

impl Remains {
    pub(crate) fn of(cluster: &Cluster) -> Result<Self> {
        let folder = cluster.folder()?;
        let known = std::fs::read_to_string(folder.join("cluster.json"))?;
        let known: Value = serde_json::from_str(&known)?;
        let id = known["id"].as_str().context("a cluster without an id")?;
        Ok(Self {
            prefix: format!("baton-{id}"),
            folder: folder.to_string_lossy().into_owned(),
        })
    }

    /// All that there is of it now.
    pub(crate) fn found(&self) -> Vec<String> {
        let groups = Path::new("/sys/fs/cgroup");
        let mut places = vec![PathBuf::from("/run/netns"), groups.to_owned()];
        places.extend(entries(groups));
        let shared = places.iter().flat_map(|place| entries(place));
        let shared = shared.filter(|path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            name.starts_with(&self.prefix)
        });
        let processes = entries(Path::new("/proc")).into_iter().filter(|process| {
            let arguments = std::fs::read(process.join("cmdline")).unwrap_or_default();
            let arguments = String::from_utf8_lossy(&arguments);
            // The guard waits for this test's end, and finds then that nothing is left to do.
            arguments.contains(&self.folder) && !arguments.contains("\0_guard\0")
        });
        let all = shared.chain(processes);
        all.map(|path| path.to_string_lossy().into_owned())
            .collect()
    }
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).collect()
}
