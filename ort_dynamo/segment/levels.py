"""Assign each node to a level, the round in which it runs.

A node's level is the maximum number of steps from a lowered node to one that torch runs, over all paths to it. The
lowered nodes of a level form one island. Running torch's nodes of level 0, island 0, torch's nodes of level 1, island
1 … respects every edge. No path can be cut into fewer islands, and the search takes linear time.

Effects that no edge shows are kept as well. Random ops and operators with effects keep eager's order. All nodes before
a write (AOTAutograd's `copy_` or `set_` where a graph ends, a fallback operator that writes to an argument) run before
it, all nodes after it run after.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping

import torch
from torch.fx import Graph, Node

from ort_dynamo.segment.classify import Place, Placement
from ort_dynamo.torch_internals.kernels.operators import OpOverload, is_mutable, is_wait

__all__ = ["is_ordered", "levels", "writes"]


def levels(graph: Graph, placements: Mapping[Node, Placement]) -> dict[Node, int]:
    """Return the level of every node; `placements` has all nodes but placeholders and the output."""
    found: dict[Node, int] = {}
    last_ordered = 0
    earliest = 0  # the level of the last write
    done = 0  # the level after which all earlier nodes have run
    for node in graph.nodes:
        place = placements[node].place if node in placements else None
        if place in (None, Place.INPUT_SIZE):
            found[node] = 0
            continue
        lowered = place is Place.LOWERED
        level = earliest
        for argument in node.all_input_nodes:
            # Within a level, torch's nodes come before the island: only the way back opens a new level.
            opens = not lowered and argument in placements and placements[argument].place is Place.LOWERED
            level = max(level, found[argument] + opens)
        if not lowered and is_ordered(node, place):
            # Effects and random ops keep eager's order among themselves.
            last_ordered = level = max(level, last_ordered)
        if writes(node, place):
            earliest = level = max(level, done)
        done = max(done, level + lowered)
        found[node] = level
    return found


def writes(node: Node, place: Place | None) -> bool:
    """Check whether the node, which runs at `place`, writes to a tensor that others see."""
    return place is Place.WRITE or (place is not Place.LOWERED and _is_mutable(node))


def is_ordered(node: Node, place: Place | None) -> bool:
    """Check whether a node that torch runs is a random op or has an effect; operators outside of ATen may."""
    target = node.target
    if is_wait(node):
        return False
    if not isinstance(target, OpOverload):
        return node.op == "call_function" and place is not Place.HOST and target is not operator.getitem
    if target.namespace not in ("aten", "prims"):
        return True
    return torch.Tag.nondeterministic_seeded in target.tags or _is_mutable(node)


def _is_mutable(node: Node) -> bool:
    """Check whether the operator writes to an argument: edges do not order its readers before or after the write."""
    return isinstance(node.target, OpOverload) and is_mutable(node.target)
