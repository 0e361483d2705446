"""A whole cluster: its start, its end, and what can happen to it meanwhile."""

import json
import os
import pathlib
import signal
from collections.abc import Callable

from . import control_groups, control_plane, guard, images, machine, network, node, programs, relay, wait
from .failure import ClusterError
from .kubectl import Kubectl
from .layout import Layout, REPOSITORY

# Kubelets set these, for the whole machine: it gets them back.
SETTINGS = [
    "vm/overcommit_memory",
    "vm/panic_on_oom",
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/keys/root_maxkeys",
    "kernel/keys/root_maxbytes",
]
CONTROL_PLANE_ONLY = ("etcd", "kube-apiserver", "kubectl")


def up(layout: Layout, nodes: int, gpus: int, owner: int | None, tell: Callable[[str], None]) -> None:
    """Starts a cluster and waits until it works. What fails half-way is ended again; its logs stay. With an owner, it ends when
    that process does."""
    if reason := machine.cannot("nodes" if nodes else "api-server"):
        raise ClusterError(reason)
    if not 0 <= nodes <= 200:
        raise ClusterError(f"{nodes} nodes: 0 to 200 can be had")
    found = programs.find(programs.SERVERS if nodes else CONTROL_PLANE_ONLY, tell)
    layout.create(found.folder, nodes, gpus)
    if owner is not None:
        guard.start(layout, owner)
    try:
        _start(layout, found.missing, tell)
    except BaseException:
        down(layout)
        raise


def _start(layout: Layout, missing: tuple[str, ...], tell: Callable[[str], None]) -> None:
    known = layout.cluster()
    kubectl = Kubectl(layout)
    _link_programs(layout)
    if known.nodes:
        known.settings = {name: pathlib.Path("/proc/sys", name).read_text().strip() for name in SETTINGS}
        layout.save()
        network.create(layout)
    control_plane.start(layout, missing)
    tell(f"API server at {known.server}")
    if without := [name for name in missing if name in control_plane.PARTS]:
        tell(f"without {' and '.join(without)}, which {known.programs} does not have: no pod is scheduled, no object collected")
    else:
        wait.until("controllers work", 120, lambda: kubectl.works("get", "serviceaccount", "default", "--namespace=default"))
    if known.nodes:
        _nodes(layout, kubectl)
        tell(f"{known.nodes} nodes are Ready")


def _nodes(layout: Layout, kubectl: Kubectl) -> None:
    numbers = list(range(1, layout.cluster().nodes + 1))
    images.static(node.PAUSE, pathlib.Path(layout.program("pause")), "/pause", layout.folder / "pause.tar")
    for number in numbers:
        node.prepare(layout, number)
        node.start(layout, number)
    kubectl.run("create", "clusterrolebinding", "kube-proxy", "--clusterrole=system:node-proxier", "--user=system:kube-proxy")
    _services(layout)
    node.ready(layout, numbers, kubectl, 120)


def _services(layout: Layout) -> None:
    """Makes Services reachable from the control plane's namespace, where relays from outside end. It is no node, which costs
    kube-proxy half a minute of looking for one at its start."""
    server = f"https://127.0.0.1:{control_plane.PORT}"
    layout.certificates.kubeconfig(layout.folder / "kube-proxy.kubeconfig", "kube-proxy", server)
    config = layout.folder / "kube-proxy.yaml"
    config.write_text(json.dumps(node.proxy(layout.folder / "kube-proxy.kubeconfig", "control-plane")))
    inside = ["nsenter", f"--net=/run/netns/{layout.namespace('control-plane')}"]
    layout.processes.start("kube-proxy", [*inside, layout.program("kube-proxy"), f"--config={config}"])


def _link_programs(layout: Layout) -> None:
    """What `env` puts in front of PATH."""
    layout.bin.mkdir()
    (layout.bin / "kubectl").symlink_to(layout.program("kubectl"))
    (layout.bin / "kubectl-baton").symlink_to(REPOSITORY / "target" / "release" / "baton")


def down(layout: Layout) -> bool:
    """Ends all that a cluster started, however far it came; False where there was none."""
    if not layout.known:
        return False
    known = layout.known
    running = list(layout.processes.running())
    nodes = [name for name in running if name.startswith("node-")]
    layout.processes.end(nodes, 30, signal.SIGKILL)
    parts = [name for name in control_plane.PARTS if name in running]
    layout.processes.end([name for name in running if name not in nodes and name not in parts], 5)
    layout.processes.end([name for name in parts if name != "etcd"], 20)
    layout.processes.end(parts, 20)
    if known.nodes:
        network.remove(layout)
        control_groups.remove(known.id)
        for name, value in known.settings.items():
            pathlib.Path("/proc/sys", name).write_text(value)
        _keep_logs_of_nodes(layout)
    layout.remove()
    return True


def _keep_logs_of_nodes(layout: Layout) -> None:
    for number in range(1, layout.cluster().nodes + 1):
        if (logs := layout.node(number) / "logs").exists():
            logs.rename(layout.logs / node.name(number))


def node_up(layout: Layout, number: int) -> None:
    _known_node(layout, number)
    network.join(layout, number)
    node.start(layout, number)
    node.ready(layout, [number], Kubectl(layout), 120)


def node_down(layout: Layout, number: int) -> None:
    _known_node(layout, number)
    node.lose_power(layout, number)


def _known_node(layout: Layout, number: int) -> None:
    if not 1 <= number <= layout.cluster().nodes:
        raise ClusterError(f"there is no node {number}: this cluster has {layout.cluster().nodes}")


def expose(layout: Layout, variable: str, namespace: str, service: str, port: str) -> str:
    """Makes a Service's port reachable from this machine, as the value of a variable of `env`."""
    if not layout.cluster().nodes:
        raise ClusterError("a control plane without nodes serves no Services")
    found = Kubectl(layout).json("get", "service", service, f"--namespace={namespace}")["spec"]
    numbers = [str(known["port"]) for known in found["ports"] if port in (known.get("name"), str(known["port"]))]
    if not numbers:
        raise ClusterError(f"Service {namespace}/{service} has no port {port}")
    wait.until("kube-proxy knows the Service", 90, lambda: network.knows_service(layout, found["clusterIP"]))
    name = f"relay-{variable.lower()}"
    layout.processes.end([name], 5)
    address = "http://" + relay.start(layout, name, layout.namespace("control-plane"), f"{found['clusterIP']}:{numbers[0]}")
    layout.cluster().exposed[variable] = address
    layout.save()
    return address


def environment(layout: Layout) -> dict[str, str]:
    """What a shell needs to work with the cluster."""
    known = layout.cluster()
    path = f"{layout.bin}{os.pathsep}{os.environ.get('PATH', '')}"
    return {"KUBECONFIG": str(layout.kubeconfig), "PATH": path} | known.exposed
