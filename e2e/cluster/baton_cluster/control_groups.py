"""A node's control groups: a folder of its own in each hierarchy, which becomes the root that the node sees.

Both forms are known: the hybrid one, where each controller has a hierarchy of version 1, and the unified one of version 2. Only the
hybrid one has been run so far.
"""

import contextlib
import os
import pathlib
import secrets
import subprocess
import time

ROOT = pathlib.Path("/sys/fs/cgroup")
# Of the unified form: without these kubelet starts no pod.
NEEDED = ("cpu", "cpuset", "memory", "pids")


def unified() -> bool:
    return (ROOT / "cgroup.controllers").exists()


def hierarchies() -> list[pathlib.Path]:
    return [ROOT] if unified() else sorted(folder for folder in ROOT.iterdir() if folder.is_dir() and not folder.is_symlink())


def cannot() -> str | None:
    """Why a node can have no groups here, in one line, or nothing: some are made, entered and removed, as a node's are."""
    trial = f"trial-{secrets.token_hex(3)}"
    try:
        made = create(trial, "node")
        for group in made:
            # A process that ends at once.
            entered = subprocess.run(["sh", "-c", f"echo $$ > {group}/cgroup.procs"], capture_output=True, text=True, check=False)
            if entered.returncode != 0:
                return f"nodes need control groups, and nobody may enter {group}: {entered.stderr.strip()}"
        if not unified():
            return None
        there = (made[0] / "cgroup.controllers").read_text().split()
        missing = [controller for controller in NEEDED if controller not in there]
        why = f"{ROOT} does not pass on, as one with processes of its own does not: that of a container, say"
        return f"nodes need the control group controllers {', '.join(missing)}, which {why}" if missing else None
    except OSError as error:
        return f"nodes need control groups of their own: {error}"
    finally:
        remove(trial)


def create(cluster: str, node: str) -> list[pathlib.Path]:
    """The node's folders; whoever writes its id into the cgroup.procs of each belongs to the node."""
    made = []
    for hierarchy in hierarchies():
        above = hierarchy / f"baton-{cluster}"
        for folder in (above, above / node):
            folder.mkdir(exist_ok=True)
            if hierarchy.name == "cpuset":
                # Empty until they are set, and nobody may enter an empty one.
                for file in ("cpuset.cpus", "cpuset.mems"):
                    (folder / file).write_text((folder.parent / file).read_text())
        if unified():
            for folder in (hierarchy, above):
                _pass_on(folder)
        made.append(above / node)
    return made


def _pass_on(folder: pathlib.Path) -> None:
    """Lets the folders below have every controller that this one has."""
    for controller in (folder / "cgroup.controllers").read_text().split():
        # Some cannot be passed on (a realtime process somewhere, a controller bound elsewhere): kubelet says what it misses.
        with contextlib.suppress(OSError):
            (folder / "cgroup.subtree_control").write_text(f"+{controller}")


def own_root() -> None:
    """In a node of the unified form: leaves the root to its children, because a group with processes passes no controller on."""
    first = ROOT / "init"
    first.mkdir(exist_ok=True)
    (first / "cgroup.procs").write_text(str(os.getpid()))
    _pass_on(ROOT)


def clear(cluster: str, node: str) -> None:
    """Removes what lies below a node that has ended: groups of dead pods make the next kubelet start slowly."""
    for hierarchy in hierarchies():
        _remove_below(hierarchy / f"baton-{cluster}" / node)


def remove(cluster: str) -> None:
    for hierarchy in hierarchies():
        folder = hierarchy / f"baton-{cluster}"
        if folder.exists():
            _remove_below(folder)
            _rmdir(folder)


def _remove_below(folder: pathlib.Path) -> None:
    for inner, folders, _ in os.walk(folder, topdown=False):
        for name in folders:
            _rmdir(pathlib.Path(inner) / name)


def _rmdir(folder: pathlib.Path) -> None:
    # The kernel lets go of a group a moment after its last process has died.
    for _ in range(100):
        try:
            folder.rmdir()
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.05)
        else:
            return
