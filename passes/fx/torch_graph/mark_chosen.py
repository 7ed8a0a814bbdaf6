"""Mark nodes that torch runs by choice, with the reason, and add such nodes."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch.fx import Node

from ort_dynamo.graph.marks import CHOSEN, HALF, RECOMPUTE
from ort_dynamo.passes.fx.analysis.fake_values import add_call

__all__ = ["KEPT", "ORIGIN", "add_chosen", "choose", "computes"]

ORIGIN = ("nn_module_stack", "stack_trace", "seq_nr", "original_aten", "from_node", HALF)
"""Meta keys that a new node copies from the node that it is for: its origin, and whether it is in the backward."""

KEPT = (*ORIGIN, RECOMPUTE, "ac_graph_id")
"""The same, with those by which torch.utils.checkpoint has a node recomputed."""


def choose(nodes: Iterable[Node], reason: str) -> bool:
    """Mark nodes, but for those that are marked already; whether there were any."""
    new = [node for node in nodes if CHOSEN not in node.meta]
    for node in new:
        node.meta[CHOSEN] = reason
    return bool(new)


def computes(node: Node) -> bool:
    """Check whether a node calls an operator; a getitem does not."""
    return node.op == "call_function" and node.target is not operator.getitem


def add_chosen(
    like: Node, reason: str, kept: Collection[str], target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Node:
    """Add a call that torch runs by choice, where the graph inserts, with its fake value.

    Args:
        like: the node that it is made for.
        reason: why torch runs it.
        kept: the keys of that node's meta which it gets, such as ORIGIN.
        target: the function that the new node calls.
        args: its arguments.
        kwargs: its keyword arguments.
    """
    meta = {key: like.meta[key] for key in kept if key in like.meta}
    return add_call(like.graph, target, args, kwargs, meta | {CHOSEN: reason})
