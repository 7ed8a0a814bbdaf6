"""Moves nodes that a backward recomputes to the island that reads them."""

from __future__ import annotations

import operator
from collections.abc import Container, Iterable, Mapping

from torch.fx import Graph, Node

from ort_dynamo.passes.fx.analysis.fused_readers import is_no_more
from ort_dynamo.passes.fx.analysis.saved_tensors import bytes_of, is_number, is_tensor
from ort_dynamo.segment.classify import Place, Placement
from ort_dynamo.segment.levels import writes

__all__ = ["late"]


def late(graph: Graph, placements: Mapping[Node, Placement], levels: Mapping[Node, int]) -> dict[Node, int]:
    """Give the level of every node; nodes that depend on inputs alone move to their first reader.

    Such nodes have level 0. In another island than their readers, their results would be written to memory and read
    again, although one fused kernel could compute both. A node does not move if its result has fewer bytes than the
    saved tensors that it reads, which would live longer. No node moves if a write or a collective orders the graph.

    Args:
        graph: the graph.
        placements: the places of its nodes.
        levels: the levels from `levels`.
    """
    found = dict(levels)
    places = {node: placement.place for node, placement in placements.items()}
    if any(place is Place.COLLECTIVE or writes(node, place) for node, place in places.items()):
        return found
    free: dict[Node, frozenset[Node]] = {}  # node that may move -> the given values that it is computed from
    for node in graph.nodes:
        if node in places and all(_is_given(one, free) for one in node.all_input_nodes):
            sources = frozenset[Node]().union(*(free.get(one, {one}) for one in node.all_input_nodes))
            if _may_move(node, places[node], sources):
                free[node] = sources
    for node in reversed(graph.nodes):
        if node in free and node.users and all(places.get(user) is Place.LOWERED for user in node.users):
            found[node] = max(found[node], min(found[user] for user in node.users))
    for node in free:
        made = [one for one in node.all_input_nodes if one in free]
        if any(found[one] < found[node] and _nbytes(one) > _nbytes(node) for one in made):
            found[node] = max(found[one] for one in made)  # an earlier island reads the larger value
    return found


def _may_move(node: Node, place: Place, sources: Iterable[Node]) -> bool:
    if place is not Place.LOWERED or not is_tensor(node) or node.target is operator.getitem:
        return False
    read = (one for one in sources if is_tensor(one) and not _is_held(one))
    return is_no_more(sum(map(_nbytes, read)), than=_nbytes(node))


def _nbytes(node: Node) -> int:
    return bytes_of(node.meta["val"])[0]


def _is_held(source: Node) -> bool:
    """Check whether a value lives as long as the graph runs: it is a parameter or an input of the program."""
    return source.op == "placeholder" and str(source.target).startswith("primals")


def _is_given(source: Node, free: Container[Node]) -> bool:
    return source in free or source.op in ("placeholder", "get_attr") or is_number(source)
