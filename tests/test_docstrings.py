"""Docstrings begin with a verb or a subject."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

_WITHOUT_SUBJECT = re.compile(r"\s*(What|Whatever|Of|Whether|So|As|How|That)\b")
"""The first words of a clause that names no subject."""


def _strings(source: str) -> Iterator[ast.Constant]:
    """Yield the docstrings of modules, classes and functions, and the strings that follow assignments."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value


def _faults(source: str) -> list[int]:
    """Find the lines of docstrings that begin with a clause without a subject."""
    return [one.lineno for one in _strings(source) if _WITHOUT_SUBJECT.match(str(one.value))]


@pytest.mark.parametrize("folder", ["ort_dynamo", "passes"])
def test_docstrings_begin_with_a_subject_or_a_verb(folder: str) -> None:
    files = [file for file in sorted((ROOT / folder).rglob("*.py")) if "passes" not in file.relative_to(ROOT).parts[1:]]
    assert len(files) > 50
    found = [f"{file.relative_to(ROOT)}:{line}" for file in files for line in _faults(file.read_text())]
    assert not found, f"say who does what, or begin with a verb (Check whether, Give, Find): {', '.join(found)}"


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ('"""What a graph writes."""', [1]),
        ('class Cut:\n    """What a set of nodes means."""', [2]),
        ('def is_view(node):\n    r"""\n    Whether a node is a view."""', [2]),
        ('async def read():\n    """How it is read."""', [2]),
        ('class Cut:\n    kept: int = 0\n    """Of the forward."""', [3]),
        ('COUNT = 0\n"""So many."""\n', [2]),
        ('def check(node):\n    """Check whether a node is a view."""', []),
        ('"""Official."""\nname = "What"\nprint("Whether")', []),
    ],
)
def test_the_search_finds_each_kind_of_docstring(source: str, lines: list[int]) -> None:
    assert _faults(source) == lines
