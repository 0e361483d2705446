"""Licences of the Rust code that a binary is linked with: the texts that the crates carry, each once, and whose each is.

One text file by crate name, in which the same sources always give the same bytes. Crates that run only while a binary is built
(build scripts, procedural macros) are not in it, and not in the file.
"""

import json
import pathlib
import re
import shutil
import subprocess

from .failure import ImageError

# What crates call such files, at their root and beside code of others that they carry along.
NAMES = re.compile(r"(licen[cs]e|notice|copying|copyright|unlicense|authors|patents)", re.IGNORECASE)
TEXTS = {"", ".txt", ".md", ".rst"} | {f".{name}" for name in ("mit", "apache", "apache2", "bsd", "zlib", "boost", "cc0")}
# `LICENSE-APACHE-2.0` has a suffix by accident.
VERSIONS = re.compile(r"\.\d+")


def cannot() -> str | None:
    """Why licences cannot be gathered on this machine, or nothing."""
    return None if shutil.which("cargo") else "cargo is missing: the licences of linked crates are read from their sources"


def licences(repository: pathlib.Path, crate: str) -> bytes:
    """Of everything that the binaries of this crate of the workspace are linked with, the standard library too."""
    metadata = json.loads(_run(["cargo", "metadata", "--locked", "--format-version=1", f"--filter-platform={_host()}"], repository))
    linked = _linked(metadata, crate)
    found = {f"{package['name']} {package['version']}": _texts(pathlib.Path(package["manifest_path"]).parent) for package in linked}
    numbers: dict[str, int] = {}
    for texts in found.values():
        for text in texts.values():
            numbers.setdefault(text, len(numbers) + 1)
    lines = [f"Rust crates in {crate}: name, version, licence, and where it is from; then the numbers of the texts below that it comes with.", ""]
    for package in linked:
        name = f"{package['name']} {package['version']}"
        lines.append(f"{name}: {package['license'] or 'see its texts'}; {package['repository'] or package['homepage'] or package['source']}")
        texts = ", ".join(f"{numbers[text]} ({file})" for file, text in found[name].items())
        by = "".join(f"; by {author}" for author in package["authors"])
        lines.append(f"    {texts or 'the package carries no text of its licence' + by}")
    for text, number in numbers.items():
        lines += ["", f"==== text {number} ====", "", text]
    return ("\n".join(lines) + "\n").encode()


def standard_library() -> bytes:
    """Copyright notices of Rust's standard library, as its compiler comes with them."""
    path = pathlib.Path(_run(["rustc", "--print=sysroot"]).strip()) / "share" / "doc" / "rust" / "COPYRIGHT-library.html"
    if not path.is_file():
        raise ImageError(f"{path} is missing: build with a compiler of rustup, which comes with it")
    return path.read_bytes()


def _linked(metadata: dict, crate: str) -> list[dict]:
    """Packages from elsewhere that this one is linked with, by name and version."""
    packages = {package["id"]: package for package in metadata["packages"]}
    nodes = {node["id"]: node for node in metadata["resolve"]["nodes"]}
    own = [id for id in metadata["workspace_members"] if packages[id]["name"] == crate]
    if not own:
        raise ImageError(f"the workspace has no crate {crate}")
    seen, left = set(), own
    while left:
        id = left.pop()
        if id in seen or any("proc-macro" in target["kind"] for target in packages[id]["targets"]):
            continue
        seen.add(id)
        left += [one["pkg"] for one in nodes[id]["deps"] if any(kind["kind"] is None for kind in one["dep_kinds"])]
    foreign = [packages[id] for id in seen if packages[id]["source"]]
    return sorted(foreign, key=lambda package: (package["name"], package["version"]))


def _texts(folder: pathlib.Path) -> dict[str, str]:
    """By file, in order."""
    files = [file for file in folder.rglob("*") if file.is_file() and _is_licence(file)]
    read = {str(file.relative_to(folder)): file.read_text("utf-8", "replace") for file in files}
    return {name: "\n".join(line.rstrip() for line in read[name].splitlines()).strip("\n") for name in sorted(read)}


def _is_licence(file: pathlib.Path) -> bool:
    """By its own name, or by that of the folder that it is in."""
    named = any(NAMES.match(name.lstrip(".")) for name in (file.name, file.parent.name))
    return named and (file.suffix.lower() in TEXTS or VERSIONS.fullmatch(file.suffix) is not None)


def _host() -> str:
    found = re.search(r"^host: (\S+)$", _run(["rustc", "--version", "--verbose"]), re.MULTILINE)
    if not found:
        raise ImageError("rustc --version --verbose names no host")
    return found.group(1)


def _run(command: list[str], folder: pathlib.Path | None = None) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ImageError(f"{' '.join(command)}: {done.stderr.strip()[-500:]}")
    return done.stdout
