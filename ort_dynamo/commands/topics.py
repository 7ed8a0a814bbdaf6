"""python -m ort_dynamo help: the documentation, as text on the terminal."""

from __future__ import annotations

import argparse
from pathlib import Path

from ort_dynamo.errors import InvalidArgumentError
from ort_dynamo.options.spelling import nearest

__all__ = ["SUMMARY", "add_arguments", "run", "topics"]

SUMMARY = "Print a page of the documentation; without a topic, list the topics."

_PAGES = Path(__file__).resolve().parents[1] / "docs"
_PARTS = {"start": "Start", "how_to": "How-to", "reference": "Reference", "internals": "Internals"}
"""Folder -> its title, in the order of reading."""


def topics() -> dict[str, Path]:
    """Topic -> its page. A topic is the name of a page's file, without its ending."""
    return {page.stem: page for part in _PARTS for page in sorted((_PAGES / part).glob("*.md")) if page.stem != "index"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the topic."""
    parser.add_argument("topic", nargs="?", metavar="TOPIC", help="the name of a page, such as troubleshooting")


def run(arguments: argparse.Namespace) -> int:
    """Print the page of the topic, or the list of topics.

    Raises:
        InvalidArgumentError: no page has that name.
    """
    print(_page(arguments.topic) if arguments.topic else _listing(), end="")
    return 0


def _page(topic: str) -> str:
    pages = topics()
    if topic not in pages:
        expected = f"a topic that `python -m ort_dynamo help` lists{nearest(topic, pages)}"
        raise InvalidArgumentError(function="help", name="topic", value=topic, expected=expected)
    return pages[topic].read_text(encoding="utf-8")


def _listing() -> str:
    pages = topics()
    width = max(map(len, pages))
    lines = ["Usage: python -m ort_dynamo help TOPIC"]
    for part, title in _PARTS.items():
        lines += ["", title]
        lines += [f"  {name:{width}}  {_title(page)}" for name, page in pages.items() if page.parent.name == part]
    return "\n".join(lines) + "\n"


def _title(page: Path) -> str:
    with page.open(encoding="utf-8") as lines:
        return next(line.removeprefix("# ").strip() for line in lines if line.startswith("# "))
