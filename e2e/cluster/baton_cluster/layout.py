"""One cluster's folder: what lies where in it, and what is known about the cluster between two commands."""

import json
import pathlib
import secrets
import shutil
from dataclasses import asdict, dataclass, field

from .certificates import Certificates
from .failure import ClusterError
from .processes import Processes

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent.parent.parent
DEFAULT = REPOSITORY / "target" / "cluster"


@dataclass
class Known:
    """What the next command has to know."""

    # In the names of everything that the whole machine shares: network namespaces, cgroups.
    id: str
    programs: str
    nodes: int
    gpus: int
    # The API server on loopback.
    server: str = ""
    # Variables of `env` beside KUBECONFIG and PATH: addresses of relays, and what is needed there.
    exposed: dict[str, str] = field(default_factory=dict)
    # Settings of the kernel as they were: kubelets change them for the whole machine.
    settings: dict[str, str] = field(default_factory=dict)


class Layout:
    """`known` is None where there is no cluster."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder.resolve()
        self.logs = self.folder / "logs"
        self.processes = Processes(self.folder / "processes.jsonl", self.logs)
        self.certificates = Certificates(self.folder / "certificates")
        self.kubeconfig = self.folder / "kubeconfig"
        self.audit = self.logs / "audit.jsonl"
        self.bin = self.folder / "bin"
        self._file = self.folder / "cluster.json"
        self.known = Known(**json.loads(self._file.read_text())) if self._file.exists() else None

    def create(self, programs: pathlib.Path, nodes: int, gpus: int) -> Known:
        if self.known:
            raise ClusterError(f"there is a cluster in {self.folder}: end it with `down --directory {self.folder}` first")
        shutil.rmtree(self.logs, ignore_errors=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o700)
        self.known = Known(secrets.token_hex(3), str(programs), nodes, gpus)
        self.save()
        return self.known

    def save(self) -> None:
        beside = self._file.with_suffix(".part")
        beside.write_text(json.dumps(asdict(self.known), indent=1) + "\n")
        beside.replace(self._file)

    def cluster(self) -> Known:
        if not self.known:
            raise ClusterError(f"there is no cluster in {self.folder}: start one with `up --directory {self.folder}`")
        return self.known

    def program(self, name: str) -> str:
        return str(pathlib.Path(self.cluster().programs) / name)

    def node(self, number: int) -> pathlib.Path:
        return self.folder / f"node-{number}"

    def namespace(self, of: str) -> str:
        """The network namespace of the control plane or of a node."""
        return f"baton-{self.cluster().id}-{of}"

    def remove(self) -> None:
        """All but the logs: they are looked at when something went wrong, and the next `up` replaces them."""
        for entry in self.folder.iterdir():
            if entry == self.logs:
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
        self.known = None
