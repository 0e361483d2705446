"""etcd, API server, controller-manager and scheduler as processes: on loopback, or in a network namespace beside nodes."""

import contextlib
import fcntl
import json
import os
import pathlib
import random
import signal
import socket
import ssl
import tempfile
import urllib.error
import urllib.request

from . import relay, wait
from .failure import ClusterError
from .layout import Layout

# Nothing outside the cluster's own namespaces sees these, so that two clusters may have the same.
ADDRESS = "10.77.0.1"
SERVICES = "10.96.0.0/16"
SERVICE = "10.96.0.1"
PORT = 6443
PARTS = ("kube-scheduler", "kube-controller-manager", "kube-apiserver", "etcd")
# A silent node is given up after this instead of 50 s. Kubelets say that they live every quarter of a lease; five of these may be missed.
GIVEN_UP_SECONDS = 30
LEASE_SECONDS = 20


def start(layout: Layout, programs_missing: tuple[str, ...]) -> None:
    """Starts all of it and waits until it answers. `layout.kubeconfig` is the administrator's."""
    alone = layout.cluster().nodes == 0
    with _ports() if alone else contextlib.nullcontext():
        _start(layout, programs_missing, alone)


@contextlib.contextmanager
def _ports():
    """One cluster at a time chooses ports of this machine: nobody holds one before the server does that it is chosen for."""
    lock = pathlib.Path(tempfile.gettempdir()) / f"baton-cluster-ports-{os.getuid()}.lock"
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _start(layout: Layout, programs_missing: tuple[str, ...], alone: bool) -> None:
    inside = [] if alone else ["nsenter", f"--net=/run/netns/{layout.namespace('control-plane')}"]
    port = _free_port() if alone else PORT
    layout.certificates.make(["127.0.0.1", SERVICE] + ([] if alone else [ADDRESS]))
    etcd = _etcd(layout, inside, alone)
    _api_server(layout, inside, etcd, port, alone)
    local = f"https://127.0.0.1:{port}"
    if alone:
        layout.cluster().server = local
    else:
        relayed = relay.start(layout, "relay-api-server", layout.namespace("control-plane"), f"127.0.0.1:{port}")
        layout.cluster().server = f"https://{relayed}"
    layout.save()
    layout.certificates.kubeconfig(layout.kubeconfig, "admin", layout.cluster().server)
    wait.until("the API server is ready", 120, lambda: _ready(layout), lambda: layout.processes.must_run("kube-apiserver"))
    if "kube-controller-manager" not in programs_missing:
        _controllers(layout, inside, local, alone)
    if "kube-scheduler" not in programs_missing:
        _scheduler(layout, inside, local, alone)


def restart_api_server(layout: Layout) -> None:
    """Ends the API server as a crash would and starts it again with the same command."""
    command = json.loads((layout.folder / "kube-apiserver.json").read_text())
    layout.processes.end(["kube-apiserver"], 30, signal.SIGKILL)
    layout.processes.start("kube-apiserver", command)
    wait.until("the API server is ready again", 120, lambda: _ready(layout), lambda: layout.processes.must_run("kube-apiserver"))


def _etcd(layout: Layout, inside: list[str], alone: bool) -> str:
    data = layout.folder / "etcd"
    data.mkdir(mode=0o700)
    clients, peers = (f"http://127.0.0.1:{_free_port()}" if alone else f"http://127.0.0.1:{port}" for port in (2379, 2380))
    layout.processes.start(
        "etcd",
        [*inside, layout.program("etcd"), "--name=baton", f"--data-dir={data}", "--unsafe-no-fsync", "--log-level=warn",
         f"--listen-client-urls={clients}", f"--advertise-client-urls={clients}", f"--listen-peer-urls={peers}",
         f"--initial-advertise-peer-urls={peers}", f"--initial-cluster=baton={peers}"],  # fmt: skip
    )
    # It is not waited for: the API server waits by itself.
    return clients


