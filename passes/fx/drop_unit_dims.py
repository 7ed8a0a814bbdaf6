"""Compute a sum without keepdim, if its readers drop the dimensions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from ort_dynamo.passes.fx.analysis.fake_values import propagate
from ort_dynamo.passes.fx.analysis.saved_tensors import tagged_alike
from ort_dynamo.torch_internals.kernels.operators import aten
from ort_dynamo.torch_internals.kernels.view_operators import REARRANGEMENTS
from ort_dynamo.torch_internals.sizes.symbols import given_expression

__all__ = ["DropUnitDims"]


@dataclass(frozen=True)
class DropUnitDims(PassBase):
    """Rewrite `view(sum(x, dims, keepdim=True), sizes)` as `sum(x, dims)`, if that has these sizes.

    The gradient of each linear layer's bias is such a sum. Nothing else may read the sum, and both nodes or none must
    be tagged for recomputation.
    """

    name: str = "drop_unit_dims"

    def call(self, graph_module: GraphModule) -> PassResult:
        """Rewrite `graph_module` in place."""
        graph = graph_module.graph
        modified = False
        for node in graph.find_nodes(op="call_function", target=aten.sum.dim_IntList):
            views = list(node.users)
            if _keeps(node) and all(_drops(view, node) for view in views):
                node.update_arg(2, False)
                propagate([node])
                for view in views:
                    view.replace_all_uses_with(node)
                    graph.erase_node(view)
                modified = True
        if modified:
            graph_module.recompile()
        return PassResult(graph_module, modified)


def _keeps(node: Node) -> bool:
    """Check whether the sum keeps the dimensions that it sums over, and has readers."""
    return len(node.args) > 2 and node.args[2] is True and bool(node.users)


def _drops(view: Node, node: Node) -> bool:
    """Check whether a reader only drops the kept dimensions of the sum, and is recomputed exactly where the sum is."""
    return view.target in REARRANGEMENTS and tagged_alike(view, node) and _sizes(view) == _kept(node)


def _sizes(node: Node) -> list[Any]:
    return [given_expression(size) for size in node.meta["val"].shape]


def _kept(node: Node) -> list[Any]:
    """Return the sizes of the sum without the dimensions that it sums over."""
    rank = node.meta["val"].dim()
    dims: Any = node.args[1]
    summed = {dim % rank for dim in dims} if dims else set(range(rank))
    return [size for dim, size in enumerate(_sizes(node)) if dim not in summed]
