"""Tests of the interface for front ends: all of it is documented."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from ort_dynamo import embedding

_PAGE = Path(__file__).parents[1] / "docs/internals/embedding.md"


@pytest.mark.parametrize("name", embedding.__all__)
def test_a_name_stands_on_the_page_and_has_a_docstring(name: str) -> None:
    assert f"`{name}`" in _PAGE.read_text()
    value = getattr(embedding, name)
    assert not callable(value) or inspect.getdoc(value)


def test_the_page_has_no_other_names() -> None:
    rows = [line.split("|")[1] for line in _PAGE.read_text().splitlines() if line.startswith("| `")]
    named = {part.strip().strip("`") for row in rows for part in row.split(",")}
    assert named <= set(embedding.__all__)
