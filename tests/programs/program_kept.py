"""Kept programs: files with the texts of programs that failed, shrunk, which a test compares again."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from program_comparison import Case
from program_text import least_precise

__all__ = ["FOLDER", "keep", "kept", "read"]

FOLDER = Path(__file__).parent / "kept"

_HEADER = re.compile(
    r"# mode (?P<mode>\w+), setting (?P<setting>\w+), batches (?P<batches>[\d ]+), dtype (?P<dtype>\w+)"
)


@dataclass(frozen=True)
class Text:
    """A program that is nothing but its text: it runs as a `Program` does, and does not shrink."""

    text: str
    dtype: str

    @property
    def precision(self) -> str:
        return least_precise(self.text, self.dtype)

    def source(self, everything: bool = False) -> str:
        if everything:
            raise NotImplementedError("a text has no other form")
        return self.text


def read(text: str) -> Case:
    """Return the case of `Case.text()`."""
    found = _HEADER.search(text)
    if not found:
        raise ValueError(f"no line {_HEADER.pattern!r}")
    program = Text(text[found.end() :].lstrip("\n"), found["dtype"])
    return Case(program, found["mode"], found["setting"], tuple(map(int, found["batches"].split())))


def keep(text: str, kind: str, folder: Path = FOLDER) -> Path:
    """Write a failing program to a file that is named by its difference."""
    folder.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"\W+", "_", kind)[:60].strip("_").lower()
    path = folder / f"{name}.txt"
    path.write_text(text, encoding="utf-8")
    return path


def kept(folder: Path = FOLDER) -> list[Path]:
    return sorted(folder.glob("*.txt"))
