"""docs/reference/api.md agrees with the docstrings."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any, Literal

import pytest
from api_page import PAGE, described, entry, make_page, signature

import ort_dynamo


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="other Pythons write signatures otherwise")
def test_the_page_is_generated_from_the_docstrings() -> None:
    assert PAGE.read_text() == make_page(), "run `python .ci/api_page.py`"


def a_function(name: str, kind: bool | Literal["text"] = False, *, folder: str = "") -> list[str]:
    return []


@dataclasses.dataclass
class Data:
    found: dict[str, int] = dataclasses.field(default_factory=dict)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (a_function, "(name: str, kind: bool | Literal['text'] = False, *, folder: str = '') -> list[str]"),
        (Data, "(found: dict[str, int] = ...)"),
    ],
    ids=["function", "dataclass"],
)
def test_a_signature_is_that_of_the_sources(value: Any, text: str) -> None:
    assert signature(value) == text


def described_function() -> None:
    """Do it.

    Args:
        first: a file. Read the whole
            text: it is short.

    Returns:
        A number where the text
        has one: an int.
    """


def test_a_colon_in_a_continued_line_begins_no_item() -> None:
    text = described(described_function)
    assert "- `first`: a file. Read the whole\n  text: it is short." in text
    assert "**Returns**\n\nA number where the text\nhas one: an int." in text


def test_methods_that_torch_describes_are_named_alone() -> None:
    text = entry("ort_dynamo.ORTModule", ort_dynamo.ORTModule)
    assert "#### `ORTModule.cuda(" not in text
    assert "#### `ORTModule.forward(" in text
    assert "`cuda`" in text.rpartition("These methods do the same as torch's")[2]
