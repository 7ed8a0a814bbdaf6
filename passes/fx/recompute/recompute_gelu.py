"""Recompute GELU's output in the backward from its input: the option gelu_recompute."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassBase, PassResult
from torch.utils.checkpoint import CheckpointPolicy

from ort_dynamo.passes.fx.analysis.saved_tensors import JointGraph, calls, can_recompute, tag
from ort_dynamo.passes.ordering import Condition, ordering
from ort_dynamo.torch_internals.kernels.operators import aten

__all__ = ["RecomputeGelu"]

_PRODUCTS = (aten.mm, aten.bmm, aten.addmm, aten.baddbmm, aten.linear, aten.matmul)

# The operators of a GELU spelled out by hand: x/2 (1 + erf(x/√2)), and its tanh approximation.
_SQUASH = (aten.tanh, aten.erf)
_POINTWISE = (aten.mul, aten.add, aten.pow, aten.div, *_SQUASH)


@ordering(
    needs=[Condition.RANDOM_APART, Condition.READS_OF_MUTATED_SAVED, Condition.BUDGET_LEFT],
    ends=[Condition.AS_TRACED],
)
@dataclass(frozen=True)
class RecomputeGelu(PassBase):
    """Tag for recomputation GELU outputs that a matmul reads, so that only the input is saved.

    This is ORTTrainer's gelu_recompute, GeluRecompute in ONNX Runtime's localized_recompute.cc. That handles Gelu nodes
    only; this pass also handles a GELU written in elementary operators.
    """

    name: str = "recompute_gelu"

    def call(self, graph_module: GraphModule) -> PassResult:
        """Tag nodes of a joint graph, in place."""
        joint = JointGraph(graph_module)
        nodes = [node for end in _ends(joint) for node in _gelu(joint, end) if can_recompute(node)]
        return PassResult(graph_module, tag(nodes, CheckpointPolicy.MUST_RECOMPUTE, self.name))


def _ends(joint: JointGraph) -> Iterator[Node]:
    """Yield the last nodes of activations whose output a matmul reads, perhaps through views."""
    for node in joint.forward:
        if calls(node, (aten.gelu, aten.mul)):
            readers = (user for value in joint.sharing([node]) for user in value.users if joint.is_forward(user))
            if any(calls(reader, _PRODUCTS) for reader in readers):
                yield node


def _gelu(joint: JointGraph, end: Node) -> list[Node]:
    """Collect the nodes of the activation that ends in `end`, or none if it is not a GELU."""
    if calls(end, (aten.gelu,)):
        return joint.sharing([end])
    nodes, inputs, wanted = {end}, set(), [end]
    while wanted:
        for argument in wanted.pop().all_input_nodes:
            if calls(argument, _POINTWISE) and joint.is_forward(argument):
                if argument not in nodes:
                    nodes.add(argument)
                    wanted.append(argument)
            else:
                inputs.add(argument)
    squashes = sum(calls(node, _SQUASH) for node in nodes)
    return joint.sharing(nodes) if len(inputs) == 1 and squashes == 1 else []
