"""What this machine can: an API server needs little, a whole control plane the programs of one, nodes root on Linux and a few Debian
packages."""

import os
import pathlib
import platform
import shutil
import subprocess

from . import control_groups, programs

# By program, the Debian package that has it.
FOR_NODES = {
    "containerd": "containerd",
    "ctr": "containerd",
    "runc": "runc",
    "nft": "nftables",
    "ip": "iproute2",
    "conntrack": "conntrack",
    "nsenter": "util-linux",
    "unshare": "util-linux",
}

# What can be had, from the least: each needs all that the one before needs. `api-server` is etcd and an API server.
KINDS = ("api-server", "control-plane", "nodes")
# What makes an API server a control plane, where pods are scheduled and objects collected.
CONTROLLERS = ("kube-controller-manager", "kube-scheduler")


def cannot(kind: str) -> str | None:
    """Why there can be none of that kind here, in one line, or nothing."""
    if shutil.which("openssl") is None:
        return "openssl is missing"
    if assets := os.environ.get("KUBEBUILDER_ASSETS"):
        without = [name for name in CONTROLLERS if not os.access(pathlib.Path(assets) / name, os.X_OK)]
        if without and kind != "api-server":
            return f"KUBEBUILDER_ASSETS={assets} has no {' and no '.join(without)}, which schedule pods and collect objects: unset it, and they are built"
    else:
        version = programs.go_version()
        if version is None:
            return "Go is missing: install Go 1.26, or set KUBEBUILDER_ASSETS"
        if not version.startswith("go1.26."):
            # Kubernetes 1.36 built with 1.27 serves malformed OpenAPI documents, and older ones do not build it.
            return f"Kubernetes is built with Go 1.26, and this machine has {version}: install it, or set KUBEBUILDER_ASSETS"
    return _cannot_have_nodes() if kind == "nodes" else None


def _cannot_have_nodes() -> str | None:
    if platform.system() != "Linux":
        return "nodes are made of Linux namespaces"
    if os.environ.get("KUBEBUILDER_ASSETS"):
        return "KUBEBUILDER_ASSETS has no kubelet: unset it for a cluster with nodes"
    if os.geteuid() != 0:
        return "nodes need root"
    missing = {package for program, package in FOR_NODES.items() if shutil.which(program) is None}
    if not pathlib.Path("/usr/lib/cni/bridge").exists():
        missing.add("containernetworking-plugins")
    if missing:
        return f"nodes need {', '.join(sorted(missing))}: apt-get install --no-install-recommends {' '.join(sorted(missing))}"
    if not pathlib.Path("/sys/fs/cgroup").is_dir() or not os.access("/sys/fs/cgroup", os.W_OK):
        return "nodes need /sys/fs/cgroup to be writable"
    if reason := control_groups.cannot():
        return reason
    # Root of a container often may not: then it is no use to begin.
    tried = subprocess.run(
        ["unshare", "--net", "--mount", "--pid", "--uts", "--ipc", "--cgroup", "--fork", "--mount-proc", "true"],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        return f"nodes are made of namespaces, and root may make none here: {tried.stderr.strip() or 'unshare fails'}"
    return None
