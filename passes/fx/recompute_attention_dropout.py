"""attn_dropout_recompute: the backward applies the attention's dropout mask again instead of keeping the result."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassBase, PassResult
from torch.utils.checkpoint import CheckpointPolicy

from ort_dynamo.passes.analysis.stash import JointGraph, can_recompute, storage_of, tag

__all__ = ["RecomputeAttentionDropout"]

aten = torch.ops.aten

_SOFTMAX = (aten._softmax, aten._safe_softmax)
_PRODUCTS = (aten.bmm, aten.baddbmm, aten.matmul)


@dataclass(frozen=True)
class RecomputeAttentionDropout(PassBase):
    """Tag dropout between an attention's softmax and its product with the values.

    Runs after hoist_random: dropout is `softmax * (mask / (1 - p))` with a drawn mask, and the mask and the softmax,
    which the backward reads anyway, are kept. ORTTrainer's attn_dropout_recompute.
    """

    name: str = "recompute_attention_dropout"

    def call(self, graph_module: GraphModule) -> PassResult:
        """Tag nodes of a joint graph, in place."""
        joint = JointGraph(graph_module)
        nodes = [node for node in _dropouts(joint) if can_recompute(node)]
        return PassResult(graph_module, tag(nodes, CheckpointPolicy.MUST_RECOMPUTE))


def _dropouts(joint: JointGraph) -> Iterator[Node]:
    for node in joint.forward:
        if node.target is not aten.mul.Tensor or not any(_is_packet(_origin(a), _SOFTMAX) for a in node.args):
            continue
        values = [n for n in joint.forward if _tensor(n) and storage_of(n) == storage_of(node)]
        if any(_is_packet(user, _PRODUCTS) for value in values for user in value.users if joint.is_forward(user)):
            yield from values
            yield from (a for a in node.all_input_nodes if a.target is aten.div.Tensor)
            yield from (b for a in node.all_input_nodes for b in a.all_input_nodes if b.target is aten._to_copy.default)


def _origin(value: object) -> Node | None:
    """The node whose value `value` is a view or a cast of."""
    while isinstance(value, Node) and value.target in (aten.view.default, aten.expand.default, aten._to_copy.default):
        (value,) = value.args[:1]
    return value if isinstance(value, Node) else None


def _is_packet(node: Node | None, packets: tuple[object, ...]) -> bool:
    return node is not None and getattr(node.target, "overloadpacket", None) in packets


def _tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)
