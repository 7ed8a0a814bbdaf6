"""Probes whether nodes can be lowered; of equal nodes, one is lowered."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Self

from torch.fx import Node

from ort_dynamo.graph.graph_key import spell_node
from ort_dynamo.lowering.translate import refusal
from ort_dynamo.passes.onnx.fuse_kernels import lacks_kernel
from ort_dynamo.targets.target import Target
from ort_dynamo.torch_internals.sizes.size_guards import SIZE_FACTS

__all__ = ["LoweringProbe"]


class LoweringProbe:
    """Remembers refusals by the part of the graph key that a node has.

    Nodes with symbolic sizes are each probed: their lowerings ask about symbols of their own.

    Args:
        refuse: why a node cannot be lowered, or None. It records its questions about sizes in the node's meta.
        refused: name of a node -> the reason why torch runs it, although it can be lowered.
    """

    def __init__(self, refuse: Callable[[Node], str | None], refused: Mapping[str, str] | None = None) -> None:
        self._refuse = refuse
        self._found: dict[str, tuple[str | None, Any]] = {}
        self._refused: dict[str, str] = dict(refused or {})

    @classmethod
    def of(cls, target: Target, refused: Mapping[str, str] | None = None) -> Self:
        """Make the probe of a target: it lowers a node alone, into a graph that is thrown away."""
        return cls(partial(refusal, target=target, lacks_kernel=lacks_kernel), refused)

    def __call__(self, node: Node) -> str | None:
        """Give the reason why `node` cannot be lowered, or None; raises as the function that it was made of."""
        if (reason := self._refused.get(node.name)) is not None:
            return reason
        spelled = spell_node(node)
        if spelled is None:
            return self._refuse(node)
        if spelled not in self._found:
            reason = self._refuse(node)
            self._found[spelled] = reason, node.meta[SIZE_FACTS]
        reason, node.meta[SIZE_FACTS] = self._found[spelled]
        return reason

    def refuse(self, names: Iterable[str], reason: str) -> None:
        """Refuse nodes of these names from now on, although each can be lowered.

        Args:
            names: names of nodes, one of them new.
            reason: the reason.
        """
        new = dict.fromkeys({*names} - self._refused.keys(), reason)
        assert new, "ONNX Runtime refuses the model of an island whose nodes torch should run"
        self._refused |= new
