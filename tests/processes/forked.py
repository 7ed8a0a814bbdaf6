"""Run Python programs in processes that are forked from one that has imported torch.

Each costs a fork, where a new interpreter would spend three seconds on imports. Nothing of ours is imported before the
fork, so a program finds the backend, reads the environment and makes its sessions as in a process of its own.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO

__all__ = ["COMMANDS", "run_program"]

COMMANDS = "import runpy; runpy.run_module('ort_dynamo', run_name='__main__', alter_sys=True)"
"""The program of `python -m ort_dynamo`."""


def run_program(
    program: str | Path,
    *arguments: str,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    warnings: Sequence[str] = (),
    timeout: float = 600,
) -> subprocess.CompletedProcess[str]:
    """Run a program as `subprocess.run([sys.executable, …], capture_output=True, text=True)` does.

    A program with other variables for Python's or torch's start than the forked ones has a new interpreter.

    Args:
        program: its text, or its file.
        arguments: follow the program's name in sys.argv.
        cwd, env: its folder and its environment; by default those of this process.
        warnings: actions for all warnings, as after -W.
        timeout: seconds; a program that runs then is killed.

    Raises:
        subprocess.TimeoutExpired: it was killed.
    """
    environment = dict(os.environ if env is None else env)
    file = str(program) if isinstance(program, Path) else None
    if not hasattr(os, "fork") or _read_at_a_start(environment) != _server().variables:
        actions = [word for action in warnings for word in ("-W", action)]
        command = [sys.executable, *actions, *([file] if file else ["-c", str(program)]), *arguments]
        return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout)
    with tempfile.TemporaryDirectory() as folder:
        output, errors = Path(folder) / "output", Path(folder) / "errors"
        output.touch()
        errors.touch()
        request = {
            "argv": [file or "-c", *arguments],
            "cwd": str(cwd or Path.cwd()),
            "env": environment,
            "file": file,
            "folder": os.path.dirname(file) if file else "",
            "output": [str(output), str(errors)],
            "text": Path(file).read_text() if file else program,
            "warnings": list(warnings),
        }
        code = _answered(json.dumps(request), timeout)
        return subprocess.CompletedProcess(request["argv"], code, output.read_text(), errors.read_text())


def _read_at_a_start(environment: Mapping[str, str]) -> dict[str, str]:
    """Those variables that Python, OpenMP or torch reads before the fork."""
    begins = ("PYTHON", "OMP_", "MKL_", "TORCH", "PYTORCH")
    later = ("PYTHONPATH", "TORCHINDUCTOR_CACHE_DIR", "TORCH_LOGS")
    return {name: value for name, value in environment.items() if name.startswith(begins) and name not in later}


@dataclass(frozen=True)
class _Server:
    """A running fork_server.py, and those of its variables that are read before a fork."""

    requests: IO[bytes]
    answers: IO[bytes]
    variables: dict[str, str]


@cache
def _server() -> _Server:
    program = [sys.executable, str(Path(__file__).with_name("fork_server.py"))]
    process = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
    assert process.stdin is not None
    assert process.stdout is not None
    atexit.register(process.wait)
    atexit.register(process.stdin.close)  # which ends it
    return _Server(process.stdin, process.stdout, _read_at_a_start(os.environ))


def _answered(request: str, timeout: float) -> int:
    server = _server()
    server.requests.write(request.encode() + b"\n")
    child = int(server.answers.readline())
    if not select.select([server.answers], [], [], timeout)[0]:
        os.kill(child, signal.SIGKILL)
        server.answers.readline()
        raise subprocess.TimeoutExpired(request[:200], timeout)
    return int(server.answers.readline())
