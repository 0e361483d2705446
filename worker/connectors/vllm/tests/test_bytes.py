"""Frames, shared memory and the order of bytes in a block."""

import mmap
import os
import unittest
import unittest.mock

import torch

from baton_vllm.layout import BlockLayout, LayoutError
from baton_vllm.memory import Shape, Shared
from baton_vllm.wire import LONGEST_FRAME, Decoder, ProtocolError, encode


class Frames(unittest.TestCase):
    def test_messages_survive_any_cut(self) -> None:
        messages = [{"type": "a", "x": 1}, {"type": "b", "text": "é水"}, {"type": "c"}]
        data = b"".join(map(encode, messages))
        for cut in range(len(data) + 1):
            decoder = Decoder()
            self.assertEqual(decoder.feed(data[:cut]) + decoder.feed(data[cut:]), messages)

    def test_what_is_no_message_is_refused(self) -> None:
        for data in (b"\xff\xff\xff\xff", b"\x02\0\0\0[]", b"\x02\0\0\0{}", b"\x01\0\0\0x"):
            with self.assertRaises(ProtocolError):
                Decoder().feed(data)
        with self.assertRaises(ProtocolError):
            encode({"type": "open", "tokens": "x" * LONGEST_FRAME})


class Memory(unittest.TestCase):
    def test_a_shape_is_that_of_the_daemon(self) -> None:
        # As `worker/src/transport/memory.rs` tests it.
        self.assertEqual(Shape(65, 100).at(64), 8192 + 64 * 128)
        self.assertRaises(IndexError, Shape(65, 100).at, 65)
        self.assertEqual(Shape(3, 100).total, 8192)

    def test_an_inbox_cannot_shrink_and_its_pieces_are_apart(self) -> None:
        inbox = Shared.inbox(Shape(3, 100))
        inbox.piece(1)[:] = b"\x07" * 100
        self.assertEqual(bytes(inbox.piece(0)) + bytes(inbox.piece(2)), bytes(200))
        self.assertRaises(OSError, os.ftruncate, inbox.file, 0)
        reader = Shared(os.dup(inbox.file), inbox.shape, writable=False)
        self.assertEqual(bytes(reader.piece(1)), b"\x07" * 100)
        with self.assertRaises(TypeError):
            reader.piece(1)[0] = 1
        self.assertRaises(ValueError, Shared, os.dup(inbox.file), Shape(3, 10 * mmap.PAGESIZE), False)

    def test_a_file_that_cannot_be_mapped_is_closed(self) -> None:
        closed: list[int] = []
        with (
            unittest.mock.patch("baton_vllm.memory.mmap.mmap", side_effect=OSError("no memory")),
            unittest.mock.patch("baton_vllm.memory.os.close", closed.append),
        ):
            self.assertRaises(OSError, Shared.inbox, Shape(3, 100))
        self.assertEqual(len(closed), 1)
        os.close(closed[0])


def caches(blocks: int = 5, layers: int = 12) -> dict[str, torch.Tensor]:
    # In an order that is not that of the model, and with strides as of a cache that interleaves layers.
    made = {}
    for number in reversed(range(layers)):
        whole = torch.arange(blocks * 2 * 2 * 4 * 3, dtype=torch.float32).reshape(blocks, 2, 2, 4, 3) + 1000 * number
        made[f"model.layers.{number}.self_attn.attn"] = whole[:, number % 2].to(torch.bfloat16)
    return made


class Layout(unittest.TestCase):
    def test_a_block_is_read_and_written_whole(self) -> None:
        source = BlockLayout(caches(), 5, 4, {})
        empty = {name: torch.zeros_like(cache) for name, cache in caches().items()}
        target = BlockLayout(empty, 5, 4, {})
        self.assertEqual(source.block_bytes, 12 * 2 * 4 * 3 * 2)
        data = bytearray(source.block_bytes)
        source.read(3, memoryview(data))
        target.write(1, memoryview(bytes(data)))
        for name, cache in caches().items():
            self.assertTrue(torch.equal(empty[name][1], cache[3]), name)
            self.assertEqual(float(empty[name][0].abs().sum() + empty[name][2:].abs().sum()), 0.0)

    def test_layers_follow_the_model(self) -> None:
        names = [layer["name"] for layer in BlockLayout(caches(), 5, 4, {}).description()["layers"]]
        self.assertEqual(names, [f"model.layers.{number}.self_attn.attn" for number in range(12)])

    def test_what_differs_has_another_digest(self) -> None:
        digest = BlockLayout(caches(), 5, 4, {"vllm": "1"}).digest()
        self.assertEqual(digest, BlockLayout(caches(blocks=6), 6, 4, {"vllm": "1"}).digest(), "not of the number of blocks")
        others = (
            BlockLayout(caches(), 5, 4, {"vllm": "2"}),
            BlockLayout(caches(layers=11), 5, 4, {"vllm": "1"}),
            BlockLayout({name: cache.float() for name, cache in caches().items()}, 5, 4, {"vllm": "1"}),
        )
        self.assertEqual(len({digest, *(other.digest() for other in others)}), 4)

    def test_a_block_may_be_several_rows(self) -> None:
        cache = torch.arange(10 * 3, dtype=torch.int32).reshape(10, 3)
        layout = BlockLayout({"layers.0": cache}, 5, 2, {})
        data = bytearray(layout.block_bytes)
        layout.read(4, memoryview(data))
        self.assertEqual(torch.frombuffer(data, dtype=torch.int32).tolist(), list(range(24, 30)))

    def test_caches_that_have_no_blocks_are_named(self) -> None:
        with self.assertRaisesRegex(LayoutError, "layers.0"):
            BlockLayout({"layers.0": torch.zeros(7, 3)}, 5, 2, {})
        with self.assertRaisesRegex(LayoutError, "no KV cache"):
            BlockLayout({}, 5, 2, {})


if __name__ == "__main__":
    unittest.main()
