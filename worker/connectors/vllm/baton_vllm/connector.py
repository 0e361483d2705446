"""The connector as vLLM calls it. Pinned to the interface of vLLM 0.32 and 0.33 (`kv_connector/v1/base.py`)."""

import os
from typing import TYPE_CHECKING, Any, Final

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, UniformTypeKVCacheSpecs
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.request import RequestStatus

from .layout import BlockLayout
from .metadata import BatonMetadata
from .scheduler import OPEN_WAIT, SchedulerSide
from .worker import WorkerSide

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

OPEN_WAIT_VARIABLE: Final = "BATON_OPEN_WAIT_SECONDS"
"""Of the environment: what Baton starts a server with leaves `open_wait_seconds` to it."""


class BatonConnector(KVConnectorBase_V1):
    """Hands KV over through the Baton daemon beside this engine, which leases, checks and moves it."""

    _cache_hit_source = CacheHitSource.P2P

    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        _check(vllm_config, kv_cache_config)
        transfer = self._kv_transfer_config
        path = transfer.get_from_extra_config("socket", None)
        if not path:
            raise ValueError("kv_connector_extra_config.socket: absent: give the path of the Baton daemon's connector socket")
        self._path = str(path)
        open_wait = _open_wait(transfer)
        self._engine = str(transfer.engine_id)
        self._worker: WorkerSide | None = None
        self._scheduler: SchedulerSide | None = None
        if role is KVConnectorRole.SCHEDULER:
            block_size = vllm_config.cache_config.block_size
            produces, consumes = transfer.is_kv_producer, transfer.is_kv_consumer
            self._scheduler = SchedulerSide(self._path, block_size, self._engine, produces, consumes, open_wait)
            self._scheduler.start()

    # ---- In the worker ----------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        cache = self._vllm_config.cache_config
        backend = {
            "vllm": vllm.__version__,
            "layout": str(self._kv_cache_config.kv_cache_layout),
            "cacheDtype": str(cache.cache_dtype),
            "device": next(iter(kv_caches.values())).device.type if kv_caches else "none",
        }
        layout = BlockLayout(kv_caches, self._kv_cache_config.num_blocks, cache.block_size, backend)
        self._worker = WorkerSide(self._path, layout, self._engine, vllm.__version__)
        self._worker.start()

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        if (worker := self._worker) is not None:
            worker.begin_loads(self._metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are done before their requests are scheduled."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: "AttentionMetadata", **kwargs: Any) -> None:
        """Blocks are copied whole, after the step that completes them."""

    def wait_for_save(self) -> None:
        if (worker := self._worker) is not None:
            worker.computed(self._metadata())

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        if (worker := self._worker) is not None and isinstance(kv_connector_metadata, BatonMetadata):
            worker.drop(kv_connector_metadata)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if (worker := self._worker) is None:
            return None, None
        return worker.results(finished_req_ids)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.bad_blocks() if self._worker is not None else set()

    def shutdown(self) -> None:
        for side in (self._worker, self._scheduler):
            if side is not None:
                side.stop()

    # ---- In the scheduler -------------------------------------------------------------------------------------------

    def on_new_request(self, request: "Request") -> None:
        if self._scheduler is not None:
            self._scheduler.arrived(request)

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        assert self._scheduler is not None
        return self._scheduler.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        assert self._scheduler is not None
        self._scheduler.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        assert self._scheduler is not None
        return self._scheduler.step(scheduler_output)

    def request_finished(self, request: "Request", block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        assert self._scheduler is not None
        whole = request.status in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
        return self._scheduler.finished(request, whole)

    def reset_cache(self) -> bool | None:
        return self._scheduler.reset() if self._scheduler is not None else None

    def _metadata(self) -> BatonMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, BatonMetadata)
        return metadata


def _open_wait(transfer: "KVTransferConfig") -> float:
    """For how many seconds a prompt waits for its lease: as the configuration says, else as the environment does."""
    field, said = "kv_connector_extra_config.open_wait_seconds", transfer.get_from_extra_config("open_wait_seconds", None)
    if said is None:
        field, said = OPEN_WAIT_VARIABLE, os.environ.get(OPEN_WAIT_VARIABLE)
    if said is None:
        return OPEN_WAIT
    try:
        # To Python, true is one.
        seconds = 0.0 if isinstance(said, bool) else float(said)
    except (TypeError, ValueError, OverflowError):
        seconds = 0.0
    if not 0.0 < seconds < float("inf"):
        raise ValueError(f"{field}: {said!r}: give a number of seconds greater than zero, or leave it out for {OPEN_WAIT}")
    return seconds


def _check(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> None:
    """Says what this connector cannot do, at the start and by name."""
    parallel = vllm_config.parallel_config
    for field, value in (
        ("tensor_parallel_size", parallel.tensor_parallel_size),
        ("pipeline_parallel_size", parallel.pipeline_parallel_size),
        ("data_parallel_size", parallel.data_parallel_size),
    ):
        if value != 1:
            raise ValueError(f"{field} is {value}: BatonConnector hands over the KV of one worker; use NixlConnector for more")
    groups = kv_cache_config.kv_cache_groups
    if len(groups) > 1:
        raise ValueError(
            f"the model has {len(groups)} groups of KV cache: BatonConnector hands over one; set --disable-hybrid-kv-cache-manager"
        )
    for group in groups:
        spec = group.kv_cache_spec
        specs = spec.kv_cache_specs if isinstance(spec, UniformTypeKVCacheSpecs) else dict.fromkeys(group.layer_names[:1], spec)
        for layer, spec in specs.items():
            # By their very type: what derives from them keeps other blocks, or for a shorter time.
            if type(spec) not in (FullAttentionSpec, MLAAttentionSpec):
                raise ValueError(
                    f"{layer}: its KV cache is a {type(spec).__name__}, whose blocks do not hold the KV of every token of a prompt: "
                    "BatonConnector hands over FullAttentionSpec and MLAAttentionSpec; use NixlConnector, or no connector"
                )
