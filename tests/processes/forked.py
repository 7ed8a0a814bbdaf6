"""Run Python programs in processes that are forked from one that has imported torch.

Each costs a fork, where a new interpreter would spend three seconds on imports. Nothing of ours is imported before the
fork, so a program finds the backend, reads the environment and makes its sessions as in a process of its own.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

__all__ = ["run_forked"]


def run_forked(
    program: str | Path,
    *arguments: str,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    warnings: Sequence[str] = (),
    timeout: float = 600,
) -> subprocess.CompletedProcess[str]:
    """Run a program as `subprocess.run([sys.executable, …], capture_output=True, text=True)` does.

    Args:
        program: its text, or its file.
        arguments: follow the program's name in sys.argv.
        cwd, env: its folder and its environment; by default those of this process.
        warnings: actions for all warnings, as after -W.
        timeout: seconds; a program that runs then is killed.

    Raises:
        subprocess.TimeoutExpired: it was killed.
    """
    is_file = isinstance(program, Path)
    with tempfile.TemporaryDirectory() as folder:
        out, errors = Path(folder) / "out", Path(folder) / "errors"
        out.touch()
        errors.touch()
        request = {
            "argv": [str(program) if is_file else "-c", *arguments],
            "cwd": str(cwd or Path.cwd()),
            "env": dict(os.environ if env is None else env),
            "file": str(program) if is_file else None,
            "folder": str(program.parent) if is_file else "",
            "out": [str(out), str(errors)],
            "text": program.read_text() if is_file else program,
            "warnings": list(warnings),
        }
        code = _answered(json.dumps(request), timeout)
        return subprocess.CompletedProcess(request["argv"], code, out.read_text(), errors.read_text())


def _answered(request: str, timeout: float) -> int:
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(request.encode() + b"\n")
    child = int(server.stdout.readline())
    end = time.monotonic() + timeout
    if not select.select([server.stdout], [], [], max(end - time.monotonic(), 0))[0]:
        os.kill(child, 9)
        server.stdout.readline()
        raise subprocess.TimeoutExpired(request[:200], timeout)
    return int(server.stdout.readline())


@cache
def _server() -> subprocess.Popen[bytes]:
    program = [sys.executable, str(Path(__file__).with_name("fork_server.py"))]
    server = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)

    def end() -> None:
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.close()
        server.wait()
        server.stdout.close()

    atexit.register(end)
    return server
