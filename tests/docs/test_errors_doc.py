"""Tests of docs/reference/errors.md: it lists the errors of errors.py."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from ort_dynamo import errors
from ort_dynamo.errors import OrtDynamoError

TEXT = (Path(__file__).resolve().parent.parent.parent / "docs/reference/errors.md").read_text()


def listed() -> list[str]:
    return re.findall(r"^\| `(\w+)` \| .+ \| .+ \|$", TEXT, re.MULTILINE)


def test_every_public_error_is_listed_once_and_nothing_else() -> None:
    assert sorted(listed()) == sorted(errors.__all__)


def test_every_error_class_is_public() -> None:
    classes = [name for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, Exception)]
    assert sorted(classes) == sorted(errors.__all__)


def test_builtin_bases_of_errors_are_documented() -> None:
    for name in errors.__all__:
        bases = getattr(errors, name).__bases__
        (row,) = [line for line in TEXT.splitlines() if line.startswith(f"| `{name}` |")]
        for base in (ImportError, IndexError, ValueError):
            assert (base in bases) == (f"Also an `{base.__name__}`" in row or f"Also a `{base.__name__}`" in row), name
        assert issubclass(getattr(errors, name), OrtDynamoError)
