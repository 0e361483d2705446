"""Real kubectl as the only client of the API server."""

import json
import subprocess

from .failure import ClusterError
from .layout import Layout


class Kubectl:
    def __init__(self, layout: Layout):
        self.command = [layout.program("kubectl"), f"--kubeconfig={layout.kubeconfig}"]

    def run(self, *arguments: str, input: str | None = None) -> str:
        done = subprocess.run([*self.command, *arguments], input=input, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise ClusterError(f"kubectl {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout

    def json(self, *arguments: str):
        return json.loads(self.run(*arguments, "--output=json"))

    def works(self, *arguments: str) -> str | None:
        """What kubectl complains of, or nothing."""
        try:
            self.run(*arguments)
        except ClusterError as error:
            return str(error)
        return None
