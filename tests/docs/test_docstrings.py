"""Docstrings begin with a verb or a subject, and names of tests have one."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent

_WITHOUT_SUBJECT = re.compile(
    r"\s*(What|Whatever|Of|Whether|So|As|How|That|Where|Why|Which|When|Who|If)\b",
)
"""The first words of a clause that names no subject."""

_NAMED_WITHOUT_SUBJECT = re.compile(r"^\s*def (test_(?:\w+_)?what(?:ever)?(?:_\w+)?)\(", re.MULTILINE)
"""A test named by a clause, such as test_what_is_saved."""


def _strings(source: str) -> Iterator[ast.Constant]:
    """Yield the docstrings of modules, classes and functions, and the strings that follow assignments."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value


def _faults(source: str) -> list[int]:
    """Find the lines of docstrings that begin with a clause without a subject."""
    return [one.lineno for one in _strings(source) if _WITHOUT_SUBJECT.match(str(one.value))]


def _files(folder: str) -> list[Path]:
    """List the Python files of a folder, without those of links to other folders and of virtual environments."""
    files = sorted((ROOT / folder).rglob("*.py"))
    names = {file: file.relative_to(ROOT / folder).parts[0] for file in files}
    skipped = {name for name in names.values() if name.startswith("venv-") or (ROOT / folder / name).is_symlink()}
    return [file for file, name in names.items() if name not in skipped]


@pytest.mark.parametrize(
    ("folder", "count"),
    [("ort_dynamo", 200), ("passes", 50), ("tests", 200), ("bench", 20), (".ci", 5), ("examples", 5)],
)
def test_docstrings_begin_with_a_subject_or_a_verb(folder: str, count: int) -> None:
    files = _files(folder)
    assert len(files) > count
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
        ('"""Where a node runs."""', [1]),
        ('def reason(node):\n    """Why a node falls back."""', [2]),
        ('"""Which dtypes a kernel takes."""', [1]),
        ('class Mode:\n    """When weights decay."""', [2]),
        ('"""Who shares memory."""', [1]),
        ('"""If, Loop and Scan as modules."""', [1]),
        ('"""Tests of If, Loop and Scan."""', []),
        ('"""Whole graphs."""', []),
        ('def check(node):\n    """Check whether a node is a view."""', []),
        ('"""Official."""\nname = "What"\nprint("Whether")', []),
    ],
)
def test_the_search_finds_each_kind_of_docstring(source: str, lines: list[int]) -> None:
    assert _faults(source) == lines


@pytest.mark.parametrize(("folder", "count"), [("tests", 200), ("bench", 20)])
def test_names_of_tests_have_a_subject(folder: str, count: int) -> None:
    files = _files(folder)
    assert len(files) > count
    found = [
        f"{file.relative_to(ROOT)}: {name}"
        for file in files
        for name in _NAMED_WITHOUT_SUBJECT.findall(file.read_text())
    ]
    assert not found, f"name the subject (test_shared_tensor_is_saved_once): {', '.join(found)}"


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("def test_what_is_saved() -> None:", ["test_what_is_saved"]),
        ("def test_a_pass_ends_what_it_needs(x):", ["test_a_pass_ends_what_it_needs"]),
        ("def test_it_passes_whatever():", ["test_it_passes_whatever"]),
        ("def test_a_somewhat_large_tensor_is_saved():", []),
        ("def find_what_is_saved():", []),
    ],
)
def test_the_search_finds_names_without_a_subject(line: str, names: list[str]) -> None:
    assert _NAMED_WITHOUT_SUBJECT.findall(line) == names
