"""Cut a backward into sections, so that tensors that the forward saved are freed on the way."""

from __future__ import annotations

import operator
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from ort_dynamo.graph.marks import CHOSEN, SECTION
from ort_dynamo.passes.fx.analysis.saved_tensors import allocations
from ort_dynamo.passes.fx.analysis.storage import storages_of
from ort_dynamo.passes.fx.analysis.views import is_remakable_view

__all__ = ["CutIntoSections"]


@dataclass(frozen=True)
class CutIntoSections(PassBase):
    """Assign the nodes of a backward to sections, if the forward saves much.

    A session holds its inputs until it returns. With one session, all saved tensors are alive when the last gradient is
    computed; eager has freed them by then. Each section has its own sessions, and its end frees the saved tensors that
    no later section reads. The peak falls by almost the smaller of saved tensors and gradients. Sections free about the
    same number of bytes each. They end where a session ends anyway, since torch runs the next node by choice. If there
    is no such place, they end where the fewest bytes pass to the next section, which is between layers; so equal layers
    share a session.

    A view, or a node that reads only inputs of the graph, such as a cast of a saved tensor, goes to the section of its
    first reader.

    Args:
        freed: the names of the placeholders that nothing else holds.
        least: the minimum bytes that a section frees, so that it takes much longer than a session call.
        most: the maximum number of sections.
    """

    freed: tuple[str, ...] = field(repr=False)
    least: int
    most: int
    name: str = "cut_into_sections"

    def call(self, graph_module: GraphModule) -> PassResult:
        """Mark nodes of a backward, in place."""
        nodes = [node for node in graph_module.graph.nodes if node.op not in ("placeholder", "output")]
        place = _places(nodes)
        freed, handed_on = _sweep(graph_module, place, self.freed)
        ends = _ends(freed, handed_on, _cut_sessions(place), self.least, self.most)
        sections = {node: bisect_left(ends, place[node]) for node in nodes} if ends else {}
        modified = any(node.meta.get(SECTION) != section for node, section in sections.items())
        for node, section in sections.items():
            node.meta[SECTION] = section
        return PassResult(graph_module, modified)


def _places(nodes: Sequence[Node]) -> dict[Node, int]:
    """Node -> its index in the graph, or that of its first reader if it can move there for free."""
    place = {node: index for index, node in enumerate(nodes)}
    computed: set[Node] = set()
    for node in nodes:
        if not is_remakable_view(node) or not computed.isdisjoint(node.all_input_nodes):
            computed.add(node)
    for node in reversed(nodes):
        moves = is_remakable_view(node) or computed.isdisjoint(node.all_input_nodes)
        if moves and node.users and all(user in place for user in node.users):
            place[node] = min(place[user] for user in node.users)
    for node in nodes:
        if node.target is operator.getitem:  # a tuple of results cannot cross
            (source, *_) = node.all_input_nodes
            place[node] = place.get(source, place[node])
    return place


def _sweep(gm: GraphModule, place: Mapping[Node, int], freed: Collection[str]) -> tuple[list[int], list[int]]:
    """Compute for each index the bytes of saved tensors last read there, and the bytes live across a cut there."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    (output,) = gm.graph.find_nodes(op="output")
    last: dict[int, int] = {}
    for node in place:
        if not is_remakable_view(node):
            for storage in (storage for argument in node.all_input_nodes for storage in storages_of(argument)):
                last[storage] = max(last.get(storage, 0), place[node])
    ended, handed_on = [0] * len(place), [0] * len(place)
    known = {storage for node in (*placeholders, *output.all_input_nodes) for storage in storages_of(node)}
    saved = {s: nbytes for node in placeholders if node.name in freed for s, nbytes in allocations(node)}
    for storage, nbytes in saved.items():
        if storage in last:
            ended[last[storage]] += nbytes
    for node in place:
        for storage, nbytes in allocations(node):
            if storage in last and storage not in known:
                known.add(storage)
                handed_on[place[node]] += nbytes
                handed_on[last[storage]] -= nbytes
    return ended, list(accumulate(handed_on))


def _cut_sessions(place: Mapping[Node, int]) -> list[int]:
    """Count for each index the sessions that an end before it would cut in two.

    A session has the nodes from which equally many nodes that torch runs by choice lie before them, on any path
    (segment/levels.py).
    """
    rounds: dict[Node, int] = {}
    spans: dict[int, tuple[int, int]] = {}
    for node in place:
        is_chosen = CHOSEN in node.meta
        arguments = [argument for argument in node.all_input_nodes if argument in rounds]
        opened = (rounds[argument] + (is_chosen and CHOSEN not in argument.meta) for argument in arguments)
        rounds[node] = number = max(opened, default=0)
        if not is_chosen and not is_remakable_view(node):
            first, last = spans.get(number, (place[node], place[node]))
            spans[number] = min(first, place[node]), max(last, place[node])
    changes = [0] * (len(place) + 1)
    for first, last in spans.values():
        changes[first + 1] += 1
        changes[last + 1] -= 1
    return list(accumulate(changes))


def _ends(
    freed: Sequence[int], handed_on: Sequence[int], cut_sessions: Sequence[int], least: int, most: int
) -> list[int]:
    """Return where all sections but the last end: each frees one to two shares, cuts few sessions, passes on few bytes.

    Of equal layers that free no more than a share each, one ends among these indices.
    """
    until = [0, *accumulate(freed)]  # bytes that are freed before each index
    share = max(least, -(-until[-1] // most))
    ends: list[int] = []
    begin = 0
    while (first := bisect_left(until, until[begin] + share)) < len(until):
        widest = max(until[begin] + 2 * share, until[first])
        end = bisect_right(until, min(widest, until[-1] - least))
        if first >= end:
            break
        begin = min(
            range(first, end), key=lambda place: (cut_sessions[place], handed_on[place - 1], until[place], -place)
        )
        ends.append(begin - 1)
    return ends
