"""Answers whether nodes can be lowered; of those that are alike, one is lowered on trial."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.fx import Node

from ort_dynamo.cache.graph_key import spell_node
from ort_dynamo.torch_internals.answers import ANSWERS

__all__ = ["Trials"]


class Trials:
    """Remembers refusals by what the graph's key holds of a node.

    Nodes with symbolic sizes are each tried: what their trials ask about sizes is of their own symbols.

    Args:
        refuse: why a node cannot be lowered, or None. It records what it asked about sizes in the node's meta.
    """

    def __init__(self, refuse: Callable[[Node], str | None]) -> None:
        self._refuse = refuse
        self._found: dict[str, tuple[str | None, Any]] = {}

    def __call__(self, node: Node) -> str | None:
        """Why `node` cannot be lowered, or None; raises as `refuse`."""
        spelled = spell_node(node)
        if spelled is None:
            return self._refuse(node)
        if spelled not in self._found:
            reason = self._refuse(node)
            self._found[spelled] = reason, node.meta[ANSWERS]
        reason, node.meta[ANSWERS] = self._found[spelled]
        return reason
