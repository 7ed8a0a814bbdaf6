"""Prints, for docs/internals/engines.md, the graphs, islands and collectives of each engine on four ranks.

python tests/distributed/islands.py [ENGINE ...]
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from pathlib import Path

from engines import ENGINES, train
from gpt import Ran
from ranks import Ranks

__all__ = ["row"]


def row(engine: str, ran: Ran) -> str:
    """Give the table's row of an engine, from the observations of rank 0."""
    roles = Counter(role for role, _ in ran.graphs)
    islands: Counter[str] = Counter()
    for role, count in ran.graphs:
        islands[role] += count
    sent: Counter[str] = Counter()
    for overload, count in ran.collectives.items():
        if "wait" not in overload:
            sent[overload.split(".")[1].replace("_into_tensor", "").replace("_tensor", "")] += count
    each = ", ".join(f"{count} {role}" for role, count in sorted(islands.items(), reverse=True))
    named = ", ".join(f"{count} {name}" for name, count in sorted(sent.items())) or "none"
    return f"| `{engine}` | {roles.total()} | {islands.total()}: {each} | {named} |"


def main(engines: list[str]) -> None:
    print("| engine | graphs | islands | collectives in the graph |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        ranks = Ranks(Path(folder))
        for engine in engines:
            print(row(engine, ranks.run(train, 4, engine, 0.0, False, 1)[0]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or list(ENGINES))
