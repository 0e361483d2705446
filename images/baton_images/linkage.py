"""What a binary needs beside itself: the loader and the libraries that it is linked to, and their licences."""

import pathlib
import re
import shutil
import subprocess
import tempfile

from .failure import ImageError


def cannot() -> str | None:
    """Why no image can be made on this machine, or nothing."""
    for program, why in (("dpkg", "licences are read from Debian's packages"), ("ldd", "install libc-bin"), ("strip", "install binutils")):
        if shutil.which(program) is None:
            return f"{program} is missing: {why}"
    return None


def stripped(binary: pathlib.Path) -> bytes:
    """The binary without symbols and debug information; the file itself stays as it is."""
    with tempfile.TemporaryDirectory() as scratch:
        copy = pathlib.Path(scratch) / binary.name
        _run(["strip", "--strip-all", "-o", str(copy), str(binary)])
        return copy.read_bytes()


def libraries(binary: pathlib.Path) -> dict[str, pathlib.Path]:
    """By the path at which the loader looks for each, the file to put there. Empty for a static binary."""
    said = subprocess.run(["ldd", str(binary)], capture_output=True, text=True, check=False)
    if "not a dynamic executable" in said.stdout + said.stderr or "statically linked" in said.stdout:
        return {}
    if said.returncode != 0:
        raise ImageError(f"ldd {binary}: {said.stderr.strip()}")
    found = {}
    for line in said.stdout.splitlines():
        if "not found" in line:
            raise ImageError(f"{binary.name} is linked to {line.split()[0]}, which is not on this machine")
        # `libc.so.6 => /lib/…/libc.so.6 (0x…)`, or the loader alone: `/lib64/ld-linux-x86-64.so.2 (0x…)`. The vdso has no path.
        if path := re.search(r"(/\S+) \(0x", line):
            found[path.group(1)] = pathlib.Path(path.group(1)).resolve()
    return found


def licences(files: list[pathlib.Path]) -> dict[str, bytes]:
    """The copyright files of the Debian packages that these files are from, by the path at which Debian keeps them."""
    packages = set()
    for file in files:
        # Packages name /lib/…, also where that is a link to /usr/lib.
        for name in (str(file), str(file).removeprefix("/usr")):
            said = subprocess.run(["dpkg", "-S", name], capture_output=True, text=True, check=False)
            if said.returncode == 0:
                packages.add(said.stdout.partition(":")[0])
                break
        else:
            raise ImageError(f"{file} is from no Debian package, so its licence is not known")
    kept = {}
    for package in sorted(packages):
        path = pathlib.Path("/usr/share/doc") / package / "copyright"
        if not path.is_file():
            raise ImageError(f"{path} is missing: an image is not made without the licences of what is in it")
        kept[str(path)] = path.read_bytes()
    return kept


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ImageError(f"{' '.join(command)}: {done.stderr.strip()}")
