"""Prints, for docs/distributed.md, the graphs, islands and collectives of each engine on four ranks.

python tests/distributed/islands.py [ENGINE ...]
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from pathlib import Path

from engines import ENGINES, train
from ranks import Ranks

from ort_dynamo.report.record import RECORDS

__all__ = ["islands"]


def islands(engine: str) -> tuple[Counter[str], Counter[str], Counter[str]]:
    """Train one step; how many graphs and islands there are by role, and how many collectives by name."""
    train(engine, steps=1)
    graphs = [graph for record in RECORDS for graph in record.graphs]
    found: Counter[str] = Counter()
    collectives: Counter[str] = Counter()
    for graph in graphs:
        found[graph.role] += len(graph.islands)
        for overload, count in graph.by_design.items():
            if "c10d" in overload and "wait" not in overload:
                collectives[overload.split(".")[1].replace("_into_tensor", "").replace("_tensor", "")] += count
    return Counter(graph.role for graph in graphs), found, collectives


def main(engines: list[str]) -> None:
    print("| engine | graphs | islands | collectives in the graph |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        ranks = Ranks(Path(folder))
        for engine in engines:
            graphs, found, collectives = ranks.run(islands, 4, engine)[0]
            each = ", ".join(f"{count} {role}" for role, count in found.items())
            sent = ", ".join(f"{count} {name}" for name, count in sorted(collectives.items())) or "none"
            print(f"| {engine} | {graphs.total()} | {found.total()}: {each} | {sent} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or list(ENGINES))
