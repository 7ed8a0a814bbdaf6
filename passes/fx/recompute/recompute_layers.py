"""Save the inputs of each layer, and recompute its inside in the backward: transformer_layer_recompute."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassBase, PassResult
from torch.utils.checkpoint import CheckpointPolicy

from ort_dynamo.graph.marks import RECOMPUTE
from ort_dynamo.passes.fx.analysis.layers import Layer, find_layers
from ort_dynamo.passes.fx.analysis.saved_tensors import JointGraph, can_recompute, is_tensor, tag
from ort_dynamo.passes.fx.analysis.storage import storage_of
from ort_dynamo.passes.ordering import Condition, ordering
from ort_dynamo.program.program_warning import warn_program

__all__ = ["RecomputeLayers"]


@ordering(
    needs=[
        Condition.RANDOM_APART,
        Condition.READS_OF_MUTATED_SAVED,
        Condition.BUDGET_LEFT,
        Condition.VIEWS_AS_TRACED,
    ],
    ends=[Condition.AS_TRACED],
)
@dataclass(frozen=True)
class RecomputeLayers(PassBase):
    """Tag for recomputation the inside of the first layers.

    These are ORTTrainer's transformer_layer_recompute and number_recompute_layers.

    Args:
        count: the number of layers to recompute, from the first; 0 means all but the last, which the backward needs
            first. A count of all layers or more is reduced to that with a warning, as in ONNX Runtime.
    """

    count: int = 0
    name: str = "recompute_layers"

    def call(self, graph_module: GraphModule) -> PassResult:
        """Tag nodes of a joint graph, in place."""
        joint = JointGraph(graph_module)
        if not joint.read_by_backward:
            return PassResult(graph_module, False)
        layers = find_layers(joint)
        if len(layers) < 2:
            warn_program(
                "recomputing layers changes nothing: the graph has no two numbered sibling modules of one "
                "class that keep tensors for the backward, and no repeated piece between single tensors"
            )
            return PassResult(graph_module, False)
        count = self.count or len(layers) - 1
        if count > len(layers) - 1:
            warn_program(
                f"layers:{count} is asked for; of the {len(layers)} layers found, the first {len(layers) - 1} "
                "are recomputed"
            )
            count = len(layers) - 1
        modified = False
        for layer in layers[:count]:
            leaving = set(_leaving(joint, layer))
            modified |= tag((n for n in leaving if RECOMPUTE not in n.meta), CheckpointPolicy.MUST_SAVE, self.name)
            inside = [n for n in layer.nodes if n not in leaving and can_recompute(n)]
            modified |= tag(inside, CheckpointPolicy.MUST_RECOMPUTE, self.name)
        return PassResult(graph_module, modified)


def _leaving(joint: JointGraph, layer: Layer) -> Iterator[Node]:
    """Yield the nodes of the layer whose values the rest of the forward reads, or the caller."""
    inside = set(layer.nodes)
    for node in layer.nodes:
        if not is_tensor(node) or storage_of(node) in joint.inputs:
            continue
        outside = any(user not in inside and joint.is_forward(user) for user in node.users)
        if outside or node in joint.outputs:
            yield node
