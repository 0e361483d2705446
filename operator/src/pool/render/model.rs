//! Where a worker's container finds the weights, and what is mounted for it.

use std::path::{Path, PathBuf};

use baton_crds::PoolSpec;
use baton_crds::pool::EngineType;
use baton_crds::source::ModelLocation;
use baton_crds::worker_configuration::Weights;
use k8s_openapi::api::core::v1::{
    HostPathVolumeSource, ImageVolumeSource, PersistentVolumeClaimVolumeSource, Volume, VolumeMount,
};

use crate::pool::refusal::Refusal;

/// Name of the volume.
pub(super) const VOLUME: &str = "model";
/// Where a claim or an image is mounted.
pub(super) const DIRECTORY: &str = "/model";
/// The weights in an image that is mounted as a volume: such an image has no other way to say where they are.
const FILE_OF_IMAGE: &str = "model.gguf";

/// The weights, as the container that computes sees them.
#[derive(Debug, Default)]
pub(super) struct Mounted {
    pub(super) weights: Option<Weights>,
    /// A daemon beside that container sees them too, at the same place.
    pub(super) shared: bool,
    pub(super) volume: Option<Volume>,
    pub(super) mount: Option<VolumeMount>,
}

impl Mounted {
    fn at(path: PathBuf, directory: &str, volume: Volume) -> Self {
        Self {
            weights: Some(Weights::Path(path)),
            shared: true,
            volume: Some(volume),
            mount: Some(VolumeMount {
                name: VOLUME.to_owned(),
                mount_path: directory.to_owned(),
                read_only: Some(true),
                ..VolumeMount::default()
            }),
        }
    }
}

pub(super) fn mounted(spec: &PoolSpec) -> Result<Mounted, Refusal> {
    let kind = spec.engine.engine_type;
    if kind == EngineType::Simulated {
        return Ok(Mounted::default());
    }
    let source = &spec.model.source;
    let volume = Volume {
        name: VOLUME.to_owned(),
        ..Volume::default()
    };
    match source.location() {
        Err(error) => Err(Refusal::new(
            "InvalidSpec",
            format!("spec.model.source: {error}"),
        )),
        Ok(ModelLocation::Tiny { .. } | ModelLocation::PyPi { .. }) if kind.is_server() => {
            Err(Refusal::new(
                "InvalidSpec",
                format!(
                    "spec.model.source.uri is one for engine Builtin: give {} a model's folder or hf://ORGANISATION/NAME",
                    kind.word()
                ),
            ))
        }
        Ok(ModelLocation::Hub { name, revision }) if kind.is_server() => Ok(Mounted {
            weights: Some(Weights::Hub { name, revision }),
            ..Mounted::default()
        }),
        Ok(ModelLocation::Tiny { seed }) => Ok(Mounted {
            weights: Some(Weights::Tiny { seed }),
            ..Mounted::default()
        }),
        Ok(ModelLocation::Hub { .. }) => Err(Refusal::new(
            "InvalidSpec",
            "spec.model.source.uri is an hf:// one: Builtin fetches nothing",
        )),
        Ok(ModelLocation::PyPi { .. }) => Err(Refusal::new(
            "ModelSourceUnsupported",
            "spec.model.source.uri is a pypi:// one: pods do not fetch models from package indexes: put the file into an image or a volume",
        )),
        Ok(ModelLocation::File(path)) => match &source.host_path {
            // A file:// is one of the image of what computes.
            None => Ok(Mounted {
                weights: Some(Weights::Path(path)),
                ..Mounted::default()
            }),
            Some(host_path) => Ok(from_node(host_path, kind.is_server(), volume)),
        },
        Ok(ModelLocation::Cluster) => match (&source.persistent_volume_claim, &source.image) {
            (Some(claim), _) => from_claim(claim, volume),
            (None, image) => Ok(from_image(image.clone(), kind.is_server(), volume)),
        },
    }
}

/// Mounts the file alone: its directory may hold what is none of the worker's business. A server's model is a directory of its own.
fn from_node(host_path: &str, is_folder: bool, volume: Volume) -> Mounted {
    let inside = Path::new(host_path).file_name().map_or_else(
        || PathBuf::from(DIRECTORY),
        |name| Path::new(DIRECTORY).join(name),
    );
    let volume = Volume {
        host_path: Some(HostPathVolumeSource {
            path: host_path.to_owned(),
            type_: Some(if is_folder { "Directory" } else { "File" }.to_owned()),
        }),
        ..volume
    };
    let at = inside.to_string_lossy().into_owned();
    Mounted::at(inside, &at, volume)
}

fn from_claim(claim: &str, volume: Volume) -> Result<Mounted, Refusal> {
    let parts = claim
        .split_once('/')
        .filter(|(name, path)| !name.is_empty() && !path.is_empty());
    let Some((name, path)) = parts else {
        let message = format!(
            "spec.model.source.persistentVolumeClaim is {claim:?}, must be CLAIM/PATH: the claim's name and the file's path in it"
        );
        return Err(Refusal::new("InvalidSpec", message));
    };
    if path.split('/').any(|step| step == ".." || step.is_empty()) {
        let message = format!(
            "spec.model.source.persistentVolumeClaim is {claim:?}: the path must stay inside the claim, without empty steps"
        );
        return Err(Refusal::new("InvalidSpec", message));
    }
    let volume = Volume {
        persistent_volume_claim: Some(PersistentVolumeClaimVolumeSource {
            claim_name: name.to_owned(),
            read_only: Some(true),
        }),
        ..volume
    };
    Ok(Mounted::at(
        Path::new(DIRECTORY).join(path),
        DIRECTORY,
        volume,
    ))
}

/// A folder is the image's root.
fn from_image(image: Option<String>, is_folder: bool, volume: Volume) -> Mounted {
    let volume = Volume {
        image: Some(ImageVolumeSource {
            reference: image,
            ..ImageVolumeSource::default()
        }),
        ..volume
    };
    let root = Path::new(DIRECTORY);
    let weights = if is_folder {
        root.to_path_buf()
    } else {
        root.join(FILE_OF_IMAGE)
    };
    Mounted::at(weights, DIRECTORY, volume)
}
