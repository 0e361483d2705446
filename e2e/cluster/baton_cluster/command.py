"""The program `cluster`: what it can be asked for. Results go to standard output, what is going on to standard error."""

import argparse
import contextlib
import pathlib
import shlex
import sys
from collections.abc import Iterator

from . import cluster, control_plane, deployment, guard, images, inside, machine, network, node, programs, relay
from .failure import ClusterError, NotFetched
from .layout import DEFAULT, Layout


def main() -> int:
    asked = _parser().parse_args()
    try:
        return asked.run(asked) or 0
    except ClusterError as error:
        print(f"cluster: {error}", file=sys.stderr)
        return 1


def _tell(line: str) -> None:
    print(f"cluster: {line}", file=sys.stderr, flush=True)


def _build(asked) -> None:
    if asked.where_possible and (reason := machine.cannot("api-server")):
        _tell(f"nothing is built: {reason}")
        return
    with _skipped(asked, "Kubernetes"):
        print(programs.find(("etcd", "kube-apiserver", "kubectl"), _tell).folder)
    for name in asked.tools:
        if asked.where_possible and (reason := programs.cannot_have(name)):
            _tell(f"not built: {reason}")
            continue
        with _skipped(asked, name):
            print(programs.tool(name, _tell))


@contextlib.contextmanager
def _skipped(asked, what: str) -> Iterator[None]:
    """With --where-possible, what cannot be had from the network is left out: `can` says so to whoever wants it."""
    try:
        yield
    except NotFetched as error:
        if not asked.where_possible:
            raise
        _tell(f"skipped: {what} is not built: {error}")


def _can(asked) -> int:
    cannot = programs.cannot_have if asked.what in programs.TOOLS else machine.cannot
    if reason := cannot(asked.what) or programs.not_fetched(asked.what):
        print(reason)
        return 1
    return 0


def _up(asked) -> None:
    layout = Layout(asked.directory)
    cluster.up(layout, asked.nodes, asked.gpus, asked.owner, _tell)
    print(layout.kubeconfig)


def _down(asked) -> None:
    layout = Layout(asked.directory)
    _tell(f"ended; logs are in {layout.logs}" if cluster.down(layout) else f"there is no cluster in {layout.folder}")


def _env(asked) -> None:
    for name, value in cluster.environment(Layout(asked.directory)).items():
        print(f"export {name}={shlex.quote(value)}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="cluster", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run, about: str | None, folder: bool = True) -> argparse.ArgumentParser:
        # Without `about` it is for the program itself and not listed.
        made = commands.add_parser(name, help=about) if about else commands.add_parser(name)
        made.set_defaults(run=run)
        if folder:
            made.add_argument("--directory", type=pathlib.Path, default=DEFAULT, help="where the cluster keeps its state")
        return made

    build = command("build", _build, "builds the cluster's programs into the cache and prints their folder", folder=False)
    build.add_argument("tools", nargs="*", choices=[[], *programs.TOOLS], help="also helm, kwok")
    build.add_argument("--where-possible", action="store_true", help="say why and succeed on a machine that cannot")
    tool = command("tool", lambda asked: print(programs.tool(asked.name, _tell)), "builds one of them alone and prints its path", folder=False)
    tool.add_argument("name", choices=list(programs.TOOLS))
    can = command("can", _can, "exit status 1 and why, where this machine cannot have that", folder=False)
    can.add_argument("what", nargs="?", choices=[*machine.KINDS, *programs.TOOLS], default="control-plane")
    up = command("up", _up, "starts a cluster and prints its kubeconfig")
    up.add_argument("--nodes", type=int, default=0, help="0: a control plane alone, which needs no root")
    up.add_argument("--gpus", type=int, default=8, help="of each node, as nvidia.com/gpu in its status; no device is behind them")
    up.add_argument("--owner", type=int, metavar="PROCESS", help="end the cluster when this process has ended")
    command("down", _down, "ends the cluster and all that it started")
    command("env", _env, "lines to eval: KUBECONFIG, PATH, and where exposed Services are reached")
    load = command("load", lambda asked: node.load(Layout(asked.directory), asked.image, _tell), "imports images into every node")
    load.add_argument("image", nargs="+", type=pathlib.Path, metavar="TAR")
    image = command("image", _image, "makes an image of a program and of what it is linked to, for a test's own pods", folder=False)
    image.add_argument("name", help="as pods name it")
    image.add_argument("program", type=pathlib.Path)
    image.add_argument("inside", help="its path in the image")
    image.add_argument("target", type=pathlib.Path, metavar="TAR")
    for name, run, about in (
        ("node-down", lambda asked: cluster.node_down(Layout(asked.directory), asked.node), "loss of power: kills all on a node"),
        ("node-up", lambda asked: cluster.node_up(Layout(asked.directory), asked.node), "starts the node again and waits for it"),
        ("node-cut", lambda asked: network.cut(Layout(asked.directory), asked.node), "takes a node off the network; all on it goes on"),
        ("node-join", lambda asked: network.join(Layout(asked.directory), asked.node), "puts it back"),
    ):
        command(name, run, about).add_argument("node", type=int, metavar="NUMBER")
    command("restart-api-server", lambda asked: control_plane.restart_api_server(Layout(asked.directory)), "kills and starts it")
    expose = command("expose", _expose, "makes a Service's port reachable from this machine and prints its URL")
    expose.add_argument("variable", help="its name in `env`")
    expose.add_argument("service", metavar="NAMESPACE/SERVICE")
    expose.add_argument("port", help="by name or number")
    install = command("install", _install, "installs Baton's charts and prints the URL of the router")
    install.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a value of the chart baton")
    deploy = command("deploy", _deploy, "installs Baton's charts, applies a manifest, and asks it a question")
    deploy.add_argument("manifest", type=pathlib.Path)

    for name, run in (("_enter", inside.enter), ("_first", inside.first_process)):
        command(name, lambda asked, run=run: run(asked.config), None, folder=False).add_argument("config", type=pathlib.Path)
    guarded = command("_guard", lambda asked: guard.run(asked.owner, asked.id, lambda: Layout(asked.directory)), None)
    guarded.add_argument("owner", type=int)
    guarded.add_argument("id")
    relayed = command("_relay", lambda asked: relay.run(asked.descriptor, asked.target), None, folder=False)
    relayed.add_argument("descriptor", type=int)
    relayed.add_argument("target")
    return parser


def _expose(asked) -> None:
    namespace, _, service = asked.service.partition("/")
    print(cluster.expose(Layout(asked.directory), asked.variable, namespace, service, asked.port))


def _image(asked) -> None:
    images.linked(asked.name, asked.program, asked.inside, asked.target)


def _install(asked) -> None:
    layout = Layout(asked.directory)
    deployment.install(layout, [flag for value in asked.set for flag in ("--set", value)], _tell)
    print(deployment.reach(layout)[0])


def _deploy(asked) -> None:
    deployment.deploy(Layout(asked.directory), asked.manifest, _tell)
