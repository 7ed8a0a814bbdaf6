"""Expand log_softmax into arithmetic, so that the backward needs two scalars per row, not the whole result."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from ort_dynamo.graph.marks import IGNORES_NAN
from ort_dynamo.passes.fx.analysis.fake_values import add_call, derived_meta
from ort_dynamo.torch_internals.kernels.operators import aten

__all__ = ["ExpandLogSoftmax"]


@dataclass(frozen=True)
class ExpandLogSoftmax(PassBase):
    """`log_softmax(x)` of the last axis becomes `(x - m) - log(sum(exp(x - m)))`, where m is the maximum of a row.

    torch's kernel computes the same values in the same order. The gradient reads the result. After this pass, the
    backward can recompute the result from x and two scalars per row; in a fused kernel, that arithmetic is free. So a
    language model saves its logits as the matmul returned them, often in a half dtype, and no float32 matrix of
    log-probabilities beside them.

    The pass handles float32 and float64, half dtypes with a float32 result, and rows of 2 to `most` elements.

    Args:
        most: the maximum length of a row.
    """

    most: int
    name: str = "expand_log_softmax"

    def call(self, graph_module: GraphModule) -> PassResult:
        """Rewrite a joint or inference graph in place."""
        graph = graph_module.graph
        found = [
            node for node in graph.find_nodes(op="call_function", target=aten._log_softmax.default) if self._fits(node)
        ]
        for node in found:
            with graph.inserting_before(node):
                result = _expanded(node)
            node.replace_all_uses_with(result)
            graph.erase_node(node)
        if found:
            graph_module.recompile()
        return PassResult(graph_module, bool(found))

    def _fits(self, node: Node) -> bool:
        x, dim = node.args[0], node.args[1]
        assert isinstance(x, Node)
        assert isinstance(dim, int)
        shape, result = x.meta["val"].shape, node.meta["val"]
        if not shape or dim % len(shape) != len(shape) - 1 or result.dtype not in (torch.float32, torch.float64):
            return False
        return isinstance(shape[-1], int) and 2 <= shape[-1] <= self.most


def _expanded(node: Node) -> Node:
    x, graph = node.args[0], node.graph
    assert isinstance(x, Node)
    meta = derived_meta(node)
    if x.meta["val"].dtype != node.meta["val"].dtype:
        x = add_call(graph, aten._to_copy.default, (x,), {"dtype": node.meta["val"].dtype}, meta)
    # The sum of a row with NaN is NaN, whatever is subtracted.
    largest = add_call(graph, aten.amax.default, (x, [-1], True), meta={**meta, IGNORES_NAN: True})
    shifted = add_call(graph, aten.sub.Tensor, (x, largest), meta=meta)
    exponentials = add_call(graph, aten.exp.default, (shifted,), meta=meta)
    summed = add_call(graph, aten.sum.dim_IntList, (exponentials, [-1], True), meta=meta)
    logarithm = add_call(graph, aten.log.default, (summed,), meta=meta)
    return add_call(graph, aten.sub.Tensor, (shifted, logarithm), meta=meta)
