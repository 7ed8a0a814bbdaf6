"""Hide views from autograd in results that are no views in eager."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from ort_dynamo.passes.fx.analysis.wrapped_outputs import wrap_outputs
from ort_dynamo.passes.ordering import Condition, ordering

__all__ = ["ReturnNoViews", "unviewed"]


def unviewed(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` in the same memory and layout, as no view to autograd."""
    return tensor.detach() if tensor._is_view() else tensor  # not .data: writes to it are to be seen


unviewed.keeps_value = True  # type: ignore[attr-defined]  # the maker gives the fake value


@ordering(needs=[Condition.FUNCTIONAL, Condition.STRIDES_GIVEN])
@dataclass(frozen=True)
class ReturnNoViews(PassBase):
    """Pass results that the program sees, and that are no views in eager, through `unviewed`.

    A session's result may be permuted into eager's memory layout, and torch may compute one in place on a view. Both
    are views to autograd, which would refuse in-place writes of the program.

    Args:
        seen: the outputs that the program sees; the others are written back to inputs, or saved for the backward.
        views: the indices of outputs that are views in eager, too.
    """

    seen: slice
    views: frozenset[int] = frozenset()
    name: str = "return_no_views"

    def call(self, graph_module: GraphModule) -> PassResult:
        """Rewrite, in place, an outer graph with fake values."""
        return PassResult(graph_module, wrap_outputs(graph_module, self.seen, unviewed, self._wanted))

    def _wanted(self, index: int, value: Node) -> tuple[()] | None:
        """Give no further arguments for an output that may become a view and is none to eager; else None."""
        return () if index not in self.views and isinstance(value.meta.get("val"), torch.Tensor) else None
