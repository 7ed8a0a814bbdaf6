"""Leave in torch, on a GPU, the operators that are one kernel of torch and many in a session.

A session launches a kernel for each node.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from ort_dynamo.graph.dtypes import onnx_dtype
from ort_dynamo.graph.marks import CHANNELS_LAST
from ort_dynamo.passes.fx.torch_graph.count_multiplications import CONVOLUTIONS, convolution_weight, multiplications
from ort_dynamo.passes.fx.torch_graph.mark_chosen import choose, computes
from ort_dynamo.passes.fx.torch_graph.whole_kernels import ATTENTION, adds_rows, repeats, saved, sorts_long_rows
from ort_dynamo.passes.ordering import Condition, ordering
from ort_dynamo.targets.target import Target
from ort_dynamo.torch_internals.kernels.operators import aten

__all__ = ["PlaceWholeKernels"]

GRADIENT = "torch has a kernel for a convolution's gradients, and ONNX Runtime does not"
CONVOLVES_WIDE = "torch computes convolutions in this dtype, and ONNX Runtime needs a wider one"
NORMALIZES = "torch has one kernel for it, and ONNX Runtime needs several"
ATTENDS = "torch's fused attention does not store the whole score matrix"
REPEATS = "torch has one kernel for it, and ONNX Runtime a loop whose rounds the host waits for"
SORTS = "torch sorts all rows at once, and ONNX Runtime long rows one after another"
ADDS = "torch adds to a place in the same order each time, and ONNX Runtime in any order"
BETWEEN = "kept in torch together with the convolutions and normalizations around it"


@ordering(needs=[Condition.WHOLE_KERNELS_PLACED], ends=[Condition.PLACED])
@dataclass(frozen=True)
class PlaceWholeKernels(PassBase):
    """Marks the nodes that are one kernel in torch and many in a session, each with the reason.

    The gradients of a convolution always run in torch: cuDNN computes them, and ONNX Runtime has no operator for them.
    A forward convolution stays in the session if its kernel, also cuDNN's, supports the dtype. Fused attention stays in
    torch. A normalization runs in torch if it saves more, in launches and in passes over memory, than the boundary
    costs. An operator that a session would compute in a loop runs in torch, and so does a sort of long rows. The
    gradient of a lookup runs in torch, too: the float sums of a session's kernel differ from run to run.

    If convolutions multiply more than matmuls do, torch runs the whole graph. The nodes between convolutions are
    pointwise, and a session launches as many kernels for them as torch. Fused kernels are fewer, so a graph that
    PermuteImages has put into channels_last is shared between torch and sessions.

    Attributes:
        target: the target of the sessions.
        deterministic: whether torch.use_deterministic_algorithms() is on. torch then runs all float sums at indices.
    """

    target: Target
    deterministic: bool = False
    name: str = "place_whole_kernels"

    def call(self, graph_module: GraphModule) -> PassResult:
        """Mark nodes of a joint or inference graph."""
        nodes = list(graph_module.graph.nodes)
        modified = False
        for node in nodes:
            reason = self._reason(node)
            if reason is not None:
                modified |= choose([node], reason)
        has_channels_last = any(CHANNELS_LAST in node.meta for node in nodes)
        if self.target.facts.leaves_convolution_gradients and not has_channels_last and _convolves_most(nodes):
            modified |= choose((node for node in nodes if computes(node)), BETWEEN)
        return PassResult(graph_module, modified)

    def _reason(self, node: Node) -> str | None:
        target, prices = self.target, self.target.prices.kernels
        if target.facts.leaves_convolution_gradients:
            if node.target is aten.convolution_backward.default:
                return GRADIENT
            if node.target is aten.convolution.default and self._convolves_wider(node):
                return CONVOLVES_WIDE
        if target.facts.leaves_normalizations and prices is not None and node.target in prices.normalizations:
            return NORMALIZES if saved(node, prices) > prices.cut else None
        if target.facts.leaves_attention and node.target in ATTENTION:
            return ATTENDS
        if target.facts.adds_in_any_order and adds_rows(node, deterministic=self.deterministic):
            return ADDS
        if target.facts.leaves_loops:
            return REPEATS if repeats(node) else SORTS if sorts_long_rows(node) else None
        return None

    def _convolves_wider(self, node: Node) -> bool:
        dtype = convolution_weight(node).dtype
        return dtype in _HALF and not self.target.takes("Conv", "", {"T": onnx_dtype(dtype)})


_HALF = (torch.float16, torch.bfloat16)


def _convolves_most(nodes: Iterable[Node]) -> bool:
    """Check whether convolutions take more multiplications than matmuls, by the example's sizes."""
    counts = {True: 0, False: 0}
    for node in nodes:
        counts[node.target in CONVOLUTIONS] += multiplications(node)
    return counts[True] > counts[False]
