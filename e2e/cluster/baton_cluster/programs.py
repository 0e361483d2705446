"""Where a cluster's programs come from: built once from pinned Go modules, or found in KUBEBUILDER_ASSETS.

    <cache>/<digest>/bin/   kubernetes (one file), a link for each program's name, pause
    <cache>/tools/          helm and kwok, by version
    <either>.not-fetched    why the last build of one could not have its modules, until one can

The digest covers every file of the module and the Go that builds it, so a change of either is another folder and a folder that
exists is complete: it is built beside and renamed.
"""

import contextlib
import fcntl
import hashlib
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass

from .failure import ClusterError, NotFetched

MODULE = pathlib.Path(__file__).resolve().parent.parent / "kubernetes"
SERVERS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy", "kubectl")
TOOLS = {"helm": "helm.sh/helm/v4/cmd/helm@v4.3.2", "kwok": "sigs.k8s.io/kwok/cmd/kwok@v0.8.0"}
# How Go tells of a module that it could not fetch: by the address, but where it may ask nobody. Compilers name no addresses.
UNFETCHED = re.compile(r"https?://|module lookup disabled by GOPROXY=off")
# And of one that is there and is not to be had: no other moment would help.
REFUSED = re.compile(r"SECURITY ERROR|: (404 Not Found|410 Gone)")
TRIES = 3
PAUSE_SECONDS = 10


@dataclass(frozen=True)
class Programs:
    """A folder of programs, and those of a whole cluster that it does not have."""

    folder: pathlib.Path
    missing: tuple[str, ...]

    def path(self, name: str) -> str:
        return str(self.folder / name)


def cache() -> pathlib.Path:
    if named := os.environ.get("BATON_CLUSTER_CACHE"):
        return pathlib.Path(named)
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(base) / "baton" / "cluster"


def find(needed: tuple[str, ...], tell) -> Programs:
    """The programs of a cluster, built where that is needed. What `needed` names and the folder lacks is an error."""
    programs = _given() or Programs(_built(tell), ())
    if lacking := [name for name in needed if name in programs.missing]:
        raise ClusterError(
            f"KUBEBUILDER_ASSETS={programs.folder} has no {', '.join(lacking)}: unset it, and they are built from Go modules"
        )
    return programs


def tool(name: str, tell) -> pathlib.Path:
    """helm or kwok: in the pinned version, or the helm that is here already."""
    package = TOOLS[name]
    version = package.rpartition("@")[2]
    target = _kept(name)
    if not target.exists() and (found := _installed(name, version)):
        return found
    if reason := cannot_have(name):
        raise ClusterError(reason)
    with _lock(cache() / "tools" / f".{name}.lock"):
        if not target.exists():
            tell(f"building {name} {version} (1 to 2 minutes, once)")
            with _noted(target), tempfile.TemporaryDirectory(dir=target.parent) as scratch:
                _go(["install", "-trimpath", "-ldflags", "-s -w", package], MODULE, {"GOBIN": scratch})
                os.replace(pathlib.Path(scratch) / name, target)
    return target


def cannot_have(name: str) -> str | None:
    """Why there can be no helm or kwok here, in one line, or nothing."""
    version = TOOLS[name].rpartition("@")[2]
    there = _kept(name).exists() or _installed(name, version) or go_version()
    return None if there else f"there is no {name}, and no Go to build it with: install one of them"


def not_fetched(what: str) -> str | None:
    """Why the last build of a tool, or of the programs of a cluster, could not have its modules, in one line, unless it is there."""
    if what not in TOOLS:
        target = None if os.environ.get("KUBEBUILDER_ASSETS") else cache() / digest()
    else:
        target = None if _installed(what, TOOLS[what].rpartition("@")[2]) else _kept(what)
    if target is None or target.exists() or not (note := _note(target)).exists():
        return None
    again = f"build {what}" if what in TOOLS else "build"
    return f"{note.read_text().strip()} (`e2e/cluster/cluster {again}` tries again)"


def _kept(name: str) -> pathlib.Path:
    """Where a tool of the pinned version is once it is built."""
    return cache() / "tools" / f"{name}-{TOOLS[name].rpartition('@')[2]}"


def _note(target: pathlib.Path) -> pathlib.Path:
    return target.with_name(f"{target.name}.not-fetched")


@contextlib.contextmanager
def _noted(target: pathlib.Path) -> Iterator[None]:
    """Keeps why the modules of what is built there could not be had, for `not_fetched`."""
    try:
        yield
    except NotFetched as error:
        _note(target).write_text(f"{error}\n")
        raise
    _note(target).unlink(missing_ok=True)


