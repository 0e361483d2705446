"""What runs as a node: first in its network and control groups, then as process 1 of namespaces of its own.

A node has its own network, mounts, processes, host name, IPC and control groups. When process 1 is killed, the kernel kills all
that is on the node: that is a loss of power.
"""

import contextlib
import json
import os
import pathlib
import socket
import subprocess
import sys

from . import control_groups, wait


def enter(config: pathlib.Path) -> None:
    """Joins the node's control groups and becomes the program that makes its namespaces. Does not return."""
    node = json.loads(config.read_text())
    for group in node["groups"]:
        (pathlib.Path(group) / "cgroup.procs").write_text(str(os.getpid()))
    first = [sys.executable, sys.argv[0], "_first", str(config)]
    spaces = ["unshare", "--mount", "--uts", "--pid", "--ipc", "--cgroup", "--fork", "--kill-child=SIGKILL"]
    os.execvp("nsenter", ["nsenter", f"--net={node['network']}", *spaces, *first])


def first_process(config: pathlib.Path) -> None:
    """Mounts what a node has of its own, starts containerd, kubelet and kube-proxy, and reaps until it is killed."""
    node = json.loads(config.read_text())
    folder = pathlib.Path(node["folder"])
    # The socket module has it, os has not.
    socket.sethostname(node["name"])
    _mount("--make-rprivate", "/")
    _mount("-t", "proc", "proc", "/proc")
    _mount("-t", "sysfs", "sysfs", "/sys")
    _mount_control_groups(node["controllers"])
    _mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", "/run")
    for target in node["own"]:
        own = folder / target.strip("/").replace("/", "-")
        own.mkdir(exist_ok=True)
        pathlib.Path(target).mkdir(parents=True, exist_ok=True)
        _mount("--bind", str(own), target)
    # Mounts that kubelet makes for pods are seen by containerd's children.
    _mount("--make-rshared", "/")
    for name, command in node["programs"].items():
        with (folder / "logs" / f"{name}.log").open("ab") as log:
            subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        if name == "containerd":
            wait.until("containerd answers", 60, lambda: _containerd(node["containerd"]))
            for image in node["images"]:
                subprocess.run(["ctr", "-a", node["containerd"], "-n", "k8s.io", "images", "import", image], check=True)
    while True:
        # Orphans of the whole node come to process 1.
        with contextlib.suppress(ChildProcessError):
            id, status = os.wait()
            print(f"process {id} ended with status {status}", flush=True)


def _mount_control_groups(controllers: dict[str, str]) -> None:
    """The node's own view of the hierarchies: their roots are its groups."""
    if not controllers:
        _mount("-t", "cgroup2", "cgroup2", "/sys/fs/cgroup")
        control_groups.own_root()
        return
    _mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", "/sys/fs/cgroup")
    for name, kind in controllers.items():
        target = f"/sys/fs/cgroup/{name}"
        os.mkdir(target)
        if kind == "cgroup2":
            _mount("-t", "cgroup2", "cgroup2", target)
        else:
            _mount("-t", "cgroup", "-o", kind, "cgroup", target)


def _containerd(address: str) -> str | None:
    done = subprocess.run(["ctr", "-a", address, "version"], capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else done.stderr.strip()


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)
