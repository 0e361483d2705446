"""What the connector refuses at the start, by the classes of vLLM itself."""

import unittest
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from baton_vllm.connector import BatonConnector, _check

ABOUT = {"block_size": 16, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}


@dataclass(frozen=True, kw_only=True)
class LaterSpec(FullAttentionSpec):
    """Of a vLLM to come: full attention in name."""


def check(*specs: Any, **parallel: int) -> None:
    sizes = {f"{kind}_parallel_size": 1 for kind in ("tensor", "pipeline", "data")} | parallel
    groups = [KVCacheGroupSpec([f"layers.{number}"], spec) for number, spec in enumerate(specs)]
    _check(SimpleNamespace(parallel_config=SimpleNamespace(**sizes)), SimpleNamespace(kv_cache_groups=groups))


class Check(unittest.TestCase):
    def test_blocks_of_every_token_are_handed_over(self) -> None:
        check(FullAttentionSpec(**ABOUT))
        check(MLAAttentionSpec(**ABOUT))
        # The window is the kernel's: without the hybrid manager the blocks of all tokens are kept.
        check(FullAttentionSpec(**ABOUT, sliding_window=64))
        specs = {"layers.0": FullAttentionSpec(**ABOUT), "layers.1": FullAttentionSpec(**ABOUT | {"head_size": 16})}
        check(UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=specs))

    def test_a_window_of_blocks_is_refused_by_name(self) -> None:
        window = SlidingWindowSpec(**ABOUT, sliding_window=64)
        with self.assertRaisesRegex(ValueError, "layers.0.*SlidingWindowSpec"):
            check(window)
        with self.assertRaisesRegex(ValueError, "layers.7.*SlidingWindowSpec"):
            check(UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"layers.7": window}))

    def test_what_is_not_known_is_refused_by_name(self) -> None:
        with self.assertRaisesRegex(ValueError, "LaterSpec"):
            check(LaterSpec(**ABOUT))

    def test_more_than_one_worker_or_group_is_refused_by_name(self) -> None:
        with self.assertRaisesRegex(ValueError, "tensor_parallel_size is 2"):
            check(FullAttentionSpec(**ABOUT), tensor_parallel_size=2)
        with self.assertRaisesRegex(ValueError, "2 groups"):
            check(FullAttentionSpec(**ABOUT), FullAttentionSpec(**ABOUT))


class Reset(unittest.TestCase):
    def test_a_reset_reaches_the_half_that_knows_of_prompts(self) -> None:
        connector = object.__new__(BatonConnector)
        connector._scheduler = SimpleNamespace(reset=lambda: True)
        self.assertIs(connector.reset_cache(), True)
        connector._scheduler = None
        self.assertIsNone(connector.reset_cache())


if __name__ == "__main__":
    unittest.main()
