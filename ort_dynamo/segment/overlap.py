"""Moves collectives to where they overlap with computation: their starts to the front, the waits for them to the back.

A collective has two nodes: its start, whose tensor is not there yet, and `wait_tensor`, which waits for it. By levels
alone a start comes after the whole island before its level, also after nodes that it does not need, and a wait follows
its start at once. Here

- a wait runs right before the first that reads its tensor, or at the graph's end;
- the starts of a level, and the nodes of torch that they need, come before all else that torch runs there;
- the nodes of the island before it that a start does not need become an island of their own, which runs while others
  communicate, if there is a matmul, a convolution or an attention in it: less does not repay a session's call.

Starts keep their order among themselves and with random ops and effects, so all ranks communicate in the same order. No
wait passes a write to a tensor, since a tensor that is being sent may be read until the wait is over.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from itertools import chain

from torch.fx import Graph, Node
from torch.utils.flop_counter import flop_registry

from ort_dynamo.passes.fx.analysis.views import is_remakable_view
from ort_dynamo.segment.classify import Place, Placement
from ort_dynamo.segment.levels import is_ordered, writes
from ort_dynamo.torch_internals.kernels.operators import OpOverload, is_wait

__all__ = ["overlap"]


def overlap(graph: Graph, placements: Mapping[Node, Placement], levels: Mapping[Node, int]) -> Mapping[Node, int]:
    """Give levels that let collectives overlap with computation; without collectives, they do not change.

    Args:
        graph: a functional graph.
        placements: the places of its nodes.
        levels: the level of each node (levels.py).
    """
    if not any(_is_start(node, placements) for node in placements):
        return levels
    late = _with_late_waits(graph, placements, levels)
    return _with_early_starts(graph, placements, late)


def _is_start(node: Node, placements: Mapping[Node, Placement]) -> bool:
    return node in placements and placements[node].place is Place.COLLECTIVE and is_ordered(node, Place.COLLECTIVE)


def _with_late_waits(graph: Graph, placements: Mapping[Node, Placement], levels: Mapping[Node, int]) -> dict[Node, int]:
    """Raise waits, and the views of their results, to the level of the first node that reads more than a view."""
    last: dict[Node, float] = {}  # node -> the last level in which it may run
    end = max(levels.values()) + 1
    barrier: float = end  # the level of the first write after the node
    for node in reversed(graph.nodes):
        bounds = (
            last[user] if user.op == "output" or _moves(user, placements) else levels[user] for user in node.users
        )
        last[node] = end if node.op == "output" else min(chain(bounds, [barrier]))
        if node in placements and writes(node, placements[node].place):
            barrier = min(barrier, levels[node])
    raised = dict(levels)
    waited: set[Node] = set()
    for node in graph.nodes:
        if node in placements and is_wait(node):
            waited.add(node)
            raised[node] = max(levels[node], int(last[node]))
        elif _moves(node, placements) and (base := node.all_input_nodes[0]) in waited:
            waited.add(node)
            raised[node] = max(levels[node], raised[base])
    return raised


def _moves(node: Node, placements: Mapping[Node, Placement]) -> bool:
    """Check whether the node may run later at no cost: it is a wait, or a view that its readers rebuild."""
    if node not in placements:
        return False
    return is_wait(node) or (placements[node].place is Place.LOWERED and is_remakable_view(node))


def _with_early_starts(
    graph: Graph, placements: Mapping[Node, Placement], levels: Mapping[Node, int]
) -> dict[Node, int]:
    """Make three levels of each: starts and island nodes that they do not need, torch's nodes, and waits."""
    torch_runs: dict[int, list[Node]] = {}
    islands: dict[int, list[Node]] = {}
    for node in graph.nodes:
        if node in placements and placements[node].place is not Place.INPUT_SIZE:
            lowered = placements[node].place is Place.LOWERED
            (islands if lowered else torch_runs).setdefault(levels[node], []).append(node)
    split = {node: 3 * level for node, level in levels.items()}
    for level, nodes in torch_runs.items():
        if any(writes(node, placements[node].place) for node in nodes):
            continue
        first, last = _first(nodes, placements), _last(nodes)
        split.update((node, 3 * level - 2 if node in first else 3 * level - 1) for node in nodes if node not in last)
        before = islands.get(level - 1, [])
        needed = _ancestors(first, before)
        others = [node for node in before if _source(node) not in needed]
        if first and any(map(_is_large, others)):
            split.update(dict.fromkeys(others, 3 * level - 2))
    return split


def _first(nodes: list[Node], placements: Mapping[Node, Placement]) -> set[Node]:
    """Find the collective starts at one level that need none of its waits, and the nodes that have to run before them.

    `nodes` are the nodes that torch runs at that level.
    """
    behind_waits: set[Node] = set()
    ordered: list[Node] = []
    last_start = 0
    for node in nodes:
        if is_wait(node) or not behind_waits.isdisjoint(node.all_input_nodes):
            behind_waits.add(node)
        if is_ordered(node, placements[node].place):
            if node in behind_waits:
                break
            ordered.append(node)
            last_start = len(ordered) if _is_start(node, placements) else last_start
    return _ancestors(ordered[:last_start], nodes) | {*ordered[:last_start]}


def _last(nodes: list[Node]) -> set[Node]:
    """Find the waits whose tensors no other node reads among `nodes`, those that torch runs at one level."""
    return {node for node in nodes if is_wait(node) and node.users.keys().isdisjoint(nodes)}


def _ancestors(nodes: Iterable[Node], among: Iterable[Node]) -> set[Node]:
    """Those of `among` that a path leads from, inside it, to one of `nodes`."""
    inside, found = set(among), set[Node]()
    stack = [value for node in nodes for value in node.all_input_nodes]
    while stack:
        node = stack.pop()
        if node in inside and node not in found:
            found.add(node)
            stack += node.all_input_nodes
    return found


def _source(node: Node) -> Node:
    """Return the op behind a getitem; tuples cannot cross an island boundary."""
    return node.all_input_nodes[0] if node.target is operator.getitem else node


def _is_large(node: Node) -> bool:
    """Check whether torch counts the node's multiplications: matmuls, convolutions, fused attention."""
    return isinstance(node.target, OpOverload) and node.target.overloadpacket in flop_registry
