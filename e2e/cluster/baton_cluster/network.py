"""The network between control plane and nodes: a namespace each, a bridge in the control plane's, routes to every node's pods.

There is no way out of it: pods reach each other, Services and the API server, and nothing else. So the addresses may be the same in
every cluster; only the namespaces' names belong to the whole machine, and they carry the cluster's id.
"""

import pathlib
import subprocess

from .control_plane import ADDRESS, SERVICES
from .failure import ClusterError
from .layout import Layout


def address(node: int) -> str:
    return f"10.77.0.{10 + node}"


def pods(node: int) -> str:
    return f"10.244.{node}.0/24"


ALL_PODS = "10.244.0.0/16"


def create(layout: Layout) -> None:
    nodes = range(1, layout.cluster().nodes + 1)
    centre = layout.namespace("control-plane")
    _ip("netns", "add", centre)
    _ip("-n", centre, "link", "set", "lo", "up")
    _ip("-n", centre, "link", "add", "nodes", "type", "bridge")
    _ip("-n", centre, "addr", "add", f"{ADDRESS}/24", "dev", "nodes")
    _ip("-n", centre, "link", "set", "nodes", "up")
    # A packet needs a way before kube-proxy's rules give it its real target.
    _ip("-n", centre, "route", "add", SERVICES, "dev", "nodes")
    for node in nodes:
        own = layout.namespace(f"node-{node}")
        _ip("netns", "add", own)
        _ip("-n", own, "link", "set", "lo", "up")
        _ip("-n", centre, "link", "add", f"node-{node}", "type", "veth", "peer", "name", "eth0", "netns", own)
        _ip("-n", centre, "link", "set", f"node-{node}", "master", "nodes", "up")
        _ip("-n", own, "addr", "add", f"{address(node)}/24", "dev", "eth0")
        _ip("-n", own, "link", "set", "eth0", "up")
        _ip("-n", own, "route", "add", "default", "via", ADDRESS)
        _ip("-n", centre, "route", "add", pods(node), "via", address(node))
        for other in nodes:
            if other != node:
                _ip("-n", own, "route", "add", pods(other), "via", address(other))
        _set(own, "net/ipv4/ip_forward", "1")
        # Answers of a Service's pod may come by another way than the question went.
        _set(own, "net/ipv4/conf/all/rp_filter", "0")


def remove(layout: Layout) -> None:
    for namespace in pathlib.Path("/run/netns").glob(f"baton-{layout.cluster().id}-*"):
        _ip("netns", "del", namespace.name)


def cut(layout: Layout, node: int) -> None:
    """Takes a node off the network while all on it goes on."""
    _ip("-n", layout.namespace("control-plane"), "link", "set", f"node-{node}", "down")


def join(layout: Layout, node: int) -> None:
    _ip("-n", layout.namespace("control-plane"), "link", "set", f"node-{node}", "up")


def knows_service(layout: Layout, service: str) -> str | None:
    """What is in the way of reaching a Service's address from the control plane's namespace, or nothing."""
    inside = ["nsenter", f"--net=/run/netns/{layout.namespace('control-plane')}"]
    table = [*inside, "nft", "list", "table", "ip", "kube-proxy"]
    done = subprocess.run(table, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return done.stderr.strip()
    return None if f"{service} . " in done.stdout else f"no rule for {service}"


def _set(namespace: str, setting: str, value: str) -> None:
    _run(["nsenter", f"--net=/run/netns/{namespace}", "sh", "-c", f"echo {value} > /proc/sys/{setting}"])


def _ip(*arguments: str) -> None:
    _run(["ip", *arguments])


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ClusterError(f"{' '.join(command)}: {done.stderr.strip()}")
