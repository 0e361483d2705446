"""Who is who in a cluster: two authorities, a certificate for each server and client, kubeconfig files. By openssl."""

import base64
import json
import pathlib
import subprocess

from .failure import ClusterError

DAYS = "3650"
CLIENT = "keyUsage=digitalSignature\nextendedKeyUsage=clientAuth\n"
SERVER = "keyUsage=digitalSignature\nextendedKeyUsage=serverAuth\n"
NAMES = ["localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local"]


class Certificates:
    """Made in one folder that only its owner may read."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder

    def path(self, name: str) -> str:
        return str(self.folder / name)

    def make(self, addresses: list[str]) -> None:
        """The authorities, the API server's certificates for these addresses, and those of the control plane's clients."""
        self.folder.mkdir(parents=True)
        self.folder.chmod(0o700)
        for authority in ("ca", "front-proxy-ca"):
            self._key(authority)
            usage = "keyUsage=critical,digitalSignature,keyCertSign,cRLSign"
            self._openssl("req", "-x509", "-new", "-key", f"{authority}.key", "-subj", f"/CN={authority}", "-days", DAYS,
                          "-out", f"{authority}.crt", "-addext", usage)  # fmt: skip
        self._openssl("genrsa", "-out", "service-accounts.key", "2048")
        self._openssl("rsa", "-in", "service-accounts.key", "-pubout", "-out", "service-accounts.pub")
        self.server("kube-apiserver", "/CN=kube-apiserver", NAMES, addresses)
        self.client("kubelet-client", "/O=system:masters/CN=kube-apiserver-kubelet-client")
        self.client("front-proxy-client", "/CN=front-proxy-client", authority="front-proxy-ca")
        self.client("admin", "/O=system:masters/CN=admin")
        self.client("kube-controller-manager", "/CN=system:kube-controller-manager")
        self.client("kube-scheduler", "/CN=system:kube-scheduler")
        self.client("kube-proxy", "/CN=system:kube-proxy")

    def client(self, name: str, subject: str, authority: str = "ca") -> None:
        self._certificate(name, subject, CLIENT, authority)

    def server(self, name: str, subject: str, names: list[str], addresses: list[str]) -> None:
        known = ",".join([f"DNS:{name}" for name in names] + [f"IP:{address}" for address in addresses])
        self._certificate(name, subject, f"{SERVER}subjectAltName={known}\n", "ca")

    def kubeconfig(self, file: pathlib.Path, client: str, server: str) -> pathlib.Path:
        """A kubeconfig (JSON is YAML too) with everything in it, so that it can be copied anywhere."""

        def held(name: str) -> str:
            return base64.b64encode((self.folder / name).read_bytes()).decode()

        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "baton",
            "contexts": [{"name": "baton", "context": {"cluster": "baton", "user": client}}],
            "clusters": [{"name": "baton", "cluster": {"server": server, "certificate-authority-data": held("ca.crt")}}],
            "users": [
                {
                    "name": client,
                    "user": {"client-certificate-data": held(f"{client}.crt"), "client-key-data": held(f"{client}.key")},
                }
            ],
        }
        file.touch(mode=0o600)
        file.write_text(json.dumps(config, indent=1) + "\n")
        return file

    def _certificate(self, name: str, subject: str, extensions: str, authority: str) -> None:
        self._key(name)
        self._openssl("req", "-new", "-key", f"{name}.key", "-subj", subject, "-out", f"{name}.csr")
        (self.folder / f"{name}.ext").write_text(extensions)
        self._openssl("x509", "-req", "-in", f"{name}.csr", "-CA", f"{authority}.crt", "-CAkey", f"{authority}.key", "-CAcreateserial",
                      "-days", DAYS, "-extfile", f"{name}.ext", "-out", f"{name}.crt")  # fmt: skip

    def _key(self, name: str) -> None:
        self._openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", f"{name}.key")

    def _openssl(self, *arguments: str) -> None:
        done = subprocess.run(["openssl", *arguments], cwd=self.folder, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise ClusterError(f"openssl {' '.join(arguments)}: {done.stderr.strip()}")
