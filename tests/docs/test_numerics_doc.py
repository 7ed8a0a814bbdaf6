"""docs/reference/numerics.md shows the table of tolerances that the tests use."""

from __future__ import annotations

import re
from pathlib import Path

from ort_dynamo.testing import TOLERANCES

TEXT = (Path(__file__).resolve().parent.parent.parent / "docs/reference/numerics.md").read_text()


def test_the_tolerances_are_the_ones_of_the_tests() -> None:
    said = {
        dtype: (float(relative), float(absolute))
        for dtype, relative, absolute in re.findall(r"^\| (\w+) \| (\S+) \| (\S+) \|$", TEXT, re.MULTILINE)
        if dtype != "dtype"
    }
    assert said == {str(dtype).removeprefix("torch."): (t.relative, t.absolute) for dtype, t in TOLERANCES.items()}
