"""The pages are plain English: short sentences with a subject, in the field's words."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GENERATED = {"api", "operators", "operator_sweep", "architectures"}
"""Pages that are tables for the most part; their sentences come from docstrings and from scripts."""

PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page.stem not in GENERATED),
]
FOR_USERS = [
    page for page in PAGES if page.parent == ROOT or page.parent.name in ("docs", "start", "how_to", "reference")
]

_LONGEST_AVERAGE = 25
"""Words of a sentence, on average over a page."""

_FENCE = re.compile(r"^(```+|:::+).*?^\1\s*$", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^#.*$", re.MULTILINE)
_ROW = re.compile(r"^\s*\|.*$", re.MULTILINE)
_ITEM = re.compile(r"^\s*(?:[-*]|\d+\.)\s+", re.MULTILINE)
_CODE = re.compile(r"`[^`]*`")
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
_END = re.compile(r"(?<=[.!?:;])[\s\"*)]+(?=[A-Z`\"(*])|\n\s*\n")

_FIRST_WORDS = re.compile(r"[\"*(]*(What|Whatever|Of|That which)\b(?!.*\?$)")
"""A sentence that begins so has no subject; a question has a mark at its end."""

_HOUSE_WORDS = {
    r"\bmade again\b": "recompute",
    r"\blaid out\b": "memory layout",
    r"\btrial\b": "probe",
    r"\bdraws?\b|\bdrawn\b": "random numbers, random op",
    r"\b(forward|backward|either|each|both) hal(f|ves)\b": "forward graph, backward graph",
    r"\bnative nodes?\b": "in ONNX Runtime",
    r"\bsave for\b(?! (the|later|it))": "except for",
    r"\bsay,|, say\b": "for example",
    r"\bwants? to be\b": "should be",
}
"""A word of this house -> the field's word, on pages for users."""


def prose(page: Path) -> str:
    """Give a page's paragraphs and list items, without code, tables and headings."""
    text = _FENCE.sub("\n\n", page.read_text())
    for unread in (_HEADING, _ROW):
        text = unread.sub("\n", text)
    text = _ITEM.sub("\n\n", text)
    return _LINK.sub(r"\1", _CODE.sub("`code`", text))


def cells(page: Path) -> list[str]:
    """Give the cells of a page's tables."""
    rows = _ROW.findall(_FENCE.sub("\n\n", page.read_text()))
    return [cell.strip() for row in rows for cell in _CODE.sub("`code`", row).split("|") if cell.strip()]


def sentences(text: str) -> list[str]:
    """Split prose at ends of sentences, colons and semicolons, and between paragraphs."""
    found = (" ".join(one.split()) for one in _END.split(text))
    return [one for one in found if len(one.split()) > 1]


def _named(pages: list[Path]) -> list[object]:
    return [pytest.param(page, id=str(page.relative_to(ROOT))) for page in pages]


@pytest.mark.parametrize("page", _named(PAGES))
def test_sentences_are_short_and_have_a_subject(page: Path) -> None:
    found = sentences(prose(page))
    quoted = [] if page.stem == "CONTRIBUTING" else cells(page)  # whose table has sentences to avoid
    without = [one for one in [*found, *quoted] if _FIRST_WORDS.match(one)]
    assert not without, "\n".join(without)
    average = sum(len(one.split()) for one in found) / max(len(found), 1)
    longest = sorted(found, key=lambda one: -len(one.split()))[:5]
    assert average <= _LONGEST_AVERAGE, f"{average:.1f} words a sentence; the longest:\n" + "\n".join(longest)


@pytest.mark.parametrize("page", _named(FOR_USERS))
def test_a_page_for_users_has_the_words_of_the_field(page: Path) -> None:
    text = prose(page)
    found = [f"{match[0]!r}: {better}" for word, better in _HOUSE_WORDS.items() for match in re.finditer(word, text)]
    assert not found, "\n".join(found)


def test_a_linter_of_prose_finds_nothing(tmp_path: Path) -> None:
    copies = []
    for page in PAGES:
        copy = tmp_path / "-".join(page.relative_to(ROOT).parts)
        copy.write_text(prose(page))
        copies.append(copy)
    command = [sys.executable, "-m", "proselint", "--config", ROOT / ".proselintrc.json", "check", *copies]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("text", "count", "faults"),
    [
        ("One sentence. Another `one.two` here.", 2, 0),
        ("What torch computes is written.", 1, 1),
        ("What do I do?", 1, 0),
        ("Of processes that want it, one builds it.", 1, 1),
        ("A list:\n\n- one item\n- two items", 3, 0),
    ],
)
def test_sentences_are_found(tmp_path: Path, text: str, count: int, faults: int) -> None:
    (tmp_path / "page.md").write_text(text)
    found = sentences(prose(tmp_path / "page.md"))
    assert len(found) == count
    assert sum(bool(_FIRST_WORDS.match(one)) for one in found) == faults
