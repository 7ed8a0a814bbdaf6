"""Recompute arithmetic on live tensors in the backward, where that takes no longer than saving its result."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassBase, PassResult
from torch.utils.checkpoint import CheckpointPolicy

from ort_dynamo.passes.fx.analysis.recomputable import repeatable
from ort_dynamo.passes.fx.analysis.saved_tensors import JointGraph, bytes_of, calls, is_tensor, tag
from ort_dynamo.passes.ordering import Condition, ordering
from ort_dynamo.torch_internals.operators import aten

__all__ = ["RecomputeArithmetic"]

_ARITHMETIC = (aten.add, aten.sub, aten.rsub, aten.mul, aten.div, aten.neg)

_NORMALIZATIONS = (aten.native_layer_norm, aten._fused_rms_norm)
"""Their statistics stay saved; their gradients read their inputs, so those live anyway."""


@ordering(needs=[Condition.READS_OF_MUTATED_SAVED])
@dataclass(frozen=True)
class RecomputeArithmetic(PassBase):
    """The pass tags saved results of arithmetic whose arguments are saved too, or are inputs that the backward reads.

    1. Of a tensor with one scalar, like x/2, of any size. A GELU that is spelled out, x/2 (1 + tanh(...)), saves five
       tensors, and three with this pass.
    2. Of several tensors, and by layer and RMS normalization, where the result has `least` bytes or more: such a
       tensor is in no cache any more when the backward reads it. So for a SwiGLU or a normalization that is spelled
       out, only the operands of the elementwise chain are saved, not the result that the matmuls read.

    A recomputed result counts as saved to the operators after it: the backward makes it anyway. So for an RMS
    normalization that is spelled out, neither the normalized tensor nor its product with the weight is saved.

    Such an operator passes over memory about as often as keeping its result does, so a step takes no longer.

    Args:
        least: bytes; None for 1 alone. Symbolic sizes count by their hints.
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
