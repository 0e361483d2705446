"""A node, seen from outside: the files that its programs read, its start, its loss of power and its return."""

import json
import os
import pathlib
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from . import control_groups, network, wait
from .control_plane import ADDRESS, LEASE_SECONDS, PORT
from .failure import ClusterError
from .kubectl import Kubectl
from .layout import Layout

CONTAINERD = "/run/containerd/containerd.sock"
# What a node must not share with the machine or with another node. /var/log: each kubelet clears away logs of pods it does not know.
OWN = ["/var/lib/kubelet", "/var/lib/containerd", "/var/lib/cni", "/var/log", "/etc/cni/net.d"]
PAUSE = "localhost/pause:1"
# Options of a cgroup mount that are not controllers.
OF_MOUNTS = ("rw", "nosuid", "nodev", "noexec", "relatime", "xattr", "clone_children")


def name(number: int) -> str:
    return f"node-{number}"


def prepare(layout: Layout, number: int) -> None:
    """Certificates and configuration of one node."""
    folder = layout.node(number)
    for inner in ("logs", "etc-cni-net.d"):
        (folder / inner).mkdir(parents=True, exist_ok=True)
    api_server = f"https://{ADDRESS}:{PORT}"
    subject = f"/O=system:nodes/CN=system:node:{name(number)}"
    layout.certificates.client(name(number), subject)
    layout.certificates.server(f"{name(number)}-serving", subject, [name(number)], [network.address(number)])
    layout.certificates.kubeconfig(folder / "kubelet.kubeconfig", name(number), api_server)
    layout.certificates.kubeconfig(folder / "kube-proxy.kubeconfig", "kube-proxy", api_server)
    (folder / "resolv.conf").write_text("")
    (folder / "containerd.toml").write_text(_containerd(folder))
    (folder / "etc-cni-net.d" / "10-pods.conflist").write_text(json.dumps(_pod_network(number)))
    (folder / "kubelet.yaml").write_text(json.dumps(_kubelet(layout, number)))
    (folder / "kube-proxy.yaml").write_text(json.dumps(proxy(folder / "kube-proxy.kubeconfig", name(number))))


def start(layout: Layout, number: int) -> None:
    """Starts the node; `ready` waits for it."""
    if name(number) in layout.processes.running():
        raise ClusterError(f"{name(number)} runs already")
    folder = layout.node(number)
    groups = control_groups.create(layout.cluster().id, name(number))
    # Addresses that pods of a former life held are free.
    for lease in (folder / "var-lib-cni").glob("networks/*/*"):
        lease.unlink()
    config = {
        "name": name(number),
        "folder": str(folder),
        "network": f"/run/netns/{layout.namespace(name(number))}",
        "groups": [str(group) for group in groups],
        "controllers": _controllers(),
        "own": OWN,
        "containerd": CONTAINERD,
        "images": [str(layout.folder / "pause.tar")],
        "programs": {
            "containerd": ["containerd", "--config", str(folder / "containerd.toml")],
            "kube-proxy": [layout.program("kube-proxy"), f"--config={folder / 'kube-proxy.yaml'}"],
            "kubelet": [
                layout.program("kubelet"),
                f"--config={folder / 'kubelet.yaml'}",
                f"--kubeconfig={folder / 'kubelet.kubeconfig'}",
                f"--hostname-override={name(number)}",
                f"--node-ip={network.address(number)}",
            ],
        },
    }
    file = folder / "node.json"
    file.write_text(json.dumps(config, indent=1))
    layout.processes.start(name(number), [sys.executable, _program(), "_enter", str(file)])


def ready(layout: Layout, numbers: list[int], kubectl: Kubectl, within: float) -> None:
    """Waits until the nodes are Ready, then gives them their GPUs and their place: a node that starts anew may have lost them."""

    def in_the_way() -> str | None:
        try:
            nodes = {node["metadata"]["name"]: node for node in kubectl.json("get", "nodes")["items"]}
        except ClusterError as error:
            # A busy API server now and then answers too late, which the next look need not meet.
            return str(error)
        if late := [name(number) for number in numbers if not _is_ready(nodes.get(name(number)))]:
            return f"{', '.join(late)} not Ready"
        # A node that has just come back is still said to be Ready from before.
        answers = [kubectl.works("get", "--raw", f"/api/v1/nodes/{name(number)}/proxy/healthz") for number in numbers]
        return next((answer for answer in answers if answer), None)

    def runs() -> None:
        for number in numbers:
            layout.processes.must_run(name(number))

    wait.until(f"{len(numbers)} nodes are Ready", within, in_the_way, runs)
    for number in numbers:
        kubectl.run("label", "--overwrite", "node", name(number), *(f"{key}={value}" for key, value in place(number).items()))
        if gpus := layout.cluster().gpus:
            patch = {"status": {"capacity": {"nvidia.com/gpu": str(gpus)}, "allocatable": {"nvidia.com/gpu": str(gpus)}}}
            kubectl.run("patch", "node", name(number), "--subresource=status", "--type=merge", "-p", json.dumps(patch))


def place(number: int) -> dict[str, str]:
    """Labels of a node's place: two nodes share a rack, all a zone; each has an NVLink clique of its own."""
    return {
        "topology.kubernetes.io/zone": "zone-1",
        "topology.kubernetes.io/rack": f"rack-{(number + 1) // 2}",
        "nvidia.com/gpu.clique": f"clique-{number}",
    }


