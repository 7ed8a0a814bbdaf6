"""docs/options.md says what ort_dynamo/options/groups.py says."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from ort_dynamo.options.groups import MODES, Options

ROOT = Path(__file__).resolve().parent.parent
COLUMNS = ("type", "default", "meaning", "group", "read by")


def fields() -> dict[str, tuple[str, dataclasses.Field[object]]]:
    """Option name -> its group's name and its field."""
    found = {}
    for group in dataclasses.fields(Options):
        for field in dataclasses.fields(getattr(Options(), group.name)):
            found[field.name] = (group.name, field)
    return found


def rows(heading: str) -> dict[str, list[str]]:
    """First cell, without backticks -> the other cells, of the table whose first column is called `heading`."""
    text = (ROOT / "docs/options.md").read_text()
    (table,) = re.findall(rf"^\| {heading} \|.*\n\|[-|]+\n((?:\|.*\n)+)", text, re.MULTILINE)
    cells = ([cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines())
    return {first.strip("` "): [cell.rstrip(" |") for cell in rest] for first, *rest in cells}


def test_every_option_is_in_the_table_and_nothing_else() -> None:
    assert list(rows("option")) == list(fields())


@pytest.mark.parametrize("name", fields())
def test_a_row_says_default_group_and_reader(name: str) -> None:
    row = dict(zip(COLUMNS, rows("option")[name], strict=True))
    group, field = fields()[name]
    assert row["default"] == f"`{field.default!r}`"
    assert row["group"] == f"`{group}`"
    reader = ROOT / row["read by"].strip("`")
    assert re.search(rf"options(\.\w+)?\.{name}\b", reader.read_text()), f"{reader} does not read it"


def test_every_mode_is_in_the_table_with_its_options() -> None:
    said = {name: cells[0] for name, cells in rows("mode").items()}
    expected = {
        name: ", ".join(f"`{option}={value!r}`".replace("'", '"') for option, value in options.items()) or "none"
        for name, options in MODES.items()
    }
    assert said == expected
