"""python -m ort_dynamo operators: the table of operators, docs/reference/operators.md."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

__all__ = ["SUMMARY", "add_arguments", "run"]

SUMMARY = "Print the table of operators: what runs in ONNX Runtime, what is decomposed, what stays in eager."

_PAGE = Path("docs/reference/operators.md")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--write", action="store_true", help=f"write it to {_PAGE}, from the root of a clone")
    what.add_argument("--check", action="store_true", help=f"only say whether {_PAGE} is up to date")


def run(arguments: argparse.Namespace) -> int:
    """Print, write or check the table.

    Returns:
        0, or 1 if --check finds the page stale or missing.
    """
    from ort_dynamo.commands.operators.table import page

    text = page()
    if arguments.write:
        _PAGE.write_text(text)
    elif not arguments.check:
        sys.stdout.write(text)
    elif not _PAGE.exists() or _PAGE.read_text() != text:
        print(f"{_PAGE} is stale: run python -m ort_dynamo operators --write", file=sys.stderr)
        return 1
    return 0
