"""The two halves beside a daemon that this test plays."""

import os
import time
import unittest
import unittest.mock
from types import SimpleNamespace
from typing import Any

import torch

from baton_vllm.layout import BlockLayout
from baton_vllm.metadata import BatonMetadata, Load, Publish
from baton_vllm.scheduler import SchedulerSide
from baton_vllm.wire import LONGEST_FRAME, Message, encode
from baton_vllm.worker import LOAD_WAIT, WorkerSide

from .double import DESCRIPTOR, FakeDaemon, until

BLOCK = 4


def request(name: str, tokens: int, params: Any, **other: Any) -> Any:
    about = {"cache_salt": None, "lora_request": None, "mm_features": [], "prompt_embeds": None} | other
    return SimpleNamespace(request_id=name, prompt_token_ids=list(range(tokens)), kv_transfer_params=params, **about)


def step(new: list[Any] = (), cached: dict[str, tuple[list[int], int]] = {}, tokens: dict[str, int] = {}, preempted: set[str] = set()) -> Any:
    scheduled = SimpleNamespace(
        req_ids=list(cached),
        new_block_ids=[(blocks,) if blocks else None for blocks, _ in cached.values()],
        num_computed_tokens=[computed for _, computed in cached.values()],
    )
    return SimpleNamespace(
        scheduled_new_reqs=list(new), scheduled_cached_reqs=scheduled, num_scheduled_tokens=tokens, preempted_req_ids=preempted
    )


def new(name: str, blocks: list[int], computed: int = 0) -> Any:
    return SimpleNamespace(req_id=name, block_ids=(blocks,), num_computed_tokens=computed)


REMOTE_DECODE = {"do_remote_decode": True, "do_remote_prefill": False}
REMOTE_PREFILL = {"do_remote_decode": False, "do_remote_prefill": True, "baton": DESCRIPTOR}


