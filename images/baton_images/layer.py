"""One layer of an image: a tar whose bytes depend on names, modes and contents of its files and on nothing else."""

import io
import tarfile
from dataclasses import dataclass, field


@dataclass
class Layer:
    """Files, links and folders by absolute path; what lies between them is made when the tar is written."""

    files: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    folders: dict[str, int] = field(default_factory=dict)

    def file(self, path: str, content: bytes, mode: int = 0o644) -> None:
        self.files[_relative(path)] = (mode, content)

    def link(self, path: str, target: str) -> None:
        self.links[_relative(path)] = target

    def folder(self, path: str, mode: int = 0o755) -> None:
        self.folders[_relative(path)] = mode

    def tar(self) -> bytes:
        """Entries sorted, times zero, owner root: uncompressed, because compressors differ from one version to the next."""
        folders = dict(self.folders)
        for path in [*self.files, *self.links, *self.folders]:
            while path := path.rpartition("/")[0]:
                if path not in self.links:
                    folders.setdefault(path, 0o755)
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
            for path in sorted({*folders, *self.files, *self.links}):
                entry = tarfile.TarInfo(path)
                if path in self.files:
                    entry.mode, content = self.files[path]
                    entry.size = len(content)
                    archive.addfile(entry, io.BytesIO(content))
                elif path in self.links:
                    entry.type, entry.mode, entry.linkname = tarfile.SYMTYPE, 0o777, self.links[path]
                    archive.addfile(entry)
                else:
                    entry.type, entry.mode = tarfile.DIRTYPE, folders[path]
                    archive.addfile(entry)
        return out.getvalue()


def _relative(path: str) -> str:
    if not path.startswith("/") or path != path.rstrip("/") or ".." in path.split("/"):
        raise ValueError(f"{path!r} is no absolute path in an image")
    return path[1:]
