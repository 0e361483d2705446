"""What the scheduler's half tells the worker's half with each step."""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata


@dataclass
class Publish:
    """Blocks of a prompt that are computed when the step is."""

    request: str
    blocks: list[tuple[int, int]]
    """(index in the prompt, block of the engine), in the order of the prompt."""
    last: bool
    """The prompt ends with these."""


@dataclass
class Load:
    """Blocks that wait for KV computed elsewhere."""

    request: str
    first: int
    """Index in the prompt of the first of `blocks`."""
    blocks: list[int]


@dataclass
class BatonMetadata(KVConnectorMetadata):
    """Of one step."""

    publish: list[Publish] = field(default_factory=list)
    load: list[Load] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    """Requests whose blocks are not copied any more: they will be overwritten."""
