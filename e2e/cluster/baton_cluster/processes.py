"""Processes that outlive the command that started them, known by id and start time, ended by id.

A line of the file is written as soon as its process runs, so that whatever becomes of the command, the next one can end it. An id
whose start time differs belongs to somebody else by now and is left alone.
"""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import time

from .failure import ClusterError


class Processes:
    """Those of one cluster; `folder` gets their logs."""

    def __init__(self, file: pathlib.Path, folder: pathlib.Path):
        self.file = file
        self.folder = folder

    def start(self, name: str, command: list[str], keep_open: tuple[int, ...] = (), environment: dict | None = None) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with self.log(name).open("ab") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=keep_open,
                env=environment,
            )
        with self.file.open("a") as file:
            file.write(json.dumps({"name": name, "id": process.pid, "started": _started(process.pid)}) + "\n")
        # It is looked after by the file from here on; Popen would complain about a child that it still owns.
        process.returncode = 0

    def log(self, name: str) -> pathlib.Path:
        return self.folder / f"{name}.log"

    def running(self) -> dict[str, int]:
        """By name, the ids of those that run."""
        return {entry["name"]: entry["id"] for entry in self._entries() if _is(entry)}

    def must_run(self, name: str) -> None:
        """An error with the end of its log where it has ended: nobody waits for the answer of a dead server."""
        if name not in self.running():
            raise ClusterError(f"{name} has ended; the end of {self.log(name)}:\n{tail(self.log(name))}")

    def end(self, names: list[str], patience: float, how: signal.Signals = signal.SIGTERM) -> None:
        """Asks them to end, the last started first, and kills those that have not when patience is over."""
        entries = [entry for entry in reversed(self._entries()) if entry["name"] in names]
        for entry in entries:
            _signal(entry, how)
        deadline = time.monotonic() + patience
        while any(_is(entry) for entry in entries):
            if time.monotonic() > deadline:
                for entry in entries:
                    _signal(entry, signal.SIGKILL)
                deadline += patience
            time.sleep(0.02)
        kept = [entry for entry in self._entries() if entry["name"] not in names]
        self.file.write_text("".join(json.dumps(entry) + "\n" for entry in kept))

    def _entries(self) -> list[dict]:
        if not self.file.exists():
            return []
        return [json.loads(line) for line in self.file.read_text().splitlines()]


def tail(file: pathlib.Path, lines: int = 15) -> str:
    return "\n".join(file.read_text(errors="replace").splitlines()[-lines:]) if file.exists() else ""


def _started(id: int) -> str | None:
    """Field 22 of its stat: clock ticks between boot and its start. None where it has ended; a zombie has."""
    try:
        fields = pathlib.Path(f"/proc/{id}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" and not _threads_run(id) else fields[19]


def _threads_run(id: int) -> bool:
    """A process that was killed is a zombie from the end of its first thread on, and holds its ports until that of its last."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        states = (task.read_text().rpartition(")")[2].split()[0] for task in pathlib.Path(f"/proc/{id}/task").glob("*/stat"))
        return any(state not in "ZX" for state in states)
    return False


def _is(entry: dict) -> bool:
    with contextlib.suppress(ChildProcessError):
        # One that this very command started is its child and stays a zombie until it is waited for.
        os.waitpid(entry["id"], os.WNOHANG)
    return entry["started"] is not None and _started(entry["id"]) == entry["started"]


def _signal(entry: dict, how: signal.Signals) -> None:
    if _is(entry):
        with contextlib.suppress(ProcessLookupError):
            os.kill(entry["id"], how)
