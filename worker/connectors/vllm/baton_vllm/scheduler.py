"""The half in vLLM's scheduler: which requests are handed over, and which blocks of them when."""

import logging
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from .daemon import Daemon
from .metadata import BatonMetadata, Load, Publish
from .wire import Message

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

OPEN_WAIT: Final = 0.5
"""Seconds that a prompt waits for the daemon's answer before it is computed without being handed over, where nobody says otherwise. The
daemon answers within a millisecond, unless its machine has no time for it."""

KEY: Final = "baton"
"""Of the descriptor in `kv_transfer_params`; on a prefill leg, of what the router says of it."""

LONGEST_OPERATION: Final = 512
"""Characters of the router's id of an operation, as the daemon takes it."""

_log = logging.getLogger("vllm.baton")


@dataclass
class _Handing:
    """A prompt that is computed here and read elsewhere."""

    tokens: int
    asked: float
    descriptor: Message | None = None
    refused: bool = False
    first: int = 0
    """Blocks before this one are in the daemon's arena already."""
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    next: int = 0
    """Index of the next block to publish."""
    ended: bool = False
    """All blocks have been given to the worker's half."""
    begun: bool = False
    """The worker's half has heard of it."""


@dataclass
class _Taking:
    """A prompt whose KV comes from elsewhere."""

    tokens: int
    begun: bool = False
    """Its blocks have been allocated: from now on the worker's half has it."""


