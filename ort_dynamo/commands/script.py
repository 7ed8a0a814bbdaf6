"""Runs a program inside a command, as `python script.py` would."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["run_script"]


def run_script(script: Path, arguments: Sequence[str]) -> int:
    """Run a program with its arguments, and return its exit status; its exceptions are raised."""
    before, sys.argv = sys.argv, [str(script), *arguments]
    folder = str(script.resolve().parent)
    sys.path.insert(0, folder)
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0
        print(ended.code, file=sys.stderr)
        return 1
    finally:
        sys.argv = before
        sys.path.remove(folder)
    return 0
