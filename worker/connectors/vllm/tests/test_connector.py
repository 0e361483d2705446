"""What the connector refuses at the start, by the classes of vLLM itself, and what it reads of its configuration."""

import os
import unittest
import unittest.mock
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

from baton_vllm.connector import OPEN_WAIT_VARIABLE, BatonConnector, _check, _open_wait
from baton_vllm.scheduler import OPEN_WAIT

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


def open_wait(said: Any, variable: str | None = None) -> float:
    extra = {} if said is None else {"open_wait_seconds": said}
    with unittest.mock.patch.dict(os.environ, {} if variable is None else {OPEN_WAIT_VARIABLE: variable}):
        if variable is None:
            os.environ.pop(OPEN_WAIT_VARIABLE, None)
        return _open_wait(SimpleNamespace(get_from_extra_config=extra.get))


class OpenWait(unittest.TestCase):
    def test_the_configuration_goes_before_the_environment_and_both_before_the_default(self) -> None:
        self.assertEqual(open_wait(None), OPEN_WAIT)
        self.assertEqual(open_wait(None, "30"), 30.0)
        self.assertEqual(open_wait(2, "30"), 2.0)
        self.assertEqual(open_wait(0.25), 0.25)

    def test_what_is_no_number_greater_than_zero_is_refused_by_name(self) -> None:
        for said in (0, -1, True, "soon", [1], float("nan"), float("inf"), 10**400):
            with self.assertRaisesRegex(ValueError, "^kv_connector_extra_config.open_wait_seconds: .*: give a number"):
                open_wait(said, "30")
        for variable in ("", "0", "-1", "soon", "nan", "inf"):
            with self.assertRaisesRegex(ValueError, "^BATON_OPEN_WAIT_SECONDS: .*: give a number"):
                open_wait(None, variable)


class Reset(unittest.TestCase):
    def test_a_reset_reaches_the_half_that_knows_of_prompts(self) -> None:
        connector = object.__new__(BatonConnector)
        connector._scheduler = SimpleNamespace(reset=lambda: True)
        self.assertIs(connector.reset_cache(), True)
        connector._scheduler = None
        self.assertIsNone(connector.reset_cache())


if __name__ == "__main__":
    unittest.main()
