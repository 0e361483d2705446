//! The volumes of a worker's pod, and where its container mounts them.

use baton_crds::{PoolSpec, labels};
use k8s_openapi::api::core::v1::{
    DownwardAPIVolumeFile, DownwardAPIVolumeSource, EmptyDirVolumeSource, ObjectFieldSelector,
    SecretVolumeSource, Volume, VolumeMount,
};

use super::model::{self, Mounted};
use super::parsed_list;
use crate::pool::refusal::Refusal;

const CONFIGURATION: &str = "worker-config";
const CONFIGURATION_DIRECTORY: &str = "/etc/baton";
pub(super) const CONFIGURATION_FILE: &str = "/etc/baton/worker.json";
const HASH_KEY: &str = "baton-hash-key";
const HASH_KEY_DIRECTORY: &str = "/etc/baton-hash-key";
pub(super) const HASH_KEY_FILE: &str = "/etc/baton-hash-key/key";
/// The root file system cannot be written, and some libraries want a place that can.
const SCRATCH: &str = "tmp";

const NAMES: [&str; 4] = [CONFIGURATION, HASH_KEY, SCRATCH, model::VOLUME];
const PATHS: [&str; 4] = [
    CONFIGURATION_DIRECTORY,
    HASH_KEY_DIRECTORY,
    "/tmp",
    model::DIRECTORY,
];

pub(super) fn all(spec: &PoolSpec, model: &Mounted) -> Result<Vec<Volume>, Refusal> {
    let configuration = Volume {
        name: CONFIGURATION.to_owned(),
        downward_api: Some(DownwardAPIVolumeSource {
            items: Some(vec![DownwardAPIVolumeFile {
                path: "worker.json".to_owned(),
                field_ref: Some(ObjectFieldSelector {
                    field_path: format!("metadata.annotations['{}']", labels::WORKER_CONFIG),
                    ..ObjectFieldSelector::default()
                }),
                ..DownwardAPIVolumeFile::default()
            }]),
            ..DownwardAPIVolumeSource::default()
        }),
        ..Volume::default()
    };
    let hash_key = Volume {
        name: HASH_KEY.to_owned(),
        secret: Some(SecretVolumeSource {
            secret_name: Some(labels::HASH_KEY_SECRET.to_owned()),
            // Readable for the container's user without a group that owns volumes, whose change would walk every claim.
            default_mode: Some(0o444),
            ..SecretVolumeSource::default()
        }),
        ..Volume::default()
    };
    let scratch = Volume {
        name: SCRATCH.to_owned(),
        empty_dir: Some(EmptyDirVolumeSource::default()),
        ..Volume::default()
    };
    let mut volumes = vec![configuration, hash_key, scratch];
    volumes.extend(model.volume.clone());
    let author: Vec<Volume> = parsed_list("volumes", &spec.template.volumes)?;
    for (index, volume) in author.iter().enumerate() {
        if NAMES.contains(&volume.name.as_str()) {
            let message = format!(
                "spec.template.volumes[{index}].name is {}, which is Baton's own: take another name",
                volume.name
            );
            return Err(Refusal::new("InvalidTemplate", message));
        }
    }
    volumes.extend(author);
    Ok(volumes)
}

pub(super) fn mounts(spec: &PoolSpec, model: &Mounted) -> Result<Vec<VolumeMount>, Refusal> {
    let mount = |name: &str, path: &str, read_only: bool| VolumeMount {
        name: name.to_owned(),
        mount_path: path.to_owned(),
        read_only: read_only.then_some(true),
        ..VolumeMount::default()
    };
    let mut mounts = vec![
        mount(CONFIGURATION, CONFIGURATION_DIRECTORY, true),
        mount(HASH_KEY, HASH_KEY_DIRECTORY, true),
        mount(SCRATCH, "/tmp", false),
    ];
    mounts.extend(model.mount.clone());
    let author: Vec<VolumeMount> = parsed_list("volumeMounts", &spec.template.volume_mounts)?;
    for (index, mount) in author.iter().enumerate() {
        let path = mount.mount_path.trim_end_matches('/');
        if PATHS.contains(&path) {
            let message = format!(
                "spec.template.volumeMounts[{index}].mountPath is {path}, which is Baton's own: mount it elsewhere"
            );
            return Err(Refusal::new("InvalidTemplate", message));
        }
    }
    mounts.extend(author);
    Ok(mounts)
}
