"""Baton on a cluster: its charts, a manifest, and a first answer through the router's Service."""

import base64
import json
import os
import pathlib
import shlex
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable

from . import cluster, programs, wait
from .failure import ClusterError
from .kubectl import Kubectl
from .layout import REPOSITORY, Layout

# Router and pools share it: a router serves the namespace that it is in.
NAMESPACE = "baton"
CHARTS = REPOSITORY / "charts"
ROUTER = "app.kubernetes.io/name=baton-router"
QUESTION = "What is the capital of France? Answer in one sentence."


def deploy(layout: Layout, manifest: pathlib.Path, tell: Callable[[str], None]) -> None:
    """Installs, applies, waits until all is Ready, asks, and says how to go on."""
    kubectl = Kubectl(layout)
    install(layout, [], tell)
    # Whoever works with this cluster works there.
    kubectl.run("config", "set-context", "--current", f"--namespace={NAMESPACE}")
    kubectl.run("apply", f"--filename={manifest}")
    tell(f"{manifest} is applied; waiting until pools and policy are Ready")
    within = ["--all", "--timeout=300s"]
    for kind in ("prefillpool", "decodepool", "routepolicy"):
        kubectl.run("wait", "--for=condition=Ready", kind, *within)
    url, admin = reach(layout)
    _keep_token(layout, kubectl)
    model = kubectl.json("get", "routepolicy", f"--namespace={NAMESPACE}")["items"][0]["spec"]["model"]
    answers: list[str] = []
    wait.until("the router's Service answers a chat request", 120, lambda: _ask(url, model, answers))
    said, run = answers
    tell(f"{model} says: {said.strip()}")
    print(_how_to_go_on(layout, url, admin, model, run))


def install(layout: Layout, values: list[str], tell: Callable[[str], None]) -> None:
    """Both charts, in the namespace that the router serves; `values` are helm's own --set flags."""
    helm = programs.tool("helm", tell)
    link = layout.bin / "helm"
    if not link.exists():
        link.symlink_to(helm)
    for chart, flags in (("baton-crds", []), ("baton", values)):
        command = [str(helm), "upgrade", "--install", chart, str(CHARTS / chart), f"--namespace={NAMESPACE}", "--create-namespace"]
        command += ["--wait", "--timeout=180s", *flags]
        done = subprocess.run(command, env=os.environ | cluster.environment(layout), capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise ClusterError(f"helm does not install {chart}: {done.stderr.strip()}")
        tell(f"chart {chart} is installed in namespace {NAMESPACE}")


def reach(layout: Layout) -> tuple[str, str]:
    """Makes the router's Services reachable from this machine: the URLs of its public and of its admin port."""
    found = Kubectl(layout).json("get", "service", f"--selector={ROUTER}", f"--namespace={NAMESPACE}")["items"]
    names = {port["name"]: service["metadata"]["name"] for service in found for port in service["spec"]["ports"]}
    wanted = (("URL", "http"), ("ADMIN", "admin"))
    for _, port in wanted:
        if port not in names:
            raise ClusterError(f"namespace {NAMESPACE} has no Service with the label {ROUTER} and a port {port}")
    url, admin = (cluster.expose(layout, f"BATON_{what}", NAMESPACE, names[port], port) for what, port in wanted)
    # What `baton ask` reads; the other commands read BATON_ADMIN.
    layout.cluster().exposed["BATON_ROUTER"] = url
    layout.save()
    return url, admin


def _keep_token(layout: Layout, kubectl: Kubectl) -> None:
    """Of the routers' admin port, as a file that `baton` reads; it goes with the cluster."""
    secret = kubectl.json("get", "secret", "baton-admin-token", f"--namespace={NAMESPACE}")
    file = layout.folder / "admin-token"
    file.touch(mode=0o600)
    file.write_bytes(base64.b64decode(secret["data"]["token"]))
    layout.cluster().exposed["BATON_ADMIN_TOKEN_FILE"] = str(file)
    layout.save()


def _ask(url: str, model: str, answers: list[str]) -> str | None:
    body = {"model": model, "max_tokens": 24, "messages": [{"role": "user", "content": QUESTION}]}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            answers[:] = [json.load(answer)["choices"][0]["message"]["content"], answer.headers["x-baton-run"]]
    except urllib.error.HTTPError as error:
        return f"status {error.code}: {error.read().decode(errors='replace')}"
    except OSError as error:
        return str(error)
    return None


def _how_to_go_on(layout: Layout, url: str, admin: str, model: str, run: str) -> str:
    program = pathlib.Path(__file__).resolve().parent.parent / "cluster"
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Write a short poem about the sea."}], "stream": True})
    return f"""
The cluster serves {model} at {url} (admin {admin}).

  eval "$(make -s cluster-env)"                 # KUBECONFIG, PATH with kubectl, helm and kubectl-baton, BATON_URL, BATON_ROUTER, BATON_ADMIN
  kubectl get pfp,dcp,rtp,pods
  kubectl baton explain {run}
  curl -N $BATON_URL/v1/chat/completions -H 'content-type: application/json' -d {shlex.quote(body)}

State and logs are in {layout.folder}; `make cluster-down` ends it. Nodes can lose power: {program} node-down 2, node-up 2."""
