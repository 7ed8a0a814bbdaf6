"""Chains of operators that count from the beginning of an input's storage."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from ort_dynamo.passes.fx.analysis.aliases import aliased_inputs
from ort_dynamo.torch_internals.kernels.operators import aten
from ort_dynamo.torch_internals.sizes.symbols import known_true

__all__ = ["counted_from_storage", "reads_by_place"]

_BY_PLACE = (aten.as_strided.default, aten.as_strided_copy.default, aten.as_strided_scatter.default)
"""Operators that count from the beginning of the first argument's storage, wherever that tensor begins in it."""

_SCATTERS = (
    aten.slice_scatter.default,
    aten.select_scatter.default,
    aten.diagonal_scatter.default,
    aten.as_strided_scatter.default,
)
"""Operators whose kernels give the result the place that the first argument has in its storage; fakes begin at 0."""


def reads_by_place(graph: Graph) -> bool:
    """Check whether an operator of a graph depends on where its argument begins in its storage, as as_strided does."""
    return any(graph.find_nodes(op="call_function", target=target) for target in _BY_PLACE)


def counted_from_storage(graph: Graph) -> dict[str, str]:
    """Find the nodes that only torch's kernels compute right, by the memory that they are given: name -> reason.

    They are an `as_strided` of a tensor that a program has written to through a view, if that is an input which begins
    inside its storage, and the writes before it.
    """
    found: dict[str, str] = {}
    for target in _BY_PLACE:
        for node in graph.find_nodes(op="call_function", target=target):
            written: list[Node] = []
            base: Any = node.args[0]
            while base.op == "call_function":
                if base.target in _SCATTERS:
                    written.append(base)
                    base = base.args[0]
                elif aliased := aliased_inputs(base):
                    base = aliased[0]
                else:
                    break
            if written and base.op == "placeholder" and not _begins_its_storage(base):
                found |= dict.fromkeys((one.name for one in (node, *written)), _REASON)
    return found


_REASON = "as_strided counts from the beginning of an input's storage"


def _begins_its_storage(node: Node) -> bool:
    fake = node.meta["val"]
    return not isinstance(fake, torch.Tensor) or known_true(fake.storage_offset() == 0)
