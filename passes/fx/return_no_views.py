"""Return results that eager computes anew as no views to autograd."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassBase, PassResult

__all__ = ["ReturnNoViews", "unviewed"]


def unviewed(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` in the same memory and layout, as no view to autograd."""
    return tensor.data if tensor._is_view() else tensor


unviewed.keeps_value = True  # type: ignore[attr-defined]  # the maker gives the fake value


@dataclass(frozen=True)
class ReturnNoViews(PassBase):
    """Pass results that the program sees, and eager computes anew, through `unviewed`.

    A session's result may be permuted into the layout that eager gives, and torch may write one over a view. Both are
    views to autograd, which then refuses to let the program write to them in place.

    Args:
        seen: which of the outputs the program sees; the others are written back to inputs, or saved for the backward.
        views: indices of outputs that are views to eager, too.
    """

    seen: slice
    views: frozenset[int] = frozenset()
    name: str = "return_no_views"

    def call(self, graph_module: GraphModule) -> PassResult:
        """Rewrite, in place, an outer graph with fake values."""
        graph = graph_module.graph
        (output,) = graph.find_nodes(op="output")
        values: list[Any] = [*output.args[0]]
        made: dict[Node, Node] = {}
        for index in range(*self.seen.indices(len(values))):
            value = values[index]
            if index in self.views or not _may_become_a_view(value):
                continue
            if value not in made:
                with graph.inserting_before(output):
                    made[value] = graph.call_function(unviewed, (value,))
                made[value].meta = dict(value.meta)
            values[index] = made[value]
        if made:
            output.args = (type(output.args[0])(values),)
            graph_module.recompile()
        return PassResult(graph_module, bool(made))


def _may_become_a_view(value: object) -> bool:
    if not isinstance(value, Node) or value.op != "call_function" or value.target is unviewed:
        return False
    return isinstance(value.meta.get("val"), torch.Tensor)
