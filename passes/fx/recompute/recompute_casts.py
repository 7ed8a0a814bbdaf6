"""Recompute casts in the backward if saving their source takes less memory, or none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassBase, PassResult
from torch.utils.checkpoint import CheckpointPolicy

from ort_dynamo.passes.fx.analysis.saved_tensors import (
    JointGraph,
    bytes_of,
    can_recompute,
    cast_source,
    is_tensor,
    tag,
)
from ort_dynamo.passes.fx.analysis.storage import storage_of
from ort_dynamo.passes.ordering import Condition, ordering

__all__ = ["RecomputeCasts"]


@ordering(needs=[Condition.READS_OF_MUTATED_SAVED])
@dataclass(frozen=True)
class RecomputeCasts(PassBase):
    """Tag for recomputation casts of float tensors whose result the backward reads.

    Saving the result of two kinds of casts wastes memory:

    1. widening casts, such as a bfloat16 activation to float32: its source has half the bytes;
    2. casts of a parameter, which is alive anyway, such as autocast's bfloat16 copies of weights.

    The result of a narrowing cast of an activation is saved: its source would be larger.

    Args:
        static: indices of the graph's inputs that live as long as the module: parameters and buffers.
    """

    static: tuple[int, ...] = ()
    name: str = "recompute_casts"

    def call(self, graph_module: GraphModule) -> PassResult:
        """Tag nodes of a joint graph, in place."""
        joint = JointGraph(graph_module)
        inputs = graph_module.graph.find_nodes(op="placeholder")
        static = frozenset(storage_of(inputs[index]) for index in self.static if is_tensor(inputs[index]))
        chosen = [node for cast in _kept_casts(joint, static) for node in joint.sharing([cast])]
        return PassResult(graph_module, tag(chosen, CheckpointPolicy.MUST_RECOMPUTE, self.name))


def _kept_casts(joint: JointGraph, static: frozenset[int]) -> Iterator[Node]:
    """Yield the casts whose result only the backward needs, and that are cheaper to recompute than to save."""
    returned = frozenset(map(storage_of, filter(is_tensor, joint.outputs)))
    kept = frozenset(map(storage_of, joint.read_by_backward))
    for cast in joint.forward:
        source = cast_source(cast)
        if source is None or not _is_float_cast(source.meta["val"], cast.meta["val"]):
            continue
        storage = storage_of(cast)
        if storage not in kept or storage in returned or not all(map(can_recompute, joint.sharing([cast]))):
            continue
        lives = storage_of(source) in static
        if lives or bytes_of(source.meta["val"])[0] < bytes_of(cast.meta["val"])[0]:
            yield cast


def _is_float_cast(before: torch.Tensor, after: torch.Tensor) -> bool:
    same_place = before.device == after.device and before.layout == after.layout
    return same_place and before.is_floating_point() and after.is_floating_point() and before.dtype != after.dtype
