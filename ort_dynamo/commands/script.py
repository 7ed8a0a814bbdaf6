"""Runs a program inside a command, as `python script.py` would."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

__all__ = [
    "ProgramRaisedError",
    "add_program",
    "check_module",
    "check_program",
    "given_program",
    "run_module",
    "run_script",
]


class ProgramRaisedError(Exception):
    """Carries an error of a program past those of the command that runs it.

    Args:
        error: the error.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


def add_program(parser: argparse.ArgumentParser, said: str) -> None:
    """Declare a program and its own arguments as one argument; between two, argparse would take a `--` for its own.

    Args:
        parser: the parser of a command.
        said: the help.
    """
    parser.add_argument("program", nargs=argparse.PARSER, metavar="script.py", help=said)


def given_program(arguments: argparse.Namespace) -> tuple[Path, list[str]]:
    """Return the program and its own arguments."""
    program = arguments.program
    first, *rest = program[1:] if program[0] == "--" else program  # which ends the options of the command
    return Path(first), rest


def check_program(script: Path) -> None:
    """Raise ProgramFileError unless a program can be read; a folder is one if it has a __main__.py."""
    from ort_dynamo.errors import ProgramFileError

    try:
        (script / "__main__.py" if script.is_dir() else script).open("rb").close()
    except OSError as error:
        raise ProgramFileError(path=script, error=error) from error


def check_module(name: Path) -> None:
    """Raise ProgramFileError unless there is a module of this name."""
    from ort_dynamo.errors import ProgramFileError

    try:
        found = importlib.util.find_spec(str(name))
    except ModuleNotFoundError as error:  # of a package around it
        raise ProgramFileError(path=name, error=error) from error
    if found is None:
        raise ProgramFileError(path=name, error=f"No module named {str(name)!r}")


def run_script(script: str | Path, arguments: Sequence[str]) -> int:
    """Run a program with its arguments, and return its exit status; raise ProgramRaisedError for its errors."""
    folder = str(Path(script).resolve().parent)
    sys.path.insert(0, folder)
    try:
        return _run(lambda: runpy.run_path(str(script), run_name="__main__"), [str(script), *arguments])
    finally:
        with contextlib.suppress(ValueError):  # the program may have removed it
            sys.path.remove(folder)


def run_module(name: str, arguments: Sequence[str]) -> int:
    """Run a module as `python -m name` would, and return its exit status; errors as of `run_script`."""
    return _run(lambda: runpy.run_module(name, run_name="__main__", alter_sys=True), [name, *arguments])


def _run(program: Callable[[], object], argv: list[str]) -> int:
    before, sys.argv = sys.argv, argv
    try:
        program()
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0
        print(ended.code, file=sys.stderr)
        return 1
    except Exception as error:
        raise ProgramRaisedError(error) from error
    finally:
        sys.argv = before
    return 0
