"""The program `vllm`: what it can be asked for. Results go to standard output, what is going on to standard error."""

import argparse
import pathlib
import subprocess
import sys

from . import install
from .failure import EngineError, NotHere

# What a caller tells apart from a failure: this machine cannot have the engine.
NOT_HERE = 3


def main() -> int:
    asked = _parser().parse_args()
    try:
        return asked.run(asked) or 0
    except NotHere as error:
        if getattr(asked, "where_possible", False):
            _tell(f"nothing is installed: {error}")
            return NOT_HERE
        print(f"vllm: {error}", file=sys.stderr)
        return NOT_HERE
    except EngineError as error:
        print(f"vllm: {error}", file=sys.stderr)
        return 1


def _tell(line: str) -> None:
    print(f"vllm: {line}", file=sys.stderr, flush=True)


def _install(asked) -> None:
    print(install.install(_tell))


def _model(asked) -> int:
    maker = pathlib.Path(__file__).with_name("tiny_llama.py")
    command = [install.python(), maker, asked.folder, "--seed", str(asked.seed)]
    return subprocess.run(command, timeout=install.STEP_TIMEOUT_SECONDS).returncode


def _path(asked) -> None:
    print(install.program())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="vllm", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    made = commands.add_parser("install", help=f"installs vLLM {install.VERSION} for CPUs (6 GB) and prints its program")
    made.add_argument("--where-possible", action="store_true", help="say in one line why not, on a machine that cannot")
    made.set_defaults(run=_install)
    model = commands.add_parser("model", help="makes a tiny random Llama with tokenizer and chat template")
    model.add_argument("folder", type=pathlib.Path)
    model.add_argument("--seed", type=int, default=0, help="of the weights; the tokenizer is the same for all")
    model.set_defaults(run=_model)
    commands.add_parser("path", help="prints the installed program").set_defaults(run=_path)
    return parser
