"""The programs on the pages that a newcomer reads first run, and print what the pages say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("README.md", "docs/getting_started.md", "docs/troubleshooting.md", "docs/export_training_graph.md")
_BLOCK = re.compile(r"^```(python|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: str) -> list[tuple[str, str]]:
    """The language and the text of each block of a page, in order."""
    return _BLOCK.findall((ROOT / page).read_text())


@pytest.mark.parametrize("page", PAGES)
def test_a_page_prints_what_it_says(page: str, tmp_path: Path) -> None:
    found = blocks(page)
    program = "\n".join(text for language, text in found if language == "python")
    printed = "".join(text for language, text in found if language == "text")
    assert program
    (tmp_path / "page.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "page.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    pattern = ".*".join(map(re.escape, printed.split("...")))
    assert re.fullmatch(pattern, done.stdout), f"{page} says\n{printed}\nand prints\n{done.stdout}"


def test_a_block_that_says_something_else_is_found() -> None:
    assert re.fullmatch(".*".join(map(re.escape, ["a ", " c\n"])), "a b c\n")
    assert not re.fullmatch(".*".join(map(re.escape, ["a ", " c\n"])), "a b d\n")
    assert [len(blocks(page)) for page in PAGES] == [2, 6, 1, 5]


def test_links_between_pages_lead_somewhere() -> None:
    missing = set()
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
            if not target.startswith(("http", "mailto")) and not (page.parent / target).exists():
                missing.add(f"{page.relative_to(ROOT)}: {target}")
    assert not missing
