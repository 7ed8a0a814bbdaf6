"""What the placement passes leave on a node: that torch runs it by choice, and why."""

from __future__ import annotations

import operator
from collections.abc import Iterable

from torch.fx import Node

from ort_dynamo.marks import CHOSEN

__all__ = ["choose", "computes"]


def choose(nodes: Iterable[Node], reason: str) -> bool:
    """Mark nodes, but for those that are marked already; whether there were any."""
    new = [node for node in nodes if CHOSEN not in node.meta]
    for node in new:
        node.meta[CHOSEN] = reason
    return bool(new)


def computes(node: Node) -> bool:
    """Whether a node calls an operator, and does not only take a result apart."""
    return node.op == "call_function" and node.target is not operator.getitem
