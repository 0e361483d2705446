"""What is in each image.

Lowest layer: libraries, licences, the user, certificates; the same bytes under each image whose binary is linked alike, so that a
node keeps it once. Above it the binary. Above that, where the image is to serve without any download, a model.
"""

import pathlib
import platform
import re

from . import crates, linkage, model
from .archive import ARCHITECTURES, Image
from .failure import ImageError
from .layer import Layer

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent.parent
# The id that distroless images use for nonroot; a chart says runAsUser with the same number.
USER = 65532
PORTS = {"router": [8000, 8001], "worker": [7000, 7001, 7002], "operator": [8080]}
# Beside the folders of Debian's packages.
DOCUMENTS = "/usr/share/doc/baton"
CERTIFICATES = pathlib.Path("/etc/ssl/certs/ca-certificates.crt")
CONNECTOR = REPOSITORY / "worker" / "connectors" / "vllm" / "baton_vllm"
QUICKSTART = REPOSITORY / "examples" / "quickstart.yaml"


def names() -> list[str]:
    return [*PORTS, "worker-smollm2"]


def cannot() -> str | None:
    """Why no image can be made on this machine, or nothing."""
    return linkage.cannot() or crates.cannot()


def image(name: str, tag: str, binaries: pathlib.Path, wheels: pathlib.Path) -> Image:
    """The image of that name; `worker-smollm2` is the worker's with the quickstart's model in it."""
    if reason := cannot():
        raise ImageError(reason)
    part = name.partition("-")[0]
    binary = binaries / f"baton-{part}"
    if not binary.is_file():
        raise ImageError(f"{binary} is not there: run `make build` first, or name the folder with --binaries")
    made = Image(
        name=f"localhost/baton-{name}:{tag}",
        architecture=architecture(),
        entrypoint=[f"/usr/local/bin/{binary.name}"],
        user=f"{USER}:{USER}",
        environment={"PATH": "/usr/local/bin"},
        ports=PORTS[part],
        labels={
            "org.opencontainers.image.title": f"baton-{name}",
            "org.opencontainers.image.version": _version(),
            "org.opencontainers.image.licenses": "Apache-2.0",
        },
        layers=[
            ("libraries that the binary is linked to, user, certificates", base(binary)),
            (binary.name, _program(binary)),
        ],
    )
    if part == "worker":
        made.layers.append(("Baton's connector for vLLM", _connector()))
    if name == "worker-smollm2":
        made.layers.append(("the quickstart's model", _model(wheels)))
    return made


def base(binary: pathlib.Path) -> Layer:
    """What a binary is linked to, the user, certificates."""
    layer = Layer()
    libraries = linkage.libraries(binary)
    for folder in ("bin", "lib", "lib64", "sbin"):
        layer.link(f"/{folder}", f"usr/{folder}")
        layer.folder(f"/usr/{folder}")
    for path, file in libraries.items():
        # The folders above are links, as on any Debian: what the loader asks for as /lib/… lies in /usr/lib/….
        layer.file(path if path.startswith("/usr/") else f"/usr{path}", file.read_bytes(), 0o755)
    for path, text in linkage.licences(list(libraries.values())).items():
        layer.file(path, text)
    layer.file("/etc/passwd", f"root:x:0:0:root:/:/sbin/nologin\nbaton:x:{USER}:{USER}:baton:/:/sbin/nologin\n".encode())
    layer.file("/etc/group", f"root:x:0:\nbaton:x:{USER}:\n".encode())
    layer.file("/etc/nsswitch.conf", b"passwd: files\ngroup: files\nhosts: files dns\n")
    if CERTIFICATES.is_file():
        layer.file(str(CERTIFICATES), CERTIFICATES.read_bytes())
    layer.folder("/tmp", 0o1777)
    return layer


def _program(binary: pathlib.Path) -> Layer:
    layer = Layer()
    layer.file(f"/usr/local/bin/{binary.name}", linkage.stripped(binary), 0o755)
    for name, text in documents(binary.name).items():
        layer.file(f"{DOCUMENTS}/{name}", text)
    return layer


def documents(crate: str) -> dict[str, bytes]:
    """By the name of the file: Baton's own licence, and those of all that its binary is linked with."""
    return {
        "copyright": (REPOSITORY / "LICENSE").read_bytes(),
        "third-party.txt": crates.licences(REPOSITORY, crate),
        "rust-standard-library.html": crates.standard_library(),
    }


def _connector() -> Layer:
    """A pod of vLLM mounts the image and imports the package from here."""
    layer = Layer()
    for file in sorted(CONNECTOR.rglob("*.py")):
        layer.file(f"/usr/local/share/baton/vllm/baton_vllm/{file.relative_to(CONNECTOR)}", file.read_bytes())
    return layer


def _model(wheels: pathlib.Path) -> Layer:
    fetched = model.of_manifest(QUICKSTART, wheels)
    layer = Layer()
    layer.file(f"/models/{fetched.name}", fetched.content)
    layer.file("/models/LICENSE", fetched.licence)
    return layer


def _version() -> str:
    found = re.search(r'^version = "([^"]+)"', (REPOSITORY / "Cargo.toml").read_text(), re.MULTILINE)
    if not found:
        raise ImageError(f"{REPOSITORY}/Cargo.toml names no version")
    return found.group(1)


def architecture() -> str:
    machine = platform.machine()
    if machine not in ARCHITECTURES:
        raise ImageError(f"images are made on {', '.join(ARCHITECTURES)}, and this machine is {machine}")
    return ARCHITECTURES[machine]
