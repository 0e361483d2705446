//! The volumes of a worker's pod, and where its container mounts them.

use baton_crds::pool::Connector;
use baton_crds::{PoolSpec, labels};
use k8s_openapi::api::core::v1::{
    DownwardAPIVolumeFile, DownwardAPIVolumeSource, EmptyDirVolumeSource, ImageVolumeSource,
    ObjectFieldSelector, SecretVolumeSource, Volume, VolumeMount,
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

/// Where daemon and engine meet, of a pod that has both.
const MEETING: &str = "baton-run";
pub(super) const MEETING_DIRECTORY: &str = "/run/baton";
/// Memory that the processes of an engine share.
const SHARED_MEMORY: &str = "baton-shm";
const SHARED_MEMORY_DIRECTORY: &str = "/dev/shm";
/// The worker's image, for what an engine takes out of it.
const WORKER_IMAGE: &str = "baton-image";
const WORKER_IMAGE_DIRECTORY: &str = "/opt/baton";
/// In the worker's image: the folder of the Python package `baton_vllm`.
const CONNECTOR_IN_IMAGE: &str = "usr/local/share/baton/vllm";

const NAMES: [&str; 4] = [CONFIGURATION, HASH_KEY, SCRATCH, model::VOLUME];
const PATHS: [&str; 4] = [
    CONFIGURATION_DIRECTORY,
    HASH_KEY_DIRECTORY,
    "/tmp",
    model::DIRECTORY,
];

pub(super) fn all(
    spec: &PoolSpec,
    model: &Mounted,
    worker_image: Option<&str>,
) -> Result<Vec<Volume>, Refusal> {
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
    if spec.engine.engine_type.is_server() {
        volumes.extend(of_a_server(spec, worker_image));
    }
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

/// What a pod with a server beside its daemon has more.
fn of_a_server(spec: &PoolSpec, worker_image: Option<&str>) -> Vec<Volume> {
    let empty = |name: &str, medium: Option<&str>| Volume {
        name: name.to_owned(),
        empty_dir: Some(EmptyDirVolumeSource {
            medium: medium.map(ToOwned::to_owned),
            ..EmptyDirVolumeSource::default()
        }),
        ..Volume::default()
    };
    let mut volumes = vec![
        empty(MEETING, None),
        // A runtime's own is 64 MiB; the processes of several devices hand their tensors over in it. It counts as the container's memory.
        empty(SHARED_MEMORY, Some("Memory")),
    ];
    if spec.engine.connector() == Connector::Baton {
        volumes.push(Volume {
            name: WORKER_IMAGE.to_owned(),
            image: Some(ImageVolumeSource {
                reference: worker_image.map(ToOwned::to_owned),
                ..ImageVolumeSource::default()
            }),
            ..Volume::default()
        });
    }
    volumes
}

fn mount(name: &str, path: &str, read_only: bool) -> VolumeMount {
    VolumeMount {
        name: name.to_owned(),
        mount_path: path.to_owned(),
        read_only: read_only.then_some(true),
        ..VolumeMount::default()
    }
}

/// Of a worker's container with the engine in it.
pub(super) fn mounts(spec: &PoolSpec, model: &Mounted) -> Result<Vec<VolumeMount>, Refusal> {
    let mut mounts = of_worker(model);
    mounts.extend(authors(spec, &PATHS)?);
    Ok(mounts)
}

fn of_worker(model: &Mounted) -> Vec<VolumeMount> {
    let mut mounts = vec![
        mount(CONFIGURATION, CONFIGURATION_DIRECTORY, true),
        mount(HASH_KEY, HASH_KEY_DIRECTORY, true),
        mount(SCRATCH, "/tmp", false),
    ];
    mounts.extend(model.mount.clone());
    mounts
}

/// Of the daemon beside a server.
pub(super) fn mounts_of_daemon(model: &Mounted) -> Vec<VolumeMount> {
    let mut mounts = of_worker(model);
    mounts.push(mount(MEETING, MEETING_DIRECTORY, false));
    mounts
}

/// Of a server.
pub(super) fn mounts_of_server(
    spec: &PoolSpec,
    model: &Mounted,
) -> Result<Vec<VolumeMount>, Refusal> {
    let mut mounts: Vec<VolumeMount> = model.mount.iter().cloned().collect();
    mounts.push(mount(MEETING, MEETING_DIRECTORY, false));
    mounts.push(mount(SHARED_MEMORY, SHARED_MEMORY_DIRECTORY, false));
    if spec.engine.connector() == Connector::Baton {
        mounts.push(mount(WORKER_IMAGE, WORKER_IMAGE_DIRECTORY, true));
    }
    let own: Vec<String> = mounts.iter().map(|own| own.mount_path.clone()).collect();
    let own: Vec<&str> = own.iter().map(String::as_str).collect();
    mounts.extend(authors(spec, &own)?);
    Ok(mounts)
}

/// From where a server imports Baton's connector.
pub(super) fn connector_package() -> String {
    format!("{WORKER_IMAGE_DIRECTORY}/{CONNECTOR_IN_IMAGE}")
}

fn authors(spec: &PoolSpec, own: &[&str]) -> Result<Vec<VolumeMount>, Refusal> {
    let author: Vec<VolumeMount> = parsed_list("volumeMounts", &spec.template.volume_mounts)?;
    for (index, mount) in author.iter().enumerate() {
        let path = mount.mount_path.trim_end_matches('/');
        if own.contains(&path) {
            let message = format!(
                "spec.template.volumeMounts[{index}].mountPath is {path}, which is Baton's own: mount it elsewhere"
            );
            return Err(Refusal::new("InvalidTemplate", message));
        }
    }
    Ok(author)
}
