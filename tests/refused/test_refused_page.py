"""docs/reference/refused.md agrees with the calls."""

from __future__ import annotations

import re

import pytest
import torch
from refused_programs import CALLS, LEFT
from write_page import PAGE, page


def test_the_page_is_up_to_date() -> None:
    text = PAGE.read_text()
    (version,) = re.findall(r"with torch ([\d.]+);", text)
    if version != torch.__version__.split("+")[0]:
        pytest.skip(f"the page speaks of torch {version}")
    assert page() == text, "run python tests/refused/write_page.py"


def test_the_known_differences_are_few_and_each_is_a_call() -> None:
    assert set(LEFT) <= {(call.operator, call.fault) for call in CALLS}
    assert len(LEFT) <= 10
