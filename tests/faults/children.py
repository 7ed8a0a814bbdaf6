"""Run a program in a process of its own, which a fault may end or change for good."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from forked import run_program

ROOT = Path(__file__).resolve().parents[2]


def ran(program: str, *arguments: str, inside: Sequence[str] = (), **variables: str) -> tuple[str, str]:
    """Run a program to its end, and give its stdout and stderr; any other end is an assertion error.

    Args:
        program: its text.
        arguments: its arguments.
        inside: a command that runs the rest of the command line, such as one that limits what it may do.
        variables: environment variables.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    if inside:
        command = [*inside, sys.executable, "-c", program, *arguments]
        done = subprocess.run(command, env=environment | variables, capture_output=True, text=True, timeout=3000)
    else:
        done = run_program(program, *arguments, env=environment | variables, timeout=3000)
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return done.stdout, done.stderr
