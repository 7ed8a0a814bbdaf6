"""The backward recomputes what one pointwise operator makes of tensors that live anyway: recompute_from_inputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassBase, PassResult
from torch.utils.checkpoint import CheckpointPolicy

from ort_dynamo.passes.fx.analysis.saved_tensors import JointGraph, can_recompute, is_number, is_tensor, tag
from ort_dynamo.passes.fx.analysis.storage import storage_of
from ort_dynamo.passes.fx.analysis.views import is_view
from ort_dynamo.torch_internals.operators import is_pointwise

__all__ = ["RecomputeFromInputs"]


@dataclass(frozen=True)
class RecomputeFromInputs(PassBase):
    """The pass tags saved results of pointwise operators whose arguments are saved too, or are inputs of the graph.

    So gradients are formed from an operator's inputs rather than from its output, and of two tensors that say the same
    one is saved: ORTTrainer's memory_efficient_gradient. Each costs one pointwise operator more in the backward. What
    earlier passes have tagged is left alone, and counts as not saved.
    """

    name: str = "recompute_from_inputs"

    def call(self, graph_module: GraphModule) -> PassResult:
        """Tag nodes of a joint graph, in place."""
        joint = JointGraph(graph_module)
        chosen = [node for maker in _repeatable(joint) for node in joint.sharing([maker])]
        return PassResult(graph_module, tag(chosen, CheckpointPolicy.MUST_RECOMPUTE, self.name))


def _repeatable(joint: JointGraph) -> Iterator[Node]:
    """Yield the makers of saved allocations, in order, each of which the ones that stay saved suffice to repeat."""
    returned = frozenset(map(storage_of, filter(is_tensor, joint.outputs)))
    kept = {storage_of(one.nodes[0]): one for one in joint.cut(joint.tagged()).kept}
    lives = joint.inputs | kept.keys()
    for maker in joint.forward:
        if not is_tensor(maker) or is_view(maker) or storage_of(maker) not in kept or not is_pointwise(maker.target):
            continue
        storage = storage_of(maker)
        if storage in returned or not all(map(can_recompute, joint.sharing([maker]))):
            continue
        arguments = [argument for argument in maker.all_input_nodes if not is_number(argument)]
        if all(is_tensor(one) and storage_of(one) in lives for one in arguments):
            lives = lives - {storage}
            yield maker