def _api_server(layout: Layout, inside: list[str], etcd: str, port: int, alone: bool) -> None:
    held = layout.certificates.path
    policy = layout.folder / "audit-policy.yaml"
    policy.write_text(json.dumps(AUDIT))
    command = [
        *inside,
        layout.program("kube-apiserver"),
        f"--etcd-servers={etcd}",
        f"--bind-address={'127.0.0.1' if alone else '0.0.0.0'}",
        f"--advertise-address={'127.0.0.1' if alone else ADDRESS}",
        f"--secure-port={port}",
        f"--endpoint-reconciler-type={'none' if alone else 'lease'}",
        f"--service-cluster-ip-range={SERVICES}",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        "--allow-privileged=true",
        f"--client-ca-file={held('ca.crt')}",
        f"--tls-cert-file={held('kube-apiserver.crt')}",
        f"--tls-private-key-file={held('kube-apiserver.key')}",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={held('service-accounts.pub')}",
        f"--service-account-signing-key-file={held('service-accounts.key')}",
        f"--kubelet-client-certificate={held('kubelet-client.crt')}",
        f"--kubelet-client-key={held('kubelet-client.key')}",
        f"--kubelet-certificate-authority={held('ca.crt')}",
        "--kubelet-preferred-address-types=InternalIP",
        f"--requestheader-client-ca-file={held('front-proxy-ca.crt')}",
        "--requestheader-allowed-names=front-proxy-client",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-username-headers=X-Remote-User",
        f"--proxy-client-cert-file={held('front-proxy-client.crt')}",
        f"--proxy-client-key-file={held('front-proxy-client.key')}",
        "--enable-aggregator-routing=true",
        f"--audit-policy-file={policy}",
        f"--audit-log-path={layout.audit}",
    ]
    (layout.folder / "kube-apiserver.json").write_text(json.dumps(command))
    layout.processes.start("kube-apiserver", command)


def _controllers(layout: Layout, inside: list[str], server: str, alone: bool) -> None:
    held = layout.certificates.path
    port = _free_port() if alone else 10257
    config = layout.certificates.kubeconfig(layout.folder / "kube-controller-manager.kubeconfig", "kube-controller-manager", server)
    layout.processes.start(
        "kube-controller-manager",
        [*inside, layout.program("kube-controller-manager"), *_client(config, port),
         "--use-service-account-credentials=true", "--allocate-node-cidrs=false", f"--root-ca-file={held('ca.crt')}",
         f"--service-account-private-key-file={held('service-accounts.key')}", f"--client-ca-file={held('ca.crt')}",
         f"--cluster-signing-cert-file={held('ca.crt')}", f"--cluster-signing-key-file={held('ca.key')}",
         f"--requestheader-client-ca-file={held('front-proxy-ca.crt')}",
         *([] if alone else [f"--node-monitor-grace-period={GIVEN_UP_SECONDS}s"])],  # fmt: skip
    )
    if alone:
        _listens(layout, "kube-controller-manager", port)


def _scheduler(layout: Layout, inside: list[str], server: str, alone: bool) -> None:
    config = layout.certificates.kubeconfig(layout.folder / "kube-scheduler.kubeconfig", "kube-scheduler", server)
    port = _free_port() if alone else 10259
    layout.processes.start("kube-scheduler", [*inside, layout.program("kube-scheduler"), *_client(config, port)])
    if alone:
        _listens(layout, "kube-scheduler", port)


def _listens(layout: Layout, name: str, port: int) -> None:
    """Waits until it has its port: from then on nobody else is given that."""

    def in_the_way() -> str | None:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1):
                return None
        except OSError as error:
            return str(error)

    wait.until(f"{name} listens on {port}", 60, in_the_way, lambda: layout.processes.must_run(name))


def _client(config: pathlib.Path, port: int) -> list[str]:
    return [
        f"--kubeconfig={config}",
        f"--authentication-kubeconfig={config}",
        f"--authorization-kubeconfig={config}",
        "--bind-address=127.0.0.1",
        f"--secure-port={port}",
        "--leader-elect=false",
    ]


def _ready(layout: Layout) -> str | None:
    """What is still in the way, or nothing."""
    held = layout.certificates.path
    trust = ssl.create_default_context(cafile=held("ca.crt"))
    trust.load_cert_chain(held("admin.crt"), held("admin.key"))
    try:
        with urllib.request.urlopen(f"{layout.cluster().server}/readyz", context=trust, timeout=5) as answer:
            return None if answer.status == 200 else f"status {answer.status}"
    except (urllib.error.URLError, OSError) as error:
        return str(error)


def _free_port() -> int:
    """One that is free now, and that is given to nobody who asks for any, nor to a child of `baton up`: a server that is started again
    has to find its own port free."""
    lowest_given = int(pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for port in random.sample(range(30_000, max(lowest_given, 30_100)), 50):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise ClusterError("no port of loopback is free: end what listens on 30000 and above")


# Every write, by whom and to what, without bodies: tests count what a quiet cluster writes.
AUDIT = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [{"level": "None", "verbs": ["get", "list", "watch"]}, {"level": "Metadata"}],
}