class Scheduler(unittest.TestCase):
    def setUp(self) -> None:
        self.daemon = FakeDaemon()
        # Longer than this machine may be held up: a lease is given up where a test says so, and nowhere else.
        self.side = SchedulerSide(self.daemon.path, BLOCK, "e", produces=True, consumes=True, open_wait=60)
        self.side.start()
        self.addCleanup(self.daemon.close)
        self.addCleanup(self.side.stop)
        until("connected", lambda: self.side._daemon.connected)

    def opened(self, prompt: Any) -> None:
        self.side.arrived(prompt)
        until("the lease is open", lambda: self.side.matched(prompt, 0) == (0, False))
        # One that was refused, or waited for in vain, is answered alike.
        self.assertIsNotNone(self.side._handing[prompt.request_id].descriptor, "there is no lease")

    def test_blocks_are_published_as_steps_complete_them(self) -> None:
        prompt = request("r", 10, REMOTE_DECODE)
        self.opened(prompt)
        first = self.side.step(step([new("r", [7, 8, 9])], tokens={"r": 6}))
        self.assertEqual(first.publish, [Publish("r", [(0, 7)], False)])
        self.assertEqual(self.side.step(step(cached={"r": ([], 6)}, tokens={"r": 1})).publish, [])
        last = self.side.step(step(cached={"r": ([], 7)}, tokens={"r": 3}))
        self.assertEqual(last.publish, [Publish("r", [(1, 8), (2, 9)], True)])
        params = {"do_remote_prefill": True, "do_remote_decode": False, "baton": DESCRIPTOR}
        self.assertEqual(self.side.finished(prompt, whole=True), (True, params))
        self.assertNotIn("cancel", self.daemon.kinds())

    def test_the_daemon_hears_by_which_name_a_router_asks_for_a_prompt(self) -> None:
        self.opened(request("r", 10, REMOTE_DECODE | {"baton": {"operation": "r0-00ff-01"}}))
        self.opened(request("plain", 10, REMOTE_DECODE))
        # A client may send whatever it likes to a server directly.
        junks = ["x", 7, [], {}, *({"operation": operation} for operation in (7, "", "o" * 513, "\u00fc", None, ["o"]))]
        for junk in junks:
            self.opened(request(f"junk {junk}", 10, REMOTE_DECODE | {"baton": junk}))
        named = {message["request"]: message["operation"] for message in self.daemon.heard if "operation" in message}
        self.assertEqual(named, {"r": "r0-00ff-01"})

    def test_a_prompt_waits_for_its_lease_but_not_for_ever(self) -> None:
        self.daemon.answers = {}
        prompt = request("r", 10, REMOTE_DECODE)
        self.side.arrived(prompt)
        self.assertEqual(self.side.matched(prompt, 0), (None, False))
        self.side._open_wait = 0.05
        until("it is computed without one", lambda: self.side.matched(prompt, 0) == (0, False))
        self.assertEqual(self.side.step(step([new("r", [7, 8, 9])], tokens={"r": 10})).publish, [])
        self.assertEqual(self.side.finished(prompt, whole=True), (False, None))

    def test_a_lease_that_comes_too_late_does_not_bring_a_prompt_back(self) -> None:
        self.daemon.answers = {}
        prompt = request("r", 10, REMOTE_DECODE)
        self.side.arrived(prompt)
        self.side._open_wait = 0.05
        until("it is computed without one", lambda: self.side.matched(prompt, 0) == (0, False))
        self.side.heard({"type": "opened", "request": "r", "firstBlock": 0, "descriptor": DESCRIPTOR})
        self.assertEqual(self.side.step(step([new("r", [7, 8, 9])], tokens={"r": 10})).publish, [])
        self.assertEqual(self.side.finished(prompt, whole=True), (False, None))

    def test_a_prompt_longer_than_a_frame_is_computed_here(self) -> None:
        for params in (REMOTE_DECODE, REMOTE_PREFILL):
            prompt = request("r", 10, params, cache_salt="s" * LONGEST_FRAME)
            self.side.arrived(prompt)
            self.assertEqual(self.side.matched(prompt, 0), (0, False))
        self.opened(request("next", 10, REMOTE_DECODE))

    def test_a_cleared_cache_takes_what_is_under_way_with_it(self) -> None:
        begun, waiting = request("begun", 10, REMOTE_DECODE), request("waiting", 10, REMOTE_PREFILL)
        self.opened(begun)
        self.side.step(step([new("begun", [7, 8, 9])], tokens={"begun": 6}))
        self.side.arrived(waiting)
        self.assertTrue(self.side.reset())
        until("the daemon clears its own", lambda: self.daemon.kinds()[-2:] == ["cancel", "reset"])
        self.assertEqual(self.side.matched(waiting, 0), (0, False))
        self.assertEqual(self.side.step(step(cached={"begun": ([], 6)}, tokens={"begun": 4})).publish, [])
        # What was begun may still be copied: vLLM waits for that before it frees the blocks.
        self.assertEqual(self.side.finished(begun, whole=True), (True, None))
        self.opened(request("next", 10, REMOTE_DECODE))

    def test_a_cache_is_not_cleared_while_blocks_are_on_their_way_into_it(self) -> None:
        prompt = request("r", 10, REMOTE_PREFILL)
        self.side.arrived(prompt)
        self.side.matched(prompt, 0)
        self.side.allocated(prompt, [20, 21, 22], 10)
        self.side.step(step())
        self.assertFalse(self.side.reset())
        until("what has not begun is cleared all the same", lambda: self.daemon.kinds()[-1:] == ["reset"])
        # They have come: the prompt is scheduled.
        self.side.step(step([new("r", [20, 21, 22], 9)], tokens={"r": 1}))
        self.assertTrue(self.side.reset())
        self.assertEqual(self.side.matched(prompt, 0), (0, False))

    def test_blocks_that_are_on_their_way_out_are_let_go_of_although_nobody_reads_them(self) -> None:
        prompt = request("r", 10, REMOTE_DECODE)
        self.opened(prompt)
        self.side.step(step([new("r", [7, 8, 9])], tokens={"r": 6}))
        self.side.reset()
        self.assertEqual(self.side.step(step(preempted={"r"})).dropped, ["r"])
        self.assertEqual(self.side.finished(prompt, whole=False), (False, None))

    def test_without_a_daemon_a_cache_is_cleared_too(self) -> None:
        self.daemon.close()
        until("the loss is seen", lambda: not self.side._daemon.connected)
        self.assertTrue(self.side.reset())

    def test_an_answer_that_nobody_foresaw_does_not_end_the_connection_for_ever(self) -> None:
        prompt = request("r", 10, REMOTE_DECODE)
        self.daemon.answers["open"] = lambda m: {"type": "opened", "request": m["request"]}
        self.side.arrived(prompt)
        until("connected again", lambda: self.daemon.kinds().count("hello") == 2 and self.side._daemon.connected)
        self.assertEqual(self.side.matched(prompt, 0), (0, False))

    def test_what_was_aborted_or_preempted_is_withdrawn(self) -> None:
        for name, whole, preempted in (("aborted", False, set()), ("preempted", True, {"preempted"})):
            prompt = request(name, 10, REMOTE_DECODE)
            self.opened(prompt)
            self.side.step(step([new(name, [1, 2, 3])], tokens={name: 8}))
            dropped = self.side.step(step(preempted=preempted)).dropped
            self.assertEqual(dropped, list(preempted))
            delayed, params = self.side.finished(prompt, whole)
            self.assertEqual((delayed, params), (not preempted, None))
            until("cancelled", lambda: {"type": "cancel", "request": name} in self.daemon.heard)

    def test_kv_from_elsewhere_fills_what_is_not_cached(self) -> None:
        prompt = request("r", 10, REMOTE_PREFILL)
        self.side.arrived(prompt)
        self.assertEqual(self.side.matched(prompt, 4), (6, True))
        self.side.allocated(prompt, [20, 21, 22], 6)
        self.side.allocated(prompt, [20, 21, 22], 0)
        self.assertEqual(self.side.step(step()).load, [Load("r", 1, [21, 22])])
        self.assertEqual(self.side.step(step()).load, [])
        # Once more after a failed load: it is computed here.
        self.assertEqual(self.side.matched(prompt, 4), (0, False))

    def test_a_prompt_that_is_cached_needs_nobody(self) -> None:
        prompt = request("r", 10, REMOTE_PREFILL)
        self.side.arrived(prompt)
        self.assertEqual(self.side.matched(prompt, 10), (0, False))
        self.side.allocated(prompt, [20, 21, 22], 0)
        until("its reading is cancelled", lambda: self.daemon.kinds()[-1:] == ["cancel"])

    def test_another_prompt_takes_nothing(self) -> None:
        prompt = request("r", 9, REMOTE_PREFILL)
        self.side.arrived(prompt)
        self.assertEqual(self.side.matched(prompt, 0), (0, False))
        self.assertNotIn("take", self.daemon.kinds())

    def test_without_a_daemon_everything_is_computed_here(self) -> None:
        self.daemon.close()
        until("the loss is seen", lambda: not self.side._daemon.connected)
        for params in (REMOTE_DECODE, REMOTE_PREFILL):
            prompt = request("r", 10, params)
            self.side.arrived(prompt)
            self.assertEqual(self.side.matched(prompt, 0), (0, False))
            self.assertEqual(self.side.finished(prompt, whole=True), (False, None))

    def test_parameters_that_are_no_object_are_none(self) -> None:
        for params in ("x", 7, ["baton"], {"baton": "x"}):
            prompt = request("r", 10, params)
            self.side.arrived(prompt)
            self.assertEqual(self.side.matched(prompt, 0), (0, False))
            self.assertEqual(self.side.finished(prompt, whole=True), (False, None))
        self.assertEqual(self.daemon.kinds(), ["hello"])

    def test_kv_that_does_not_follow_from_tokens_is_not_handed_over(self) -> None:
        for other in ({"lora_request": object()}, {"mm_features": [1]}, {"prompt_embeds": object()}):
            prompt = request("r", 10, REMOTE_DECODE, **other)
            self.side.arrived(prompt)
            self.assertEqual(self.side.matched(prompt, 0), (0, False))
        self.side.arrived(request("end", 10, REMOTE_DECODE, cache_salt="s"))
        until("only the plain one is opened", lambda: [m.get("salt") for m in self.daemon.heard if m["type"] == "open"] == ["s"])


