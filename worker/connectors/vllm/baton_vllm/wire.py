"""What is said between this plug-in and the daemon, as bytes: frames of a length (4 bytes, little endian) and that many of JSON.

The daemon's half is `worker/src/connector/message.rs`; a message has a field `type`. Pure: no socket here.
"""

import json
import struct
from typing import Any, Final

VERSION: Final = 1
"""Of the protocol. The daemon refuses another one in words."""

LONGEST_FRAME: Final = 16 << 20
"""Bytes. A prompt of a million tokens takes half of it."""

Message = dict[str, Any]
_LENGTH = struct.Struct("<I")


class ProtocolError(Exception):
    """The other end does not speak this protocol."""


def encode(message: Message) -> bytes:
    """One frame. A message that is longer than the daemon reads is an error here."""
    body = json.dumps(message, separators=(",", ":")).encode()
    if len(body) > LONGEST_FRAME:
        raise ProtocolError(f"{message.get('type')}: {len(body)} bytes, a frame has at most {LONGEST_FRAME}")
    return _LENGTH.pack(len(body)) + body


class Decoder:
    """Cuts a stream of bytes into messages."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """The messages that are whole now."""
        self._bytes += data
        messages: list[Message] = []
        while len(self._bytes) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._bytes)
            if length > LONGEST_FRAME:
                raise ProtocolError(f"a frame of {length} bytes came, it has at most {LONGEST_FRAME}")
            end = _LENGTH.size + length
            if len(self._bytes) < end:
                break
            messages.append(self._message(bytes(self._bytes[_LENGTH.size : end])))
            del self._bytes[:end]
        return messages

    @staticmethod
    def _message(body: bytes) -> Message:
        try:
            message = json.loads(body)
        except ValueError as error:
            raise ProtocolError(f"no JSON came: {error}") from error
        if not isinstance(message, dict) or not isinstance(message.get("type"), str):
            raise ProtocolError("a message without a type came")
        return message
