"""Tests of docs/reference/options.md: it matches ort_dynamo/options/."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from ort_dynamo.options.groups import MODES, Options
from ort_dynamo.options.public import _CASTS, DEBUG, DEPRECATED, OPTIONS

ROOT = Path(__file__).resolve().parent.parent.parent
DEFAULTS = {
    "cast_strategy": "propagate_cast_ops_strategy",
    "threads": "intra_op_num_threads",
    "verify": "verified_calls",
    "cache": "disk_cache",
}
"""Option -> the field whose default it has, where that has another name."""


def defaults() -> dict[str, object]:
    """Field of a group -> its default."""
    groups = [getattr(Options(), group.name) for group in dataclasses.fields(Options)]
    return {field.name: field.default for group in groups for field in dataclasses.fields(group)}


def rows(title: str, heading: str) -> dict[str, list[str]]:
    """First cell, without backticks -> the other cells, of the table in a section whose first column is `heading`."""
    text = (ROOT / "docs/reference/options.md").read_text()
    (section,) = re.findall(rf"^#+ {title}\n(.*?)(?=^#|\Z)", text, re.MULTILINE | re.DOTALL)
    (table,) = re.findall(rf"^\| {heading} \|.*\n\|[-|]+\n((?:\|.*\n)+)", section, re.MULTILINE)
    cells = ([cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines())
    return {first.strip("` "): [cell.rstrip(" |") for cell in rest] for first, *rest in cells}


@pytest.mark.parametrize(
    ("title", "heading", "names"),
    [
        ("All options", "option", OPTIONS),
        ("Cast strategy", "key", _CASTS),
        ("Debug", "key", DEBUG),
        ("Names of earlier releases", "name", DEPRECATED),
        ("Modes", "mode", MODES),
    ],
)
def test_a_table_has_every_name_and_nothing_else(title: str, heading: str, names: object) -> None:
    assert list(rows(title, heading)) == list(names)  # type: ignore[call-overload]


def shown(default: object) -> str:
    """Spell a default as the page does: an empty tuple stands for a list or dict of the user's, or a text."""
    return "none" if default == () else f"`{default!r}`"


def test_a_row_says_the_default() -> None:
    of = defaults()
    for name, (_, default, _) in rows("All options", "option").items():
        assert default == ("`{}`" if name == "debug" else shown(of[DEFAULTS.get(name, name)])), name
    for key, (_, default, _) in rows("Cast strategy", "key").items():
        assert default == shown(of[_CASTS[key]]), key
    for key, (_, default, _) in rows("Debug", "key").items():
        assert default == shown(of[key]), key


def test_every_option_has_an_example() -> None:
    text = (ROOT / "docs/reference/options.md").read_text()
    (program,) = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    examples = re.findall(r'^    \{"(\w+)": .*\},  # ', program, re.MULTILINE)
    assert list(dict.fromkeys(examples)) == list(OPTIONS)


def test_every_field_has_an_option() -> None:
    set_by_options = {*OPTIONS, *DEFAULTS.values(), *_CASTS.values(), *DEBUG, *DEPRECATED}
    assert defaults().keys() <= set_by_options


def test_a_name_of_an_earlier_release_says_its_new_one() -> None:
    assert {name: cells[0] for name, cells in rows("Names of earlier releases", "name").items()} == {
        name: f"`{new}`" for name, new in DEPRECATED.items()
    }


def test_every_mode_is_in_the_table_with_its_options() -> None:
    said = {name: cells[0] for name, cells in rows("Modes", "mode").items()}
    expected = {
        name: ", ".join(f"`{option}={value!r}`".replace("'", '"') for option, value in options.items()) or "none"
        for name, options in MODES.items()
    }
    assert said == expected


def test_nothing_of_ours_uses_a_name_of_an_earlier_release() -> None:
    old = "|".join(name for name in DEPRECATED if name not in (*DEBUG, "provider_options"))  # which are keys
    used = re.compile(rf'"({old})":')
    fields = (
        "tests/training",
        "tests/options",
        "tests/passes",
        "tests/docs/test_options_doc.py",
        "docs/reference/options.md",
        "docs/migrating",
    )
    found = {
        f"{path.relative_to(ROOT)}: {match[0]}"
        for folder in ("tests", "bench", "examples", "docs")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".md") and not path.relative_to(ROOT).as_posix().startswith(fields)
        for match in used.finditer(path.read_text())
    }
    assert not found
