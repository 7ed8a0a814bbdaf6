"""Make views of torch's results tolerate other strides than fake tensors promise."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from ort_dynamo.passes.fx.analysis.aliases import AliasSets
from ort_dynamo.passes.fx.analysis.views import RESHAPES
from ort_dynamo.torch_internals.operators import OpOverload, aten

__all__ = ["ReshapeViews"]


@dataclass(frozen=True)
class ReshapeViews(PassBase):
    """Replace `view` by `reshape` in an outer graph, but where it reads what an island gives.

    `view` raises where strides do not allow it, and strides of fake tensors are a promise that a kernel may not keep.
    `reshape` is the same view where they are as promised, and a copy where not. Results of sessions are contiguous.
    """

    name: str = "reshape_views"

    def call(self, graph_module: GraphModule) -> PassResult:
        """Rewrite, in place, an outer graph."""
        aliases = AliasSets(graph_module.graph)
        views = [
            node for node in graph_module.graph.nodes if node.target in RESHAPES and _is_torchs(aliases.of(node)[0])
        ]
        for node in views:
            node.target = aten.reshape.default
        if views:
            graph_module.recompile()
        return PassResult(graph_module, bool(views))


def _is_torchs(maker: Node) -> bool:
    """Whether a kernel of torch's made a tensor, in this graph or, of a saved tensor, in the forward."""
    return maker.op == "placeholder" or isinstance(maker.target, OpOverload)
