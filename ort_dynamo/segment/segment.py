"""Splits one forward, backward or inference graph into islands for ONNX Runtime and nodes that torch runs.

There are five steps, and each reads only the results of earlier ones. They decide where every node runs and why
(classify.py), in which round (levels.py), which recomputed nodes move to their readers (sink_recomputed.py, with fused
kernels), and how communication overlaps with computation (overlap.py). The last one builds the graphs (islands.py).
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch.fx import GraphModule, Node

from ort_dynamo.errors import FallbackRefusedError
from ort_dynamo.graph.source_line import Owner, owners, user_line
from ort_dynamo.options.groups import SegmentOptions
from ort_dynamo.segment.classify import Place, Placement, classify
from ort_dynamo.segment.islands import build_islands
from ort_dynamo.segment.levels import levels
from ort_dynamo.segment.overlap import overlap
from ort_dynamo.segment.sink_recomputed import late

__all__ = ["EagerNode", "Segmented", "check_fallback", "segment"]


@dataclass(frozen=True)
class EagerNode:
    """A fallback node.

    Attributes:
        name: the FX node's name.
        target: its overload or function, as text.
        reason: why ONNX Runtime cannot run it.
        where: the user's line.
    """

    name: str
    target: str
    reason: str
    where: str


@dataclass(frozen=True)
class Segmented:
    """One forward, backward or inference graph, cut into islands.

    Attributes:
        gm: the outer graph: placeholders, fallback nodes, rebuilt views, and a call_module node per island that returns
            a tuple. Its island submodules are the islands' graphs, to be replaced by the sessions that run them.
        islands: island name (the submodule's) -> its graph.
        eager: the fallback nodes.
        native: overload, as text -> its nodes inside islands.
        by_design: overload, as text -> its nodes that torch runs by design: random ops and collectives.
        chosen: "overload: reason" -> its nodes that torch runs by choice, since it is faster.
        modules: the modules that called the operators -> "native", "by_design", "chosen" or "eager" -> nodes.
        outside: name of a node that torch runs, of those counted -> "by_design", "chosen" or "eager", and the reason.
    """

    gm: GraphModule
    islands: dict[str, GraphModule]
    eager: tuple[EagerNode, ...]
    native: Counter[str]
    by_design: Counter[str]
    chosen: Counter[str]
    modules: dict[Owner, Counter[str]]
    outside: Mapping[str, tuple[str, str]] = field(default_factory=dict)


def segment(
    gm: GraphModule, refuse: Callable[[Node], str | None], device: torch.device, *, fused: bool = False
) -> Segmented:
    """Cut `gm` into islands.

    Args:
        gm: a functional ATen graph with fake values in meta["val"].
        refuse: why a call_function node cannot be lowered, or None.
        device: the device of the graph's sessions; nodes on other devices are fallbacks.
        fused: whether a session computes arithmetic in the kernel of the node that reads it.
    """
    placements = classify(gm.graph, refuse, device)
    found = levels(gm.graph, placements)
    rounds = overlap(gm.graph, placements, late(gm.graph, placements, found) if fused else found)
    outer, islands = build_islands(gm, placements, rounds)
    native = Counter(str(node.target) for island in islands.values() for node in _computing(island))
    outside = {node: who for node, placement in placements.items() if (who := _who(node, placement)) is not None}
    by_design = Counter(str(node.target) for node, who in outside.items() if who == "by_design")
    chosen = Counter(f"{node.target}: {placements[node].reason}" for node, who in outside.items() if who == "chosen")
    eager = tuple(
        EagerNode(node.name, str(node.target), reason, user_line(node))
        for node, who in outside.items()
        if who == "eager" and (reason := placements[node].reason) is not None
    )
    by_name = {node.name: (who, placements[node].reason or "") for node, who in outside.items()}
    return Segmented(outer, islands, eager, native, by_design, chosen, _by_module(islands, outside), by_name)


def _who(node: Node, placement: Placement) -> str | None:
    """Return which of "by_design", "chosen" and "eager" a node of torch's counts as; None if it counts as none."""
    if node.target is operator.getitem or (placement.place is Place.EAGER and placement.reason is None):
        return None
    return _WHO.get(placement.place)


_WHO = {
    Place.RANDOM: "by_design",
    Place.COLLECTIVE: "by_design",
    Place.OBSERVER: "by_design",
    Place.CHOSEN: "chosen",
    Place.EAGER: "eager",
}


def _by_module(islands: Mapping[str, GraphModule], outside: Mapping[Node, str]) -> dict[Owner, Counter[str]]:
    found: dict[Owner, Counter[str]] = {}
    for island in islands.values():
        for node in _computing(island):
            _count(found, node, "native")
    for node, who in outside.items():
        _count(found, node, who)
    return found


def _count(found: dict[Owner, Counter[str]], node: Node, who: str) -> None:
    """Count a node of the innermost module; those around it are there by their classes, with counts of their own."""
    for one in owners(node):
        counts = found.setdefault(one, Counter())
    counts[who] += 1


def _computing(island: GraphModule) -> Iterator[Node]:
    return (n for n in island.graph.nodes if n.op == "call_function" and n.target is not operator.getitem)


def check_fallback(segmented: Segmented, options: SegmentOptions, role: str) -> None:
    """Raise FallbackRefusedError if there are fallbacks and the options forbid them."""
    if options.fallback == "error" and segmented.eager:
        lines = "\n".join(f"  {n.name} = {n.target}: {n.reason}\n    {n.where}" for n in segmented.eager)
        raise FallbackRefusedError(count=len(segmented.eager), role=role, nodes=lines)
