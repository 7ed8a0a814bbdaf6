"""docs/reference/api.md agrees with the docstrings."""

from __future__ import annotations

import sys

import pytest
from api_page import PAGE, make_page


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="other Pythons write signatures otherwise")
def test_the_page_is_generated_from_the_docstrings() -> None:
    assert PAGE.read_text() == make_page(), "run `python .ci/api_page.py`"
