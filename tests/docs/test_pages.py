"""The programs of README and of the pages run unchanged, and print the output shown there.

The Python blocks of a page are one program. A block marked `text` is the program's output; "..." in it stands for
anything. A block marked `py` is an excerpt of the sources, and is not run. Commands, logs and files have no mark.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from forked import run_program

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

NEEDED = {
    "accelerate": ["accelerate"],
    "lightning": ["lightning"],
    "peft": ["peft", "transformers"],
    "save_resume_export": ["onnxscript"],
    "timm": ["timm"],
    "trainer": ["accelerate", "transformers"],
}
"""Page -> the packages of others that its program imports."""

SLOW = {"peft", "save_memory", "trainer"}
"""Pages with programs of half a minute; tests/tools/test_trainer.py has a smaller Trainer."""

_BLOCK = re.compile(r"^```(python|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)")


def blocks(page: Path) -> list[tuple[str, str]]:
    """The mark and the text of each block that is run or printed, in order."""
    return _BLOCK.findall(page.read_text())


def says(expected: str, printed: str) -> bool:
    """Check whether a program printed the output that its page shows."""
    return re.fullmatch(".*".join(map(re.escape, expected.split("..."))), printed, re.DOTALL) is not None


def with_programs() -> list[object]:
    found: list[object] = []
    for page in PAGES:
        if any(mark == "python" for mark, _ in blocks(page)):
            marks = [pytest.mark.slow] if page.stem in SLOW else []
            found.append(pytest.param(page, marks=marks, id=str(page.relative_to(ROOT))))
    return found


@pytest.mark.parametrize("page", with_programs())
def test_a_pages_program_prints_the_shown_output(page: Path, tmp_path: Path) -> None:
    for package in NEEDED.get(page.stem, []):
        pytest.importorskip(package)
    found = blocks(page)
    (tmp_path / "page.py").write_text("\n".join(text for mark, text in found if mark == "python"))
    done = run_program(
        tmp_path / "page.py",
        cwd=tmp_path,
        env={**os.environ, "ORT_DYNAMO_CACHE_DIR": str(tmp_path / "cache")},  # pages say how much a cache had
        warnings=["ignore"],
    )
    assert done.returncode == 0, done.stderr[-4000:]
    expected = "".join(text for mark, text in found if mark == "text")
    assert says(expected, done.stdout), f"{page.name} says\n{expected}\nand prints\n{done.stdout}"


def test_a_block_that_says_something_else_is_found() -> None:
    assert says("a ... c\n", "a b\nb c\n")
    assert not says("a ... c\n", "a b d\n")
    assert [mark for mark, _ in blocks(ROOT / "README.md")] == ["python", "text"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_pages_and_headings(page: Path) -> None:
    missing = []
    for target, heading in _LINK.findall(page.read_text()):
        if target.startswith(("http:", "https:", "mailto:")):
            continue
        found = (page.parent / target).resolve() if target else page
        if not found.exists() or (heading and heading not in headings(found)):
            missing.append(f"{target}#{heading}")
    assert not missing


def headings(page: Path) -> set[str]:
    """Give the anchors of a page's headings, as MyST and GitHub make them."""
    lines = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.strip().lower()).replace(" ", "-") for line in lines}


def test_each_page_of_the_site_is_in_the_contents() -> None:
    contents = "\n".join(page.read_text() for page in PAGES if page.name == "index.md")
    for page in (ROOT / "docs").glob("*/*.md"):
        assert re.search(rf"^{page.stem}$|{page.parent.name}/index", contents, re.MULTILINE), page
