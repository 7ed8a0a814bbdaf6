"""docs/reference/environment_variables.md lists the variables that the code reads."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = (ROOT / "docs/reference/environment_variables.md").read_text()
VARIABLE = re.compile(r"\bORT_DYNAMO_[A-Z_]+")


def test_every_variable_of_ours_is_on_the_page_and_no_other() -> None:
    sources = [path for folder in ("ort_dynamo", "passes") for path in (ROOT / folder).rglob("*.py")]
    read = {name for path in sources for name in VARIABLE.findall(path.read_text())}
    rows = re.findall(r"^\| `(ORT_DYNAMO_\w+)` \|", PAGE, re.MULTILINE)
    assert sorted(rows) == sorted(read)
    assert set(VARIABLE.findall(PAGE)) == read


def test_no_other_page_names_a_variable_that_nothing_reads() -> None:
    known = set(VARIABLE.findall(PAGE))
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        assert set(VARIABLE.findall(page.read_text())) <= known, page
