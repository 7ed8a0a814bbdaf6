"""python -m ort_dynamo help: the documentation, as text on the terminal."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

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
    """Print the page of the topic, or the list of topics; status 2 where no page has that name."""
    pages, topic = topics(), arguments.topic
    if topic and topic not in pages:
        text = f"there is no topic {topic!r}{nearest(topic, pages)}; without a topic, the command lists all of them"
        print(f"python -m ort_dynamo help: error: {text}", file=sys.stderr)
        return 2
    print(pages[topic].read_text(encoding="utf-8") if topic else _listing(pages), end="")
    return 0


def _listing(pages: dict[str, Path]) -> str:
    width = max(map(len, pages))
    lines = ["Usage: python -m ort_dynamo help TOPIC"]
    for part, title in _PARTS.items():
        lines += ["", title]
        lines += [f"  {name:{width}}  {_title(page)}" for name, page in pages.items() if page.parent.name == part]
    return "\n".join(lines) + "\n"


def _title(page: Path) -> str:
    with page.open(encoding="utf-8") as lines:
        return next(line.removeprefix("# ").strip() for line in lines if line.startswith("# "))
