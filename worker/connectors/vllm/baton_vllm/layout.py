"""How the bytes of a block lie: the one order in which both ends of a hand-off write and read them.

A block is, for each attention layer in the order of the model, the block's part of that layer's cache tensor, element by element in the
tensor's index order (the last index runs fastest), whatever the strides of the tensor are. What the indices of a layer mean is the
attention backend's affair, so the digest holds the backend, its layout and vLLM's version, and only equal ones are paired.
"""

import hashlib
import json
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

LAYOUT_VERSION: Final = 1


class LayoutError(ValueError):
    """These caches cannot be handed over block by block."""


def _number(name: str) -> tuple[int, str]:
    """Layers by their number in the model, then by name."""
    numbers = re.findall(r"(?:^|\.)(\d+)(?:\.|$)", name)
    return (int(numbers[0]) if numbers else -1, name)


@dataclass(frozen=True)
class _Layer:
    name: str
    cache: torch.Tensor
    rows: int
    """Rows of the tensor for one block: a backend's kernel may cut a block into several."""

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.rows, *self.cache.shape[1:]))

    @property
    def bytes(self) -> int:
        return self.shape.numel() * self.cache.element_size()

    def block(self, block: int) -> torch.Tensor:
        return self.cache[block * self.rows : (block + 1) * self.rows]


class BlockLayout:
    """Copies blocks between the engine's caches and bytes."""

    def __init__(self, caches: Mapping[str, torch.Tensor], blocks: int, block_size: int, backend: Mapping[str, Any]) -> None:
        """`caches` as vLLM registers them, `blocks` in the pool, `block_size` in tokens; `backend` says what else must be equal."""
        if not caches:
            raise LayoutError("the model has no KV cache: nothing can be handed over")
        self.block_size = block_size
        self.device = next(iter(caches.values())).device
        self._layers = [self._layer(name, caches[name], blocks) for name in sorted(caches, key=_number)]
        self.block_bytes = sum(layer.bytes for layer in self._layers)
        self._backend = dict(backend)

    @staticmethod
    def _layer(name: str, cache: torch.Tensor, blocks: int) -> _Layer:
        if not isinstance(cache, torch.Tensor):
            raise LayoutError(f"{name}: the cache is a {type(cache).__name__}, only layers of one tensor are handed over")
        if blocks == 0 or cache.shape[0] % blocks:
            raise LayoutError(f"{name}: the cache has {cache.shape[0]} rows for {blocks} blocks: blocks are not its first index")
        return _Layer(name, cache, cache.shape[0] // blocks)

    def description(self) -> dict[str, Any]:
        """All that two ends must have in common."""
        layers = [{"name": layer.name, "shape": list(layer.shape), "dtype": str(layer.cache.dtype)} for layer in self._layers]
        return {"version": LAYOUT_VERSION, "blockSize": self.block_size, "backend": self._backend, "layers": layers}

    def digest(self) -> str:
        """SHA-256 of the description, in hexadecimal digits."""
        text = json.dumps(self.description(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def read(self, block: int, target: memoryview) -> None:
        """The bytes of a block. From a device's memory too: `copy_` waits for the host's copy."""
        for layer, part in self._parts(torch.frombuffer(target, dtype=torch.uint8)):
            part.copy_(layer.block(block))

    def write(self, block: int, source: memoryview) -> None:
        """Gives a block these bytes."""
        with warnings.catch_warnings():
            # Of memory that cannot be written, once in a process: nobody does.
            warnings.simplefilter("ignore")
            data = torch.frombuffer(source, dtype=torch.uint8)
        for layer, part in self._parts(data):
            layer.block(block).copy_(part)

    def _parts(self, data: torch.Tensor):
        if data.numel() != self.block_bytes:
            raise LayoutError(f"a block has {self.block_bytes} bytes, not {data.numel()}")
        begin = 0
        for layer in self._layers:
            part = data[begin : begin + layer.bytes]
            begin += layer.bytes
            yield layer, part.view(layer.cache.dtype).view(layer.shape)

