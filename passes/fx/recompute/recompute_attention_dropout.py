"""Recompute an attention's dropout in the backward from its saved mask: the option attn_dropout_recompute."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassBase, PassResult
from torch.utils.checkpoint import CheckpointPolicy

from ort_dynamo.passes.fx.analysis.saved_tensors import JointGraph, calls, can_recompute, tag
from ort_dynamo.passes.ordering import Condition, ordering
from ort_dynamo.torch_internals.kernels.operators import aten

__all__ = ["RecomputeAttentionDropout"]

_SOFTMAX = (aten._softmax, aten._safe_softmax)
_PRODUCTS = (aten.bmm, aten.baddbmm, aten.matmul)


@ordering(
    needs=[Condition.RANDOM_APART, Condition.READS_OF_MUTATED_SAVED, Condition.BUDGET_LEFT],
    ends=[Condition.AS_TRACED],
)
@dataclass(frozen=True)
class RecomputeAttentionDropout(PassBase):
    """Tag for recomputation the dropout between an attention's softmax and its matmul with the values.

    The pass runs after hoist_random: dropout is `softmax * (mask / (1 - p))` with a random mask. The mask and the
    softmax are saved, since the backward reads them anyway. The option is ORTTrainer's attn_dropout_recompute.
    """

    name: str = "recompute_attention_dropout"

    def call(self, graph_module: GraphModule) -> PassResult:
        """Tag nodes of a joint graph, in place."""
        joint = JointGraph(graph_module)
        nodes = [node for node in _dropouts(joint) if can_recompute(node)]
        return PassResult(graph_module, tag(nodes, CheckpointPolicy.MUST_RECOMPUTE, self.name))


def _dropouts(joint: JointGraph) -> Iterator[Node]:
    for node in joint.forward:
        if node.target is not aten.mul.Tensor or not any(_is_softmax(a) for a in node.args):
            continue
        values = joint.sharing([node])
        if any(calls(user, _PRODUCTS) for value in values for user in value.users if joint.is_forward(user)):
            yield from values
            yield from (a for a in node.all_input_nodes if a.target is aten.div.Tensor)
            yield from (b for a in node.all_input_nodes for b in a.all_input_nodes if b.target is aten._to_copy.default)


def _is_softmax(value: object) -> bool:
    """Check whether `value` is a softmax, or a view or a cast of one."""
    while isinstance(value, Node) and value.target in (aten.view.default, aten.expand.default, aten._to_copy.default):
        (value,) = value.args[:1]
    return isinstance(value, Node) and calls(value, _SOFTMAX)
