"""The connection to the daemon, made again whenever it is lost. No caller ever waits for the daemon.

Two threads for a connection: one writes what is queued, one reads and tells the listener. Messages for a daemon that is not there are
dropped: whoever sent them hears `lost`, or has heard it, and does without.
"""

import logging
import os
import queue
import socket
import threading
from typing import Final, Protocol

from .wire import VERSION, Decoder, Message, ProtocolError, encode

CONNECT_TIMEOUT: Final = 5.0
RETRY_PAUSE: Final = 0.5
"""Seconds between two attempts: a daemon that was restarted is found within its first second."""
QUEUE: Final = 4096
"""Messages that wait to be written. The daemon answers within a millisecond; one that lets so many wait is taken for lost."""
READ: Final = 1 << 16

_log = logging.getLogger("vllm.baton")


class Listener(Protocol):
    """Who hears what comes. Called on the reading thread; must not wait long."""

    def hello(self) -> tuple[Message, int | None]:
        """The first message of a connection, and a file that goes with it."""

    def welcome(self, message: Message, file: int | None) -> None:
        """The daemon has accepted; `file` is for whoever hears this to close."""

    def heard(self, message: Message) -> None:
        """Any later message."""

    def lost(self) -> None:
        """The connection is gone, and with it all that the daemon knew. Once for each `welcome`."""


class Daemon:
    """A connection that repairs itself."""

    def __init__(self, path: str, listener: Listener, name: str) -> None:
        self._path = path
        self._listener = listener
        self._name = name
        self._stopped = threading.Event()
        self._outgoing: queue.Queue[bytes | None] | None = None
        self._socket: socket.socket | None = None
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=f"baton-{name}", daemon=True)

    def start(self) -> None:
        """Connects in the background."""
        self._thread.start()

    @property
    def connected(self) -> bool:
        """Whether a message sent now has somewhere to go."""
        return self._outgoing is not None

    def send(self, message: Message) -> bool:
        """Queues a message. False when there is no connection, one that does not take it, or when the message is longer than a frame."""
        try:
            frame = encode(message)
        except ProtocolError as error:
            # The caller does without, as it does without a daemon: this is the engine's own thread.
            _log.error("not said to the Baton daemon at %s: %s", self._path, error)
            return False
        with self._lock:
            outgoing = self._outgoing
            if outgoing is None:
                return False
            try:
                outgoing.put_nowait(frame)
                return True
            except queue.Full:
                pass
        _log.error("the Baton daemon at %s does not read: connection given up", self._path)
        self._break()
        return False

    def stop(self) -> None:
        """Closes the connection and ends its threads."""
        self._stopped.set()
        self._break()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout=CONNECT_TIMEOUT)

    def _break(self) -> None:
        connection = self._socket
        if connection is not None:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # It is closed already.

    def _run(self) -> None:
        told = False
        while not self._stopped.is_set():
            try:
                with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                    self._connected(connection)
                told = False
            except Exception as error:
                # Whatever it was: this thread is the only one that would ever connect again.
                if not told:
                    unforeseen = None if isinstance(error, (OSError, ProtocolError)) else error
                    text = "no Baton daemon at %s (%s): prompts are computed here until there is one"
                    _log.warning(text, self._path, error, exc_info=unforeseen)
                    told = True
            self._stopped.wait(RETRY_PAUSE)

    def _connected(self, connection: socket.socket) -> None:
        connection.settimeout(CONNECT_TIMEOUT)
        connection.connect(self._path)
        hello, file = self._listener.hello()
        frame = encode({"type": "hello", "version": VERSION, **hello})
        if file is None:
            connection.sendall(frame)
        else:
            sent = socket.send_fds(connection, [frame], [file])
            connection.sendall(frame[sent:])
        decoder = Decoder()
        first, files, rest = self._first(connection, decoder)
        if first["type"] != "welcome":
            for unused in files:
                os.close(unused)
            raise ProtocolError(first.get("why", f"{first['type']} came where welcome was due"))
        connection.settimeout(None)
        outgoing: queue.Queue[bytes | None] = queue.Queue(maxsize=QUEUE)
        self._listener.welcome(first, files[0] if files else None)
        with self._lock:
            self._socket, self._outgoing = connection, outgoing
        writer = threading.Thread(target=self._write, args=(connection, outgoing), name=f"baton-{self._name}-out", daemon=True)
        writer.start()
        _log.info("connected to the Baton daemon at %s", self._path)
        try:
            for message in rest:
                self._listener.heard(message)
            while not self._stopped.is_set() and (data := connection.recv(READ)):
                for message in decoder.feed(data):
                    self._listener.heard(message)
        finally:
            with self._lock:
                self._socket, self._outgoing = None, None
            try:
                self._end(connection, outgoing, writer)
            finally:
                self._listener.lost()

    @staticmethod
    def _first(connection: socket.socket, decoder: Decoder) -> tuple[Message, list[int], list[Message]]:
        files: list[int] = []
        while True:
            data, came, _, _ = socket.recv_fds(connection, READ, 1)
            files += came
            if not data:
                raise ProtocolError("the daemon closed the connection without a word")
            if messages := decoder.feed(data):
                return messages[0], files, messages[1:]

    @staticmethod
    def _write(connection: socket.socket, outgoing: "queue.Queue[bytes | None]") -> None:
        try:
            while (frame := outgoing.get()) is not None:
                connection.sendall(frame)
        except OSError:
            pass  # The reading thread sees the end too, and tells it.
        except Exception:
            # It does not: nothing would be written any more, and nobody would hear of that.
            _log.exception("a Baton daemon is not written to any more: connection given up")
            connection.shutdown(socket.SHUT_RDWR)

    @staticmethod
    def _end(connection: socket.socket, outgoing: "queue.Queue[bytes | None]", writer: threading.Thread) -> None:
        try:
            connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # The other end was faster.
        try:
            outgoing.put_nowait(None)
        except queue.Full:
            outgoing.get_nowait()
            outgoing.put_nowait(None)
        writer.join(timeout=CONNECT_TIMEOUT)
