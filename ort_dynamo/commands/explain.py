"""python -m ort_dynamo explain: run a program, and explain the graphs that it compiles."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ort_dynamo.commands.script import (
    add_program,
    check_module,
    check_program,
    given_program,
    run_module,
    run_script,
)
from ort_dynamo.errors import InvalidArgumentError

if TYPE_CHECKING:
    from ort_dynamo.explanation.explanation import Explanation

__all__ = ["SUMMARY", "add_arguments", "run"]

SUMMARY = "Run a program, and tell where its compiled operators run, and where memory and compile time go."

_OWN = ("--html", "--json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--html", metavar="PAGE", type=Path, help="write a page that needs no other file")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the data")
    parser.add_argument("-m", dest="is_module", action="store_true", help="the program is a module: -m package.train")
    said = "the program and its own arguments; --html and --json may also stand first among these, and -- ends them"
    add_program(parser, said)


def run(arguments: argparse.Namespace) -> int:
    """Run the program, and print the explanation when it ends, also by an error.

    Returns:
        The program's own exit status; 2 if that is 0, and the page or the data cannot be written.

    Raises:
        ProgramFileError: the program is missing or cannot be read.
        InvalidArgumentError: an option has no value.
    """
    from ort_dynamo.explanation.script import observing

    script, rest = given_program(arguments)
    (check_module if arguments.is_module else check_program)(script)
    run_program = run_module if arguments.is_module else run_script
    given = _take_own(arguments, rest)
    with observing(script.name) as observed:
        try:
            status = run_program(str(script), given)
        except BaseException:  # the program's own error is raised, whatever becomes of the files
            _tell(observed.explanation(), arguments.html, arguments.json)
            raise
        is_written = _tell(observed.explanation(), arguments.html, arguments.json)
        return status if status or is_written else 2


def _take_own(arguments: argparse.Namespace, rest: list[str]) -> list[str]:
    """Take our options that follow the program directly, and return the program's arguments."""
    while rest and rest[0].partition("=")[0] in _OWN:
        name, is_joined, value = rest.pop(0).partition("=")
        if not is_joined:
            if not rest:
                raise InvalidArgumentError(function="explain", name=name, value="", expected="a file")
            value = rest.pop(0)
        setattr(arguments, name.removeprefix("--"), Path(value))
    return rest[1:] if rest[:1] == ["--"] else rest


def _tell(explanation: Explanation, page: Path | None, data: Path | None) -> bool:
    """Print the explanation and write its files; say on stderr which cannot be written, and return False then."""
    print(explanation)
    if not explanation.graphs and not explanation.summary.skipped:
        print('Does the program call torch.compile(..., backend="ort_train")?')

    def save_data(path: Path) -> None:
        path.write_text(json.dumps(explanation.to_dict(), indent=1), encoding="utf-8")

    is_written = True
    for name, path, save in (("page", page, explanation.save), ("data", data, save_data)):
        if path is None:
            continue
        try:
            save(path)
        except OSError as error:
            print(f"python -m ort_dynamo explain: error: Cannot write the {name}: {error}", file=sys.stderr)
            is_written = False
        else:
            print(f"The {name} is {path}.")
    return is_written
