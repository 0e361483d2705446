"""Memory shared with the daemon: the inbox that this process fills, and the daemon's arena, which it reads.

Both have the shape of `worker/src/transport/memory.rs`: 64 bytes of header for each piece, then, from the begin of a page, the pieces
at multiples of 64 bytes. The headers of an inbox stay zero. Neither side maps the other's memory writable.
"""

import fcntl
import mmap
import os
from dataclasses import dataclass
from typing import Final

ALIGNMENT: Final = 64
PAGE: Final = 4096
HEADER: Final = 64


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class Shape:
    """How pieces lie in a file."""

    pieces: int
    piece_bytes: int

    @property
    def stride(self) -> int:
        """Bytes from one piece to the next."""
        return _up(self.piece_bytes, ALIGNMENT)

    @property
    def total(self) -> int:
        """Bytes of the file."""
        return _up(self._begin + self.stride * self.pieces, PAGE)

    @property
    def _begin(self) -> int:
        return _up(HEADER * self.pieces, PAGE)

    def at(self, index: int) -> int:
        """Where a piece begins."""
        if not 0 <= index < self.pieces:
            raise IndexError(f"piece {index} of {self.pieces}")
        return self._begin + index * self.stride


class Shared:
    """Pieces of a mapped file."""

    def __init__(self, file: int, shape: Shape, writable: bool) -> None:
        """Takes over the file descriptor."""
        self.file = file
        self.shape = shape
        try:
            size = os.fstat(file).st_size
            if size < shape.total:
                raise ValueError(f"the shared memory has {size} bytes, {shape.total} are needed")
            protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
            self._map = mmap.mmap(file, shape.total, flags=mmap.MAP_SHARED, prot=protection)
        except BaseException:
            os.close(file)
            raise
        self._view = memoryview(self._map)

    @classmethod
    def inbox(cls, shape: Shape) -> "Shared":
        """New memory that only this process writes. Sealed, so that the daemon does not die on memory that was taken away."""
        file = os.memfd_create("baton-inbox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(file, shape.total)
        except BaseException:
            os.close(file)
            raise
        inbox = cls(file, shape, writable=True)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
        return inbox

    def piece(self, index: int) -> memoryview:
        """The bytes of a piece; writable in an inbox only."""
        begin = self.shape.at(index)
        return self._view[begin : begin + self.shape.piece_bytes]

    def close(self) -> None:
        """Closes the file. Pages go with the last tensor that looks at them."""
        os.close(self.file)
