"""The half in vLLM's worker: copies blocks out as they are computed, and in when they have come and are proven."""

import logging
import queue
import threading
import time
from dataclasses import dataclass, field
from typing import Final

import torch

from .daemon import Daemon
from .layout import BlockLayout
from .memory import Shape, Shared
from .metadata import BatonMetadata, Load, Publish
from .wire import Message

INBOX_BYTES: Final = 64 << 20
"""Memory through which blocks go to the daemon. It takes a block out within a millisecond."""
INBOX_PIECES: Final = range(4, 257)
LOAD_WAIT: Final = 90.0
"""Seconds without a word of the daemon, which says every five what is still on its way: another's prefill may take minutes. Only a daemon
that hangs is given up by it. One of an earlier release says nothing meanwhile, and gives up after 60."""
WAITING: Final = 65_536
"""Groups of blocks that wait to be copied out; a group is what one step computed of one prompt."""

_log = logging.getLogger("vllm.baton")


@dataclass
class _Sending:
    """A request whose blocks are copied out."""

    waiting: int = 0
    """Groups that have not been copied."""
    finished: bool = False
    """vLLM waits to free its blocks."""


@dataclass
class _Results:
    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    bad_blocks: set[int] = field(default_factory=set)


class WorkerSide:
    """Calls come from the thread that runs the model, from the daemon's reading thread, and from the one that copies out."""

    def __init__(self, path: str, layout: BlockLayout, engine: str, version: str) -> None:
        self._layout = layout
        self._engine = engine
        self._version = version
        pieces = min(max(INBOX_BYTES // layout.block_bytes, INBOX_PIECES.start), INBOX_PIECES.stop - 1)
        self._inbox_shape = Shape(pieces, layout.block_bytes)
        self._inbox: Shared | None = None
        self._arena: Shared | None = None
        self._free: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._sending: dict[str, _Sending] = {}
        self._loading: dict[str, tuple[Load, float]] = {}
        """With the time until which the daemon may take."""
        self._results = _Results()
        self._life = 0
        """Counts connections: what was queued for an earlier one is not copied."""
        self._groups: queue.Queue[tuple[int, Publish, torch.Event | None] | None] = queue.Queue(maxsize=WAITING)
        self._copying = threading.Lock()
        """Held while a block is copied out: whoever holds it knows that none is."""
        self._copier = threading.Thread(target=self._copy_out, name="baton-copy", daemon=True)
        self._daemon = Daemon(path, self, "worker")

    def start(self) -> None:
        self._copier.start()
        self._daemon.start()

    def stop(self) -> None:
        self._groups.put(None)
        self._free.put(None)
        self._daemon.stop()
        self._copier.join(timeout=5)

    # ---- What the daemon says ---------------------------------------------------------------------------------------

    def hello(self) -> tuple[Message, int | None]:
        # That of a call that was turned away. Forgotten first: the next one may not come about, and its number be another file's by then.
        old, self._inbox = self._inbox, None
        if old is not None:
            old.close()
        self._inbox = Shared.inbox(self._inbox_shape)
        layout = {
            "blockSize": self._layout.block_size,
            "blockBytes": self._layout.block_bytes,
            "digest": self._layout.digest(),
            "description": self._layout.description(),
        }
        about = {"role": "worker", "engine": self._engine, "vllm": self._version, "layout": layout, "inboxPieces": self._inbox_shape.pieces}
        return about, self._inbox.file

    def welcome(self, message: Message, file: int | None) -> None:
        if file is None:
            raise OSError("the daemon sent no arena")
        self._arena = Shared(file, Shape(message["arenaPieces"], self._layout.block_bytes), writable=False)
        free: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        for piece in range(self._inbox_shape.pieces):
            free.put(piece)
        with self._lock:
            self._life += 1
            # Whoever waits for a piece of an earlier inbox, or of the one that was none yet, would wait for ever.
            self._free.put(None)
            self._free = free

    def heard(self, message: Message) -> None:
        match message["type"]:
            case "taken":
                self._free.put(message["piece"])
            case "loaded":
                self._copy_in(message)
            case "coming":
                self._coming(message["requests"])
            case "failed":
                self._failed(message["request"], message["why"])

    def lost(self) -> None:
        with self._lock:
            self._life += 1
            loading = list(self._loading)
            # Wakes the copier, should it wait for a piece of this inbox.
            self._free.put(None)
        for request in loading:
            self._failed(request, "the daemon is gone")
        for shared in (self._inbox, self._arena):
            if shared is not None:
                shared.close()
        self._inbox = self._arena = None

    # ---- What vLLM asks ---------------------------------------------------------------------------------------------

    def begin_loads(self, metadata: BatonMetadata) -> None:
        """Asks for what the requests of this step wait for."""
        for load in metadata.load:
            with self._lock:
                self._loading[load.request] = (load, time.monotonic() + LOAD_WAIT)
            if not self._daemon.send({"type": "collect", "request": load.request}):
                self._failed(load.request, "the daemon is gone")

    def computed(self, metadata: BatonMetadata) -> None:
        """The step's blocks are there, or will be when the device comes to them: copies them out in the background."""
        if metadata.dropped:
            self.drop(metadata)
        if not metadata.publish:
            return
        ready = None
        if self._layout.device.type != "cpu":
            ready = torch.Event(self._layout.device)
            ready.record()
        for publish in metadata.publish:
            with self._lock:
                self._sending.setdefault(publish.request, _Sending()).waiting += 1
                life = self._life
            try:
                self._groups.put_nowait((life, publish, ready))
            except queue.Full:
                self._copied(publish.request)
                self._daemon.send({"type": "cancel", "request": publish.request})

    def drop(self, metadata: BatonMetadata) -> None:
        """Blocks of these requests are about to be overwritten: returns when none of them is being copied."""
        with self._lock:
            for request in metadata.dropped:
                self._sending.pop(request, None)
        with self._copying:
            pass

    def results(self, finished: set[str]) -> tuple[set[str], set[str]]:
        """Requests whose blocks vLLM may free, and those whose KV has come or never will."""
        now = time.monotonic()
        with self._lock:
            late = [request for request, (_, until) in self._loading.items() if until < now]
        for request in late:
            self._failed(request, f"the daemon did not answer within {LOAD_WAIT} s")
            # It would go on reading for as long as the prompt is computed elsewhere, and hold room for it.
            self._daemon.send({"type": "cancel", "request": request})
        with self._lock:
            for request in finished:
                if sending := self._sending.get(request):
                    sending.finished = True
            done = {name for name, sending in self._sending.items() if sending.finished and sending.waiting == 0}
            for request in done:
                del self._sending[request]
            received, self._results.received = self._results.received, set()
        return done, received

    def bad_blocks(self) -> set[int]:
        """Blocks that have not got their KV."""
        with self._lock:
            bad, self._results.bad_blocks = self._results.bad_blocks, set()
        return bad

    # ---- Copies -----------------------------------------------------------------------------------------------------

    def _copy_out(self) -> None:
        while (group := self._groups.get()) is not None:
            life, publish, ready = group
            try:
                whole = self._copy_group(life, publish, ready)
            except Exception:
                # It is this prompt's: those after it are copied by this thread too.
                _log.exception("request %s is not handed over: its blocks could not be copied", publish.request)
                whole = False
            if not whole:
                # Its reader would wait for blocks that do not come.
                self._daemon.send({"type": "cancel", "request": publish.request})
            elif publish.last:
                self._daemon.send({"type": "seal", "request": publish.request})
            self._copied(publish.request)

    def _copy_group(self, life: int, publish: Publish, ready: "torch.Event | None") -> bool:
        """Copies what a step computed of one prompt. False when it is not all there."""
        if ready is not None:
            ready.synchronize()
        return all(self._publish(life, publish.request, index, block) for index, block in publish.blocks)

    def _publish(self, life: int, request: str, index: int, block: int) -> bool:
        """Copies a block out. False when nobody wants the request any more."""
        with self._lock:
            free = self._free
        piece = free.get()
        if piece is None:
            free.put(None)
            return False
        with self._copying:
            with self._lock:
                inbox = self._inbox
                wanted = life == self._life and request in self._sending and inbox is not None
            if not wanted:
                free.put(piece)
                return False
            try:
                self._layout.read(block, inbox.piece(piece))
            except Exception:
                free.put(piece)
                raise
        return self._daemon.send({"type": "publish", "request": request, "index": index, "piece": piece})

    def _copied(self, request: str) -> None:
        with self._lock:
            if sending := self._sending.get(request):
                sending.waiting -= 1

    def _copy_in(self, message: Message) -> None:
        """The daemon has proven the blocks: gives them to the engine."""
        request = message["request"]
        with self._lock:
            # From now on it cannot be given up: vLLM would use the blocks while they are written.
            load, _ = self._loading.pop(request, (None, 0.0))
        if load is not None:
            try:
                self._write(load, message["firstBlock"], message["pieces"])
            except Exception as error:
                # Some of its blocks may have been written: all of them are computed again.
                _log.exception("request %s: its blocks could not be copied", request)
                self._end_badly(load, f"its blocks could not be copied: {error!r}")
        self._daemon.send({"type": "copied", "request": request})

    def _write(self, load: Load, first: int, pieces: list[int]) -> None:
        skipped = load.first - first
        if self._arena is None or skipped < 0 or len(pieces) - skipped != len(load.blocks):
            self._end_badly(load, f"{len(pieces)} blocks from {first} came, {len(load.blocks)} from {load.first} are due")
            return
        for block, piece in zip(load.blocks, pieces[skipped:], strict=True):
            self._layout.write(block, self._arena.piece(piece))
        with self._lock:
            self._results.received.add(load.request)

    def _coming(self, requests: list[str]) -> None:
        """Their KV is still on its way: the daemon may go on taking it."""
        until = time.monotonic() + LOAD_WAIT
        with self._lock:
            for request in requests:
                if request in self._loading:
                    self._loading[request] = (self._loading[request][0], until)

    def _failed(self, request: str, why: str) -> None:
        with self._lock:
            load, _ = self._loading.pop(request, (None, 0.0))
        if load is not None:
            self._end_badly(load, why)

    def _end_badly(self, load: Load, why: str) -> None:
        with self._lock:
            self._results.received.add(load.request)
            self._results.bad_blocks.update(load.blocks)
        _log.warning("the KV of request %s is computed here: %s", load.request, why)
