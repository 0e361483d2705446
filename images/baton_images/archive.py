"""An image as one tar that is both an OCI image layout and a docker-archive.

`ctr images import`, `podman load`, `docker load`, `skopeo copy oci-archive:` and `kind load image-archive` each find the half that
they read. The formats: opencontainers/image-spec v1.1 (image-layout.md, config.md, manifest.md), and for manifest.json moby's
image/spec/v1.2.md.
"""

import hashlib
import io
import json
import pathlib
import tarfile
from dataclasses import dataclass, field

from .layer import Layer

ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar"
# No time of a build is in an image: the same sources give the same digest on every day.
EPOCH = "1970-01-01T00:00:00Z"


@dataclass
class Image:
    """What a runtime is told about an image, and its layers from the lowest up."""

    name: str
    architecture: str
    entrypoint: list[str]
    layers: list[tuple[str, Layer]]
    user: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    ports: list[int] = field(default_factory=list)

    def write(self, target: pathlib.Path) -> str:
        """Writes the tar and returns the digest of the manifest, by which a registry would know the image."""
        tars = [layer.tar() for _, layer in self.layers]
        blobs = {_digest(tar): tar for tar in tars}
        config = _json(self._config([_digest(tar) for tar in tars]))
        manifest = _json(
            {
                "schemaVersion": 2,
                "mediaType": MANIFEST,
                "config": _descriptor(CONFIG, config),
                "layers": [_descriptor(LAYER, tar) for tar in tars],
            }
        )
        blobs |= {_digest(config): config, _digest(manifest): manifest}
        named = {"io.containerd.image.name": self.name, "org.opencontainers.image.ref.name": self.name.rpartition(":")[2]}
        index = {"schemaVersion": 2, "manifests": [_descriptor(MANIFEST, manifest) | {"annotations": named}]}
        docker = [{"Config": _path(config), "RepoTags": [self.name], "Layers": [_path(tar) for tar in tars]}]
        files = {_path(content): content for content in blobs.values()}
        files |= {
            "oci-layout": _json({"imageLayoutVersion": "1.0.0"}),
            "index.json": _json(index),
            "manifest.json": _json(docker),
        }
        target.parent.mkdir(parents=True, exist_ok=True)
        beside = target.with_suffix(".part")
        with tarfile.open(beside, mode="w", format=tarfile.PAX_FORMAT) as archive:
            for path in sorted(files):
                entry = tarfile.TarInfo(path)
                entry.size = len(files[path])
                archive.addfile(entry, io.BytesIO(files[path]))
        beside.replace(target)
        return _digest(manifest)

    def _config(self, layers: list[str]) -> dict:
        run = {"Entrypoint": self.entrypoint, "WorkingDir": "/"}
        if self.user:
            run["User"] = self.user
        if self.environment:
            run["Env"] = [f"{name}={value}" for name, value in sorted(self.environment.items())]
        if self.labels:
            run["Labels"] = self.labels
        if self.ports:
            run["ExposedPorts"] = {f"{port}/tcp": {} for port in self.ports}
        return {
            "created": EPOCH,
            "architecture": self.architecture,
            "os": "linux",
            "config": run,
            "rootfs": {"type": "layers", "diff_ids": layers},
            "history": [{"created": EPOCH, "created_by": said} for said, _ in self.layers],
        }


def _json(value) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _digest(content: bytes) -> str:
    return "sha256:" + hashlib.sha256(content).hexdigest()


def _path(content: bytes) -> str:
    return "blobs/" + _digest(content).replace(":", "/")


def _descriptor(media: str, content: bytes) -> dict:
    return {"mediaType": media, "digest": _digest(content), "size": len(content)}
