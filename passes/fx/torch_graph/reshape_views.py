"""Make views of torch's results tolerate other strides than fake tensors promise."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from ort_dynamo.passes.fx.analysis.aliases import aliased_inputs
from ort_dynamo.passes.fx.analysis.views import is_given_by_island
from ort_dynamo.passes.ordering import Condition, ordering
from ort_dynamo.torch_internals.kernels.operators import OpOverload, aten
from ort_dynamo.torch_internals.kernels.view_operators import RESHAPES

__all__ = ["ReshapeViews"]


@ordering(needs=[Condition.FUNCTIONAL])
@dataclass(frozen=True)
class ReshapeViews(PassBase):
    """Replace `view` by `reshape` in an outer graph, except on the results of islands.

    `view` raises if the strides do not allow it, and real strides may differ from those of fake tensors. `reshape` is
    the same view if they agree, and a copy if not. Results of sessions are contiguous.
    """

    name: str = "reshape_views"

    def call(self, graph_module: GraphModule) -> PassResult:
        """Rewrite, in place, an outer graph."""
        nodes = graph_module.graph.nodes
        views = [node for node in nodes if node.target in RESHAPES and not is_given_by_island(_maker(node))]
        for node in views:
            node.target = aten.reshape.default
        if views:
            graph_module.recompile()
        return PassResult(graph_module, bool(views))


def _maker(view: Node) -> Node:
    """Return the node at the end of a chain of views."""
    while isinstance(view.target, OpOverload) and (sources := aliased_inputs(view)):
        view = sources[0]
    return view
