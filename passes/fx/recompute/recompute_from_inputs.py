"""Recompute in the backward the result of one pointwise op whose inputs are live anyway."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import GraphModule
from torch.fx.passes.infra.pass_base import PassBase, PassResult
from torch.utils.checkpoint import CheckpointPolicy

from ort_dynamo.passes.fx.analysis.recomputable import repeatable
from ort_dynamo.passes.fx.analysis.saved_tensors import JointGraph, tag
from ort_dynamo.passes.ordering import Condition, ordering
from ort_dynamo.torch_internals.kernels.operators import is_pointwise

__all__ = ["RecomputeFromInputs"]


@ordering(
    needs=[Condition.RANDOM_APART, Condition.READS_OF_MUTATED_SAVED, Condition.BUDGET_LEFT],
    ends=[Condition.AS_TRACED],
)
@dataclass(frozen=True)
class RecomputeFromInputs(PassBase):
    """Tag for recomputation saved results of pointwise operators whose arguments are saved, or inputs of the graph.

    The backward then computes gradients from an operator's inputs instead of its output, and only one of the two is
    saved. This is ORTTrainer's memory_efficient_gradient. Each such result costs one more pointwise operator in the
    backward. Nodes that earlier passes have tagged do not change, and count as not saved.
    """

    name: str = "recompute_from_inputs"

    def call(self, graph_module: GraphModule) -> PassResult:
        """Tag nodes of a joint graph, in place."""
        joint = JointGraph(graph_module)
        chosen = repeatable(joint, joint.inputs, lambda maker, result: maker is result and is_pointwise(maker.target))
        return PassResult(graph_module, tag(list(chosen), CheckpointPolicy.MUST_RECOMPUTE, self.name))
