"""Run convolutions in torch if that is faster, with the nodes that would wait for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.fx import Graph, GraphModule, Node
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from ort_dynamo.passes.fx.torch_graph.count_multiplications import (
    CONVOLUTIONS,
    convolution_weight,
    convolves_images,
    is_depthwise,
    is_product,
    multiplications,
)
from ort_dynamo.passes.fx.torch_graph.mark_chosen import choose, computes
from ort_dynamo.passes.ordering import Condition, ordering
from ort_dynamo.targets.prices import WholeGraphPrices
from ort_dynamo.targets.target import Target
from ort_dynamo.torch_internals.kernels.kernel_layouts import ONEDNN_DTYPES

__all__ = ["PlaceInTorch"]

CONVOLVES = "torch's convolutions are faster than ONNX Runtime's on this device"
SURROUNDS = "kept in torch together with the convolutions around it"


@ordering(gives=[Condition.WHOLE_KERNELS_PLACED])
@dataclass(frozen=True)
class PlaceInTorch(PassBase):
    """Marks the nodes that torch runs faster than a session, each with the reason.

    For convolutions, torch's CPU kernels (oneDNN) are 1 to 3 times as fast as ONNX Runtime's with the weight as an
    input, forward and gradients together. For a convolution that is a matmul, ONNX Runtime is as fast or faster. torch
    is faster still in channels_last, if it also runs the nodes in between.

    With several threads, torch runs the whole graph or nothing. Its OpenMP threads keep spinning for milliseconds after
    each operator. A session in between would get only a part of the cores, and lose more than it could gain. With one
    thread, each operator may run where it is faster. An estimate decides.

    Attributes:
        target: the target of the sessions.
        threads: the number of threads of a session.
    """

    target: Target
    threads: int
    name: str = "place_in_torch"

    def call(self, graph_module: GraphModule) -> PassResult:
        """Mark nodes of a joint or inference graph."""
        graph, prices = graph_module.graph, self.target.prices.convolutions
        faster = [node for node in graph.nodes if self._convolves_faster(node)]
        if not faster or prices is None:
            return PassResult(graph_module, False)
        contends = self.threads > 1 and self.target.facts.shares_the_processor
        modified = False
        sharing = prices.sharing_images if any(map(convolves_images, faster)) else prices.sharing
        if _gain(graph, faster, prices.contending if contends else sharing) > 0:
            modified = choose(faster, CONVOLVES)
            modified |= choose((node for node in graph.nodes if computes(node)), SURROUNDS)
        elif not contends:
            modified = choose(faster, CONVOLVES)
        return PassResult(graph_module, modified)

    def _convolves_faster(self, node: Node) -> bool:
        return (
            self.target.facts.convolves_slower_than_torch
            and node.target in CONVOLUTIONS
            and convolution_weight(node).dtype in ONEDNN_DTYPES
            and not is_product(node)
        )


def _gain(graph: Graph, faster: Sequence[Node], prices: WholeGraphPrices) -> float:
    """Estimate the gain if torch runs the whole graph: above 0 if it is faster."""
    convolutions = set(faster)
    return sum(
        multiplications(node) * (prices.depthwise if is_depthwise(node) else prices.convolution)
        if node in convolutions
        else -multiplications(node) * prices.product
        for node in graph.nodes
    )
