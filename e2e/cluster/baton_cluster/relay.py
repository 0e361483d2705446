"""A port of loopback that leads into a cluster's network: listens outside, connects inside.

A socket belongs to the network namespace in which it was made. So the listening one is made here, and the process that accepts from
it is started in the other namespace, where the connections that it opens are made.
"""

import asyncio
import pathlib
import socket
import sys

from .layout import Layout

CHUNK = 1 << 16


def start(layout: Layout, name: str, namespace: str, target: str) -> str:
    """Starts a relay to ADDRESS:PORT as it is seen in that network namespace, and returns its own HOST:PORT."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(128)
        port = listening.getsockname()[1]
        program = pathlib.Path(__file__).resolve().parent.parent / "cluster"
        command = ["nsenter", f"--net=/run/netns/{namespace}", sys.executable, str(program), "_relay", str(listening.fileno()), target]
        layout.processes.start(name, command, keep_open=(listening.fileno(),))
    return f"127.0.0.1:{port}"


def run(descriptor: int, target: str) -> None:
    """What the started process does, until it is ended."""
    host, _, port = target.rpartition(":")

    async def serve() -> None:
        listening = socket.socket(fileno=descriptor)
        server = await asyncio.start_server(lambda reader, writer: _relay(reader, writer, host, int(port)), sock=listening)
        await server.serve_forever()

    asyncio.run(serve())


async def _relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str, port: int) -> None:
    try:
        inner_reader, inner_writer = await asyncio.open_connection(host, port)
    except OSError as error:
        print(f"{host}:{port}: {error}", file=sys.stderr, flush=True)
        writer.transport.abort()
        return
    try:
        await asyncio.gather(_copy(reader, inner_writer), _copy(inner_reader, writer))
    finally:
        # Whichever side failed, the other learns of it: a half that stays open would hold a client for ever.
        for end in (writer, inner_writer):
            end.close()


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    try:
        while chunk := await source.read(CHUNK):
            target.write(chunk)
            await target.drain()
        if target.can_write_eof():
            target.write_eof()
    except OSError:
        target.transport.abort()
