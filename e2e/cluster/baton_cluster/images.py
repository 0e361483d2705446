"""Images that only a test's cluster has, each of one program: made as Baton's own are, without a container engine."""

import pathlib
import sys

from .failure import ClusterError
from .layout import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "images"))

from baton_images import linkage, recipes  # noqa: E402
from baton_images.archive import Image  # noqa: E402
from baton_images.failure import ImageError  # noqa: E402
from baton_images.layer import Layer  # noqa: E402


def static(name: str, program: pathlib.Path, inside: str, target: pathlib.Path) -> None:
    """Of a program that is linked to nothing; `inside` is its path in the image, whose entrypoint it is."""
    _write(name, program.read_bytes(), inside, [], target)


def linked(name: str, program: pathlib.Path, inside: str, target: pathlib.Path) -> None:
    """The same with the libraries that the program is linked to. Its user is root, as an engine's image often has it."""
    if reason := linkage.cannot():
        raise ClusterError(reason)
    try:
        lower = [("libraries that the program is linked to", recipes.base(program))]
        _write(name, linkage.stripped(program), inside, lower, target)
    except ImageError as error:
        raise ClusterError(str(error)) from error


def _write(name: str, content: bytes, inside: str, lower: list[tuple[str, Layer]], target: pathlib.Path) -> None:
    layer = Layer()
    layer.file(inside, content, 0o755)
    path = {"PATH": inside.rpartition("/")[0] or "/"}
    Image(name, recipes.architecture(), [inside], [*lower, (inside, layer)], environment=path).write(target)
