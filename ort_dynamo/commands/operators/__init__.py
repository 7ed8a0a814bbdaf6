"""python -m ort_dynamo operators: the table of operators, docs/reference/operators.md, or some of its rows."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ort_dynamo.errors import InvalidArgumentError
from ort_dynamo.options.spelling import nearest

__all__ = ["SUMMARY", "add_arguments", "run"]

SUMMARY = "Print the table of operators: those that run in ONNX Runtime, are decomposed, or run in eager mode."

_PAGE = Path("docs/reference/operators.md")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("names", nargs="*", metavar="NAME", help="a part of operators' names, such as softmax")
    parser.add_argument("--fallback", action="store_true", help="list only operators that run in eager mode")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--write", action="store_true", help=f"write the table to {_PAGE}; run it in the root of a clone")
    what.add_argument("--check", action="store_true", help=f"check whether {_PAGE} is up to date")


def run(arguments: argparse.Namespace) -> int:
    """Print, write or check the table, or print some of its rows.

    Returns:
        0, or 1 if --check finds the page stale or missing, or no operator has one of the names.

    Raises:
        InvalidArgumentError: names or --fallback together with --write or --check.
    """
    from ort_dynamo.commands.operators.table import page

    if arguments.names or arguments.fallback:
        if arguments.write or arguments.check:
            expected = "neither names nor --fallback: the page has all operators"
            raise InvalidArgumentError(
                function="operators", name="--write or --check", value=arguments.names, expected=expected
            )
        return _print_rows(arguments.names, arguments.fallback)

    text = page()
    if arguments.write:
        _PAGE.write_text(text)
    elif not arguments.check:
        sys.stdout.write(text)
    elif not _PAGE.exists() or _PAGE.read_text() != text:
        print(f"{_PAGE} is stale: run python -m ort_dynamo operators --write", file=sys.stderr)
        return 1
    return 0


_WORDS = {
    "ours": "ONNX Runtime",
    "torch_lib": "ONNX Runtime, by onnxscript's lowering",
    "decomposed": "decomposed into other operators",
    "random": "torch by design: it generates random numbers",
    "eager": "eager mode (fallback)",
}


_LEGEND = {
    "?": "not known, since no test arguments could be generated from the schema",
    "composed": "the gradient consists of ordinary operators",
}
"""Dtypes or gradient of a row that need words -> the words, as on the page."""


def _print_rows(parts: list[str], fallback: bool) -> int:
    from ort_dynamo.commands.operators.table import names, rows

    explained = set()
    found = list(rows(parts, fallback=fallback))
    for row in found:
        explained |= {row.dtypes, row.gradient} & _LEGEND.keys()
        print(f"{row.overload}: {_WORDS[row.how]}")
        facts = {"dtypes": row.dtypes, "gradient": row.gradient, "note": row.notes}
        for name, value in facts.items():
            if value:
                print(f"  {name:9} {value}")
    for value in sorted(explained):
        print(f"{value}: {_LEGEND[value]}")
    known = names()
    unknown = [part for part in parts if not any(part in name for name in known)]
    words = {word for name in known for word in (name.split(".")[1], name.split(".")[1].strip("_"))}
    for part in unknown:
        print(f"No operator in the table has a name with {part!r}{nearest(part, words)}.", file=sys.stderr)
    if fallback and not found and not unknown:
        print("None of these operators runs in eager mode.")
    return int(bool(unknown))
