"""The backward recomputes what one pointwise operator makes of tensors that live anyway."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassBase, PassResult
from torch.utils.checkpoint import CheckpointPolicy

from ort_dynamo.passes.fx.analysis.saved_tensors import JointGraph, calls, can_recompute, is_number, is_tensor, tag
from ort_dynamo.passes.fx.analysis.storage import storage_of
from ort_dynamo.passes.fx.analysis.views import is_view
from ort_dynamo.torch_internals.operators import aten, is_pointwise

__all__ = ["RecomputeFromInputs", "RecomputeScaled"]

_ARITHMETIC = (aten.add, aten.sub, aten.rsub, aten.mul, aten.div, aten.neg)


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
        return _tag_repeated(joint, joint.inputs, lambda node: is_pointwise(node.target), self.name)


@dataclass(frozen=True)
class RecomputeScaled(PassBase):
    """The pass tags saved results of arithmetic with one number, like x/2, whose tensor is saved too.

    A GELU that is spelled out, x/2 (1 + tanh(...)), saves five tensors, and three with this pass. Such an operator
    passes over memory as often as keeping its result does, so a step takes no longer.
    """

    name: str = "recompute_scaled"

    def call(self, graph_module: GraphModule) -> PassResult:
        """Tag nodes of a joint graph, in place."""
        joint = JointGraph(graph_module)
        return _tag_repeated(joint, joint.inputs_read_by_backward, _is_scaled, self.name)


def _is_scaled(node: Node) -> bool:
    return calls(node, _ARITHMETIC) and len(node.all_input_nodes) == 1 and is_tensor(node.all_input_nodes[0])


def _tag_repeated(joint: JointGraph, lives: frozenset[int], chooses: Callable[[Node], bool], by: str) -> PassResult:
    chosen = [node for maker in _repeatable(joint, lives, chooses) for node in joint.sharing([maker])]
    return PassResult(joint.gm, tag(chosen, CheckpointPolicy.MUST_RECOMPUTE, by))


def _repeatable(joint: JointGraph, lives: frozenset[int], chooses: Callable[[Node], bool]) -> Iterator[Node]:
    """Yield the makers of saved allocations, in order, each of which the ones that stay saved suffice to repeat.

    Args:
        joint: the graph.
        lives: allocations that live although nothing saves them.
        chooses: whether an operator may be repeated.
    """
    returned = frozenset(map(storage_of, filter(is_tensor, joint.outputs)))
    kept = {storage_of(one.nodes[0]) for one in joint.cut(joint.tagged()).kept}
    lives = lives | kept
    for maker in joint.forward:
        if not is_tensor(maker) or is_view(maker) or storage_of(maker) not in kept or not chooses(maker):
            continue
        storage = storage_of(maker)
        if storage in returned or not all(map(can_recompute, joint.sharing([maker]))):
            continue
        arguments = [argument for argument in maker.all_input_nodes if not is_number(argument)]
        if all(is_tensor(one) and storage_of(one) in lives for one in arguments):
            lives = lives - {storage}
            yield maker