def lose_power(layout: Layout, number: int) -> None:
    """Kills everything on the node at once."""
    layout.cluster()
    layout.processes.end([name(number)], 30, signal.SIGKILL)
    control_groups.clear(layout.cluster().id, name(number))


def load(layout: Layout, images: list[pathlib.Path], tell) -> None:
    """Imports images into every node that runs."""
    running = layout.processes.running()
    there = []
    for number in range(1, layout.cluster().nodes + 1):
        if name(number) in running:
            there.append((number, _first_process(running[name(number)])))
        else:
            tell(f"{name(number)} is down and gets no images")

    def take(node: tuple[int, str]) -> None:
        number, first = node
        for image in images:
            command = ["nsenter", "--target", first, "--mount", "--net", "--", "ctr", "-a", CONTAINERD, "-n", "k8s.io"]
            command += ["images", "import", str(image.resolve())]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise ClusterError(f"{name(number)} does not take {image}: {done.stderr.strip()}")

    # Two at a time, as a machine of two processors can; what one raises is raised.
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(take, there))


def proxy(config: pathlib.Path, host: str) -> dict:
    """kube-proxy's configuration, on a node and where Services are reached from outside."""
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "nftables",
        "clientConnection": {"kubeconfig": str(config)},
        "clusterCIDR": network.ALL_PODS,
        "hostnameOverride": host,
        "bindAddressHardFail": False,
        # Zero leaves the machine's own limits as they are: they are not the node's to change.
        "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
    }


def _kubelet(layout: Layout, number: int) -> dict:
    held = layout.certificates.path
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "failCgroupV1": False,
        "cgroupDriver": "cgroupfs",
        "failSwapOn": False,
        "containerRuntimeEndpoint": f"unix://{CONTAINERD}",
        "address": network.address(number),
        "healthzBindAddress": "127.0.0.1",
        "authentication": {"anonymous": {"enabled": False}, "webhook": {"enabled": True}, "x509": {"clientCAFile": held("ca.crt")}},
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": held(f"{name(number)}-serving.crt"),
        "tlsPrivateKeyFile": held(f"{name(number)}-serving.key"),
        # There is no DNS server: pods reach Services by address or by the variables that kubelet gives them. Without an address
        # here kubelet writes an event about it for each pod, again and again.
        "clusterDNS": ["10.96.0.10"],
        "clusterDomain": "cluster.local",
        "nodeLeaseDurationSeconds": LEASE_SECONDS,
        "resolvConf": str(layout.node(number) / "resolv.conf"),
        # The disk is the machine's: nothing on it is removed or evicted because somebody else fills it.
        "imageGCHighThresholdPercent": 100,
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
    }


def _containerd(folder: pathlib.Path) -> str:
    # An overlay cannot lie on an overlay, which is what a container's own root often is.
    kind = subprocess.run(["stat", "-f", "-c", "%T", str(folder)], capture_output=True, text=True, check=True).stdout.strip()
    return f"""version = 2
root = "/var/lib/containerd"
state = "/run/containerd"
[grpc]
  address = "{CONTAINERD}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE}"
  enable_unprivileged_ports = true
  # Where CAP_SYS_RESOURCE is withheld nobody may lower a score, and no pod would start.
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "{"native" if kind == "overlayfs" else "overlayfs"}"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        SystemdCgroup = false
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "/etc/cni/net.d"
"""


def _pod_network(number: int) -> dict:
    addresses = {"type": "host-local", "ranges": [[{"subnet": network.pods(number)}]], "routes": [{"dst": "0.0.0.0/0"}]}
    bridge = {"type": "bridge", "bridge": "pods", "isGateway": True, "hairpinMode": True, "ipMasq": False, "ipam": addresses}
    ports = {"type": "portmap", "capabilities": {"portMappings": True}}
    return {"cniVersion": "1.0.0", "name": "pods", "plugins": [bridge, ports]}


def _controllers() -> dict[str, str]:
    """By folder under /sys/fs/cgroup, what is to be mounted there; empty in the unified form."""
    if control_groups.unified():
        return {}
    kinds = {}
    for line in pathlib.Path("/proc/mounts").read_text().splitlines():
        _, where, kind, options, *_ = line.split()
        where = pathlib.Path(where)
        if where.parent == control_groups.ROOT and kind == "cgroup2":
            kinds[where.name] = "cgroup2"
        elif where.parent == control_groups.ROOT and kind == "cgroup":
            # Beside the controllers there are only options of the mount itself; a hierarchy without any has a name.
            named = [option for option in options.split(",") if option not in OF_MOUNTS and not option.startswith("release_agent")]
            kinds[where.name] = ",".join(named if not named[0].startswith("name=") else ["none", *named])
    return kinds


def _first_process(unshare: int) -> str:
    """The id of the node's process 1: the only child of the program that made its namespaces."""
    children = pathlib.Path(f"/proc/{unshare}/task/{unshare}/children").read_text().split()
    if not children:
        raise ClusterError(f"process {unshare} has made no node: see its log")
    return children[0]


def _is_ready(node: dict | None) -> bool:
    conditions = node["status"].get("conditions", []) if node else []
    return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)


def _program() -> str:
    return os.path.abspath(sys.argv[0])
