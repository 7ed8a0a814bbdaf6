"""Give small results memory that torch owns: memory that ONNX Runtime allocated cannot be resized in place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from ort_dynamo.graph.boundary import promised_strides
from ort_dynamo.passes.fx.analysis.views import is_given_by_island, is_remakable_view
from ort_dynamo.passes.ordering import Condition, ordering

__all__ = ["CopySmallResults", "owned"]

_SMALL = 1 << 16
"""Bytes."""


def owned(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor`, in memory of torch's own if it is small."""
    return tensor.clone() if tensor.nbytes <= _SMALL else tensor


owned.keeps_value = True  # type: ignore[attr-defined]  # its size at run time decides; the maker gives a fake value


@ordering(needs=[Condition.FUNCTIONAL], gives=[Condition.RESULTS_OWNED])
@dataclass(frozen=True)
class CopySmallResults(PassBase):
    """Copy islands' results that the program sees into torch's memory, at run time, by `owned`.

    `result.resize_(…)` and `torch.add(…, out=result)` then work as in eager. A copy of that size takes about a
    microsecond. Larger results stay in ONNX Runtime's arena: if torch allocated them, each step would touch fresh pages
    (GPT-2's step took 1.17 times as long). Views of one tensor still alias.

    Args:
        seen: the outputs that the program sees; the others are written back to inputs, or saved for the backward.
    """

    seen: slice
    name: str = "copy_small_results"

    def call(self, graph_module: GraphModule) -> PassResult:
        """Rewrite, in place, an outer graph with fake values, in which an island is a call_module node."""
        graph = graph_module.graph
        (output,) = graph.find_nodes(op="output")
        values: tuple[Any, ...] = output.args[0]
        bases = (_base(value) for value in values[self.seen] if isinstance(value, Node))
        modified = False
        for item in dict.fromkeys(bases):
            if not is_given_by_island(item) or promised_strides(item.meta["val"]):  # torch's already
                continue
            users = list(item.users)
            with graph.inserting_after(item):
                copied = graph.call_function(owned, (item,))
            copied.meta = dict(item.meta)
            for user in users:
                user.replace_input_with(item, copied)
            modified = True
        if modified:
            graph_module.recompile()
        return PassResult(graph_module, modified)


def _base(value: Node) -> Node:
    while is_remakable_view(value):
        (value, *_) = value.all_input_nodes
    return value