class SchedulerSide:
    """All calls come from the scheduler's thread, but for those that a `Listener` hears."""

    def __init__(self, path: str, block_size: int, engine: str, produces: bool, consumes: bool, open_wait: float = OPEN_WAIT) -> None:
        self._block_size = block_size
        self._engine = engine
        self._produces = produces
        self._consumes = consumes
        self._open_wait = open_wait
        self._handing: dict[str, _Handing] = {}
        self._taking: dict[str, _Taking] = {}
        self._loads: list[Load] = []
        self._dropped: list[str] = []
        self._lock = threading.Lock()
        self._daemon = Daemon(path, self, "scheduler")

    def start(self) -> None:
        self._daemon.start()

    def stop(self) -> None:
        self._daemon.stop()

    # ---- What the daemon says ---------------------------------------------------------------------------------------

    def hello(self) -> tuple[Message, int | None]:
        return {"role": "scheduler", "engine": self._engine}, None

    def welcome(self, message: Message, file: int | None) -> None:
        """Nothing is shared with this half."""

    def heard(self, message: Message) -> None:
        with self._lock:
            handing = self._handing.get(message.get("request", ""))
            if handing is None or handing.refused:
                # It is computed without being handed over: an answer that comes late changes nothing.
                return
            if message["type"] == "opened":
                handing.first = handing.next = message["firstBlock"]
                handing.descriptor = message["descriptor"]
            elif message["type"] == "refused":
                _log.warning("request %s is not handed over: %s", message["request"], message["why"])
                handing.refused = True

    def lost(self) -> None:
        self._forget()

    # ---- What vLLM asks ---------------------------------------------------------------------------------------------

    def arrived(self, request: "Request") -> None:
        """A new request. Both ends of a hand-off begin here, before it is its turn."""
        # Whatever a client sent: vLLM reads it out of `vllm_xargs` too, where it may be text or a number.
        params = request.kv_transfer_params if isinstance(request.kv_transfer_params, dict) else {}
        tokens = request.prompt_token_ids
        if not tokens or not _plain(request):
            return
        about = {"request": request.request_id, "tokens": list(tokens), "salt": request.cache_salt or ""}
        if self._produces and params.get("do_remote_decode"):
            handing = _Handing(len(tokens), time.monotonic())
            with self._lock:
                self._handing[request.request_id] = handing
            if not self._daemon.send({"type": "open", **about, **_operation(params)}):
                handing.refused = True
        elif self._consumes and isinstance(descriptor := params.get(KEY), dict):
            # vLLM makes a request of one token of each that was aborted before it began: nothing is read for it.
            if descriptor.get("tokens") != len(tokens):
                return
            if self._daemon.send({"type": "take", **about, "descriptor": descriptor}):
                with self._lock:
                    self._taking[request.request_id] = _Taking(len(tokens))

    def matched(self, request: "Request", computed: int) -> tuple[int | None, bool]:
        """How many tokens after `computed` come from elsewhere; None: ask again."""
        with self._lock:
            taking = self._taking.get(request.request_id)
            if taking is not None and not taking.begun:
                coming = taking.tokens - computed
                return (coming, True) if coming > 0 else (0, False)
            handing = self._handing.get(request.request_id)
            if handing is None or handing.descriptor is not None or handing.refused:
                return 0, False
            if time.monotonic() - handing.asked < self._open_wait:
                return None, False
            handing.refused = True
        _log.warning("request %s is not handed over: the daemon did not answer within %s s", request.request_id, self._open_wait)
        self._daemon.send({"type": "cancel", "request": request.request_id})
        return 0, False

    def allocated(self, request: "Request", blocks: list[int], coming: int) -> None:
        """The request has blocks; the KV of `coming` tokens is due from elsewhere."""
        with self._lock:
            taking = self._taking.get(request.request_id)
            if taking is None or taking.begun:
                return
            taking.begun = True
            if coming > 0:
                first = (taking.tokens - coming) // self._block_size
                last = -(-taking.tokens // self._block_size)
                self._loads.append(Load(request.request_id, first, blocks[first:last]))
                return
            del self._taking[request.request_id]
        # All of it was cached here: the other end need not keep it.
        self._daemon.send({"type": "cancel", "request": request.request_id})

    def step(self, output: "SchedulerOutput") -> BatonMetadata:
        """What this step makes ready, and what it waits for."""
        with self._lock:
            for name in output.preempted_req_ids or ():
                self._give_up(name)
            for new in output.scheduled_new_reqs:
                if (taking := self._taking.get(new.req_id)) and taking.begun:
                    # Its blocks have come, or will not: vLLM waits for that before it schedules it.
                    del self._taking[new.req_id]
                if handing := self._handing.get(new.req_id):
                    handing.blocks = list(new.block_ids[0])
                    handing.computed = new.num_computed_tokens + output.num_scheduled_tokens[new.req_id]
            cached = output.scheduled_cached_reqs
            for index, name in enumerate(cached.req_ids):
                if handing := self._handing.get(name):
                    if blocks := cached.new_block_ids[index]:
                        handing.blocks += blocks[0]
                    handing.computed = cached.num_computed_tokens[index] + output.num_scheduled_tokens[name]
            publish = [due for name, handing in self._handing.items() if (due := self._due(name, handing))]
            metadata = BatonMetadata(publish, self._loads, self._dropped)
            self._loads, self._dropped = [], []
        return metadata

    def reset(self) -> bool:
        """vLLM clears its cache, as when its weights change: nothing that was computed before is handed over or taken. False
        while blocks of a prompt may still be filled with what was: vLLM tells whoever asked that the cache is not cleared."""
        for request in self._forget():
            self._daemon.send({"type": "cancel", "request": request})
        # Without a daemon, or when it does not take this, the connection is lost, and with it all that the daemon had.
        self._daemon.send({"type": "reset"})
        with self._lock:
            # Those that had not begun were forgotten above.
            return not self._taking

    def finished(self, request: "Request", whole: bool) -> tuple[bool, dict[str, Any] | None]:
        """The request is over; `whole` says that it was not aborted. Whether its blocks are still being copied, and what its answer
        says to whoever reads them."""
        name = request.request_id
        with self._lock:
            taking = self._taking.pop(name, None)
            handing = self._handing.pop(name, None)
        if taking is not None and not taking.begun:
            self._daemon.send({"type": "cancel", "request": name})
        if handing is None:
            return False, None
        if whole and handing.ended and handing.descriptor is not None:
            params = {"do_remote_prefill": True, "do_remote_decode": False, KEY: handing.descriptor}
            return True, params
        self._daemon.send({"type": "cancel", "request": name})
        return handing.begun, None

    def _forget(self) -> list[str]:
        """Of all that is under way the KV does not go over; the names of those whose turn had not come."""
        with self._lock:
            for handing in self._handing.values():
                handing.refused, handing.descriptor = True, None
            waiting = [name for name, taking in self._taking.items() if not taking.begun]
            for request in waiting:
                del self._taking[request]
        return waiting

    def _due(self, name: str, handing: _Handing) -> Publish | None:
        if handing.descriptor is None or handing.ended or not handing.blocks:
            return None
        computed = min(handing.computed, handing.tokens)
        whole = computed >= handing.tokens
        # The last block is published partly filled.
        end = -(-handing.tokens // self._block_size) if whole else computed // self._block_size
        blocks = [(index, handing.blocks[index]) for index in range(handing.next, end)]
        if not blocks and not whole:
            return None
        handing.next, handing.ended, handing.begun = max(end, handing.next), whole, True
        return Publish(name, blocks, whole)

    def _give_up(self, name: str) -> None:
        """Its blocks are taken from it: what was published is withdrawn, and its reader computes the prompt."""
        handing = self._handing.get(name)
        if handing is None:
            return
        if handing.begun:
            # Refused or not, its blocks may be on their way out. The worker's half forgets it, and will not say when they have been copied.
            handing.begun = False
            self._dropped.append(name)
        if not handing.refused:
            handing.refused, handing.descriptor = True, None
            self._daemon.send({"type": "cancel", "request": name})


def _operation(params: dict[str, Any]) -> dict[str, str]:
    """By which a router asks the daemon for the descriptor while the prompt is computed; nothing where it is no id: what is here may be a
    client's."""
    said = params.get(KEY)
    operation = said.get("operation") if isinstance(said, dict) else None
    if isinstance(operation, str) and 0 < len(operation) <= LONGEST_OPERATION and operation.isascii():
        return {"operation": operation}
    return {}


def _plain(request: "Request") -> bool:
    """Whether the KV of the prompt follows from its tokens and its salt alone."""
    return request.lora_request is None and not request.mm_features and request.prompt_embeds is None
