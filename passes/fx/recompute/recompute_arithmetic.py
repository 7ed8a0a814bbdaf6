"""Recompute arithmetic on live tensors in the backward, where that takes no longer than saving its result."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassBase, PassResult
from torch.utils.checkpoint import CheckpointPolicy

from ort_dynamo.passes.fx.analysis.recomputable import repeatable
from ort_dynamo.passes.fx.analysis.saved_tensors import JointGraph, bytes_of, calls, is_tensor, tag
from ort_dynamo.passes.ordering import Condition, ordering
from ort_dynamo.torch_internals.kernels.operators import aten

__all__ = ["RecomputeArithmetic"]

_ARITHMETIC = (aten.add, aten.sub, aten.rsub, aten.mul, aten.div, aten.neg)

_NORMALIZATIONS = (aten.native_layer_norm, aten._fused_rms_norm)
"""Their statistics stay saved; their gradients read their inputs, so those live anyway."""


@ordering(needs=[Condition.READS_OF_MUTATED_SAVED])
@dataclass(frozen=True)
class RecomputeArithmetic(PassBase):
    """Tag saved results of arithmetic for recomputation, if the arguments are saved, or inputs that the backward reads.

    1. Arithmetic on a tensor and a scalar, like x/2, of any size. A GELU written as x/2 (1 + tanh(...)) saves five
       tensors; with this pass, three.
    2. Arithmetic on several tensors, and layer and RMS normalization, if the result has `least` bytes or more: such a
       tensor has left the processor's cache when the backward reads it. So a SwiGLU or a normalization written in
       elementary operators saves only the operands of its pointwise chain, not the result that matmuls read.

    A recomputed result counts as saved for the operators after it, since the backward computes it anyway. So an RMS
    normalization written in elementary operators saves neither the normalized tensor nor its multiple by the weight.

    Such an operator passes over memory about as often as saving its result does, so a step takes no longer.

    Args:
        least: bytes; None recomputes only the first kind. Symbolic sizes count by their hints.
    """

    least: int | None = None
    name: str = "recompute_arithmetic"

    def call(self, graph_module: GraphModule) -> PassResult:
        """Tag nodes of a joint graph, in place."""
        joint = JointGraph(graph_module)
        chosen = list(repeatable(joint, joint.inputs_read_by_backward, self._is_cheap, chained=True))
        return PassResult(graph_module, tag(chosen, CheckpointPolicy.MUST_RECOMPUTE, self.name))

    def _is_cheap(self, maker: Node, result: Node) -> bool:
        if calls(maker, _ARITHMETIC) and len(maker.all_input_nodes) == 1 and is_tensor(maker.all_input_nodes[0]):
            return True
        is_large = self.least is not None and bytes_of(result.meta["val"])[0] >= self.least
        return is_large and calls(maker, (*_ARITHMETIC, *_NORMALIZATIONS))