class Worker(unittest.TestCase):
    def setUp(self) -> None:
        self.caches = {f"layers.{n}": torch.rand(300, 2, BLOCK, 3) for n in range(2)}
        layout = BlockLayout(self.caches, 300, BLOCK, {})
        self.daemon = FakeDaemon(layout.block_bytes)
        self.layout = layout
        self.side = WorkerSide(self.daemon.path, layout, "e", "0")
        self.side.start()
        self.addCleanup(self.daemon.close)
        self.addCleanup(self.side.stop)
        until("connected", lambda: self.side._daemon.connected)

    def content(self, block: int) -> bytes:
        data = bytearray(self.layout.block_bytes)
        self.layout.read(block, memoryview(data))
        return bytes(data)

    def test_blocks_are_copied_out_in_order_and_then_freed(self) -> None:
        # More than the inbox has pieces: they are used again.
        blocks = [(index, 299 - index) for index in range(300)]
        self.side.computed(BatonMetadata(publish=[Publish("r", blocks[:100], False)]))
        self.side.computed(BatonMetadata(publish=[Publish("r", blocks[100:], True)]))
        sent: set[str] = set(self.side.results({"r"})[0])
        until("all are copied", lambda: sent.update(self.side.results(set())[0]) or sent == {"r"})
        until("sealed", lambda: self.daemon.kinds()[-1] == "seal")
        self.assertEqual(list(self.daemon.blocks), [("r", index) for index in range(300)])
        self.assertTrue(all(self.daemon.blocks["r", index] == self.content(block) for index, block in blocks))

    def test_what_is_dropped_is_not_copied(self) -> None:
        # Where they are said, and not where the daemon has read of them: its thread may be behind.
        published: list[str] = []
        send = self.side._daemon.send

        def counts(message: Message) -> bool:
            if message["type"] == "publish":
                published.append(message["request"])
            return send(message)

        with unittest.mock.patch.object(self.side._daemon, "send", counts):
            self.side.computed(BatonMetadata(publish=[Publish("r", [(index, index) for index in range(300)], True)]))
            self.side.drop(BatonMetadata(dropped=["r"]))
            # One may have been copied, and not been said yet.
            copied = len(published) + 1
            for cache in self.caches.values():
                cache.zero_()
            self.side.computed(BatonMetadata(publish=[Publish("end", [(0, 0)], True)]))
            until("the next one is copied", lambda: ("end", 0) in self.daemon.blocks)
        self.assertLessEqual(published.count("r"), copied)
        self.assertFalse(any(not any(data) for key, data in self.daemon.blocks.items() if key[0] == "r"))
        self.assertNotIn({"type": "seal", "request": "r"}, self.daemon.heard)

    def test_a_prompt_that_cannot_be_copied_is_withdrawn_and_the_next_one_copied(self) -> None:
        read = self.layout.read

        def fails(block: int, target: memoryview) -> None:
            if block == 7:
                raise RuntimeError("a copy that failed")
            read(block, target)

        # More often than the inbox has pieces: none of them is lost.
        names = {f"r{number}" for number in range(300)}
        with (
            unittest.mock.patch.object(BlockLayout, "read", lambda _, block, target: fails(block, target)),
            self.assertLogs("vllm.baton", "ERROR"),
        ):
            for name in names:
                self.side.computed(BatonMetadata(publish=[Publish(name, [(0, 7)], True)]))
            sent: set[str] = set(self.side.results(names)[0])
            until("vLLM may free their blocks", lambda: sent.update(self.side.results(set())[0]) or sent == names)
            self.side.computed(BatonMetadata(publish=[Publish("end", [(0, 8)], True)]))
            until("the next one is copied", lambda: self.daemon.kinds()[-1] == "seal")
        self.assertEqual(list(self.daemon.blocks), [("end", 0)])
        withdrawn = [message["request"] for message in self.daemon.heard if message["type"] == "cancel"]
        self.assertEqual(set(withdrawn), names)

    def test_a_prompt_that_is_not_copied_to_its_end_is_withdrawn(self) -> None:
        with unittest.mock.patch.object(self.side, "_publish", lambda *_: False):
            self.side.computed(BatonMetadata(publish=[Publish("r", [(0, 7)], True)]))
            until("its reader need not wait", lambda: self.daemon.kinds()[-1] == "cancel")
        self.assertNotIn("seal", self.daemon.kinds())

    def test_an_inbox_is_closed_once_although_the_next_one_does_not_come_about(self) -> None:
        side = WorkerSide(self.daemon.path, self.layout, "e", "0")
        _, file = side.hello()
        closed: list[int] = []
        with (
            unittest.mock.patch("baton_vllm.memory.os.memfd_create", side_effect=OSError("too many files")),
            unittest.mock.patch("baton_vllm.memory.os.close", closed.append),
        ):
            self.assertRaises(OSError, side.hello)
            self.assertRaises(OSError, side.hello)
        self.assertEqual(closed, [file])
        os.close(closed[0])

    def test_what_was_computed_before_there_was_a_daemon_holds_nothing_up(self) -> None:
        side = WorkerSide(self.daemon.path, self.layout, "e", "0")
        self.addCleanup(side.stop)
        side._copier.start()
        side.computed(BatonMetadata(publish=[Publish("early", [(0, 5)], True)]))
        # The copier waits for a piece of an inbox that there is not.
        until("it is at it", lambda: side._groups.empty())
        time.sleep(0.1)
        side._daemon.start()
        until("connected", lambda: side._daemon.connected)
        side.computed(BatonMetadata(publish=[Publish("late", [(0, 6)], True)]))
        until("the next one is copied", lambda: ("late", 0) in self.daemon.blocks)
        self.assertNotIn(("early", 0), self.daemon.blocks)

    def load(self, answer: Any) -> tuple[set[str], set[int]]:
        self.daemon.answers["collect"] = answer
        self.side.begin_loads(BatonMetadata(load=[Load("r", 1, [8, 9])]))
        received: set[str] = set()
        until("it ends", lambda: received.update(self.side.results(set())[1]) or received)
        return received, self.side.bad_blocks()

    def test_proven_blocks_are_copied_in(self) -> None:
        assert self.daemon.arena is not None
        for piece in (2, 3, 4):
            self.daemon.arena.piece(piece)[:] = self.content(100 + piece)
        loaded = {"type": "loaded", "request": "r", "firstBlock": 0, "pieces": [2, 3, 4]}
        self.assertEqual(self.load(lambda _: loaded), ({"r"}, set()))
        self.assertEqual([self.content(8), self.content(9)], [self.content(103), self.content(104)])
        until("the daemon may reuse them", lambda: self.daemon.kinds()[-1] == "copied")

    def test_what_failed_is_reported_block_by_block(self) -> None:
        failed = {"type": "failed", "request": "r", "why": "checksum-mismatch"}
        self.assertEqual(self.load(lambda _: failed), ({"r"}, {8, 9}))

    def test_blocks_that_do_not_fit_are_not_used(self) -> None:
        before = self.content(8)
        short = {"type": "loaded", "request": "r", "firstBlock": 0, "pieces": [2, 3]}
        self.assertEqual(self.load(lambda _: short), ({"r"}, {8, 9}))
        self.assertEqual(self.content(8), before)

    def test_a_block_that_cannot_be_written_is_computed_here_and_the_next_one_loaded(self) -> None:
        loaded = {"type": "loaded", "request": "r", "firstBlock": 0, "pieces": [2, 3, 4]}
        broken = unittest.mock.patch.object(BlockLayout, "write", side_effect=RuntimeError("a copy that failed"))
        with broken, self.assertLogs("vllm.baton", "ERROR"):
            self.assertEqual(self.load(lambda _: loaded), ({"r"}, {8, 9}))
            until("the daemon may reuse them", lambda: self.daemon.kinds()[-1] == "copied")
        self.assertEqual(self.load(lambda _: loaded), ({"r"}, set()))
        self.assertEqual(self.daemon.kinds().count("hello"), 1)

    def test_a_daemon_that_hangs_is_not_waited_for(self) -> None:
        with unittest.mock.patch("baton_vllm.worker.LOAD_WAIT", 0.05):
            self.assertEqual(self.load(lambda _: None), ({"r"}, {8, 9}))
        until("it reads no more", lambda: {"type": "cancel", "request": "r"} in self.daemon.heard)
        before = self.content(8)
        for connection in self.daemon._connections:
            connection.sendall(encode({"type": "loaded", "request": "r", "firstBlock": 0, "pieces": [2, 3, 4]}))
        until("what comes late is given back", lambda: self.daemon.kinds()[-1] == "copied")
        self.assertEqual(self.content(8), before)

    def test_what_is_still_on_its_way_is_waited_for(self) -> None:
        now = 0.0
        # The side's own clock stands still but for what this test lets pass.
        with unittest.mock.patch("baton_vllm.worker.time", SimpleNamespace(monotonic=lambda: now)):
            self.side.begin_loads(BatonMetadata(load=[Load("r", 1, [8, 9]), Load("hangs", 0, [7])]))
            until("it is asked for", lambda: self.daemon.kinds().count("collect") == 2)
            received: set[str] = set()
            for _ in range(4):
                now += 0.7 * LOAD_WAIT
                for connection in self.daemon._connections:
                    connection.sendall(encode({"type": "coming", "requests": ["r", "of another"]}))
                until("the word has come", lambda: self.side._loading["r"][1] == now + LOAD_WAIT)
                received |= self.side.results(set())[1]
            self.assertEqual(received, {"hangs"}, "longer than without a word")
            now += 1.1 * LOAD_WAIT
            received |= self.side.results(set())[1]
            self.assertIn("r", received, "until no word comes")
        self.assertEqual(self.side.bad_blocks(), {7, 8, 9})

    def test_a_daemon_that_dies_fails_what_waits_and_is_found_again(self) -> None:
        def dies(_: Any) -> None:
            self.daemon.cut()

        self.assertEqual(self.load(dies), ({"r"}, {8, 9}))
        until("connected again", lambda: self.daemon.kinds().count("hello") == 2 and self.side._daemon.connected)
        self.side.computed(BatonMetadata(publish=[Publish("s", [(0, 5)], True)]))
        until("and goes on", lambda: self.daemon.blocks.get(("s", 0)) == self.content(5))


if __name__ == "__main__":
    unittest.main()