def _installed(name: str, version: str) -> pathlib.Path | None:
    """helm in PATH, if its major version is the pinned one; any where there is no Go to build that with."""
    found = shutil.which(name) if name == "helm" else None
    if found is None:
        return None
    said = subprocess.run([found, "version", "--short"], capture_output=True, text=True, check=False)
    major = version.partition(".")[0] + "."
    fits = said.returncode == 0 and said.stdout.startswith(major)
    return pathlib.Path(found).resolve() if fits or go_version() is None else None


def go_version() -> str | None:
    """`go1.26.8`, or nothing where there is no Go that the module can be built with."""
    go = shutil.which("go")
    if go is None:
        return None
    said = subprocess.run([go, "env", "GOVERSION"], capture_output=True, text=True, check=False)
    return said.stdout.strip() if said.returncode == 0 else None


def digest() -> str:
    """Of the module's files and of the Go that would build them."""
    seen = hashlib.sha256((go_version() or "none").encode())
    for file in sorted(MODULE.rglob("*")):
        if file.is_file():
            seen.update(f"\0{file.relative_to(MODULE)}\0".encode() + file.read_bytes())
    return seen.hexdigest()[:16]


def kubernetes_version() -> str:
    """The version that go.mod asks for, as the binaries are to report it."""
    found = re.search(r"k8s\.io/kubernetes (v\d+\.\d+\.\d+)", (MODULE / "go.mod").read_text())
    if not found:
        raise ClusterError(f"{MODULE}/go.mod names no version of k8s.io/kubernetes")
    return found.group(1)


def _given() -> Programs | None:
    """KUBEBUILDER_ASSETS: what every developer of operators has; it has no controller-manager and no scheduler."""
    named = os.environ.get("KUBEBUILDER_ASSETS")
    if not named:
        return None
    folder = pathlib.Path(named).resolve()
    for name in ("etcd", "kube-apiserver", "kubectl"):
        if not os.access(folder / name, os.X_OK):
            raise ClusterError(f"KUBEBUILDER_ASSETS={named} has no {name}: point it at a folder that has, or unset it")
    return Programs(folder, tuple(name for name in SERVERS if not os.access(folder / name, os.X_OK)))


def _built(tell) -> pathlib.Path:
    if go_version() is None:
        raise ClusterError("the cluster's programs are built with Go 1.26: install it, or set KUBEBUILDER_ASSETS")
    home = cache() / digest()
    with _lock(cache() / ".build.lock"):
        if not home.exists():
            tell("building Kubernetes from its Go modules (7 minutes on two cores, once)")
            with _noted(home), tempfile.TemporaryDirectory(dir=cache()) as scratch:
                bin = pathlib.Path(scratch) / "made" / "bin"
                bin.mkdir(parents=True)
                _build_into(bin)
                os.replace(bin.parent, home)
    return home / "bin"


def _build_into(bin: pathlib.Path) -> None:
    version = kubernetes_version()
    major, minor, _ = version.removeprefix("v").split(".")
    stamp = "k8s.io/component-base/version"
    flags = f"-s -w -X {stamp}.gitVersion={version} -X {stamp}.gitMajor={major} -X {stamp}.gitMinor={minor}"
    _go(["build", "-trimpath", "-ldflags", flags, "-o", str(bin / "kubernetes"), "."], MODULE, {})
    _go(["build", "-trimpath", "-ldflags", "-s -w", "-o", str(bin / "pause"), "./pause"], MODULE, {})
    for name in SERVERS:
        (bin / name).symlink_to("kubernetes")


def _go(arguments: list[str], folder: pathlib.Path, more: dict[str, str]) -> None:
    """Runs Go, and again where it could not fetch something: it keeps what has come."""
    # Another Go than the one that is here is not fetched: what a digest names is what built it.
    environment = os.environ | {"CGO_ENABLED": "0", "GOTOOLCHAIN": "local", "GOFLAGS": "-mod=readonly -buildvcs=false"} | more
    for tries in range(1, TRIES + 1):
        done = subprocess.run(["go", *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False)
        said = done.stderr.strip()
        if done.returncode == 0:
            return
        if not UNFETCHED.search(said) or REFUSED.search(said):
            raise ClusterError(f"go {arguments[0]} in {folder} failed:\n{said[-2000:]}")
        if tries < TRIES:
            time.sleep(PAUSE_SECONDS)
    lines = [line.strip() for line in said.splitlines() if UNFETCHED.search(line)]
    raise NotFetched(f"go {arguments[0]} could not fetch its modules in {TRIES} tries, let GOPROXY name a proxy that has them: {lines[-1][-500:]}")


class _lock:
    """One build at a time, whoever asks: a second one waits and finds it done."""

    def __init__(self, path: pathlib.Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = path.open("w")

    def __enter__(self):
        fcntl.flock(self.file, fcntl.LOCK_EX)

    def __exit__(self, *_):
        self.file.close()
