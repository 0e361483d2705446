"""Ends a cluster when the process that wanted it has ended, however it ended: a killed test leaves nothing behind."""

import os
import select
import subprocess
import sys

from .layout import Layout


def start(layout: Layout, owner: int) -> None:
    """Starts the guard. It is none of the cluster's processes, because it has to outlive them."""
    command = [sys.executable, os.path.abspath(sys.argv[0]), "_guard", str(owner), layout.cluster().id, "--directory", str(layout.folder)]
    subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)


def run(owner: int, id: str, layout_of) -> None:
    try:
        descriptor = os.pidfd_open(owner)
    except ProcessLookupError:
        pass
    else:
        select.select([descriptor], [], [])
    from .cluster import down

    layout: Layout = layout_of()
    # It may have been ended in the usual way, and another may be there by now.
    if layout.known and layout.known.id == id:
        down(layout)
