"""A daemon for tests: answers as the real one does, and keeps what it was given."""

import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

from baton_vllm.memory import Shape, Shared
from baton_vllm.wire import Decoder, Message, encode

DESCRIPTOR = {"version": 1, "lease": "00", "tokens": 10}


def until(what: str, holds: Callable[[], Any], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            raise AssertionError(what)
        time.sleep(0.005)


class FakeDaemon:
    """Serves both halves of a plug-in."""

    def __init__(self, block_bytes: int = 0) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.path = os.path.join(self._folder.name, "connector.sock")
        self.heard: list[Message] = []
        self.blocks: dict[tuple[str, int], bytes] = {}
        self.arena = Shared.inbox(Shape(8, block_bytes)) if block_bytes else None
        self.answers: dict[str, Callable[[Message], Message | None]] = {
            "open": lambda m: {"type": "opened", "request": m["request"], "firstBlock": 0, "descriptor": DESCRIPTOR},
        }
        self._inbox: Shared | None = None
        self._connections: list[socket.socket] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.path)
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def kinds(self) -> list[str]:
        return [message["type"] for message in self.heard]

    def cut(self) -> None:
        """Ends all connections, as a daemon that dies does."""
        connections, self._connections = self._connections, []
        for connection in connections:
            connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()
        self.cut()
        self._folder.cleanup()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        decoder = Decoder()
        while True:
            data, files, _, _ = socket.recv_fds(connection, 65536, 1)
            if not data:
                return
            for message in decoder.feed(data):
                self._act(connection, message, files)

    def _act(self, connection: socket.socket, message: Message, files: list[int]) -> None:
        self.heard.append(message)
        answer: Message | None = None
        match message["type"]:
            case "hello":
                self._welcome(connection, message, files)
            case "publish":
                assert self._inbox is not None
                self.blocks[message["request"], message["index"]] = bytes(self._inbox.piece(message["piece"]))
                answer = {"type": "taken", "piece": message["piece"]}
            case kind if kind in self.answers:
                answer = self.answers[kind](message)
        if answer is not None:
            connection.sendall(encode(answer))

    def _welcome(self, connection: socket.socket, hello: Message, files: list[int]) -> None:
        self._connections.append(connection)
        if hello["role"] == "scheduler":
            connection.sendall(encode({"type": "welcome", "arenaPieces": 0}))
            return
        assert self.arena is not None
        self._inbox = Shared(files[0], Shape(hello["inboxPieces"], hello["layout"]["blockBytes"]), writable=False)
        socket.send_fds(connection, [encode({"type": "welcome", "arenaPieces": self.arena.shape.pieces})], [self.arena.file])
