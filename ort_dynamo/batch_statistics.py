"""BatchNorm computed again without its running statistics, which the forward has changed by then.

`_native_batch_norm_legit_functional` gives a result, the batch's mean and reciprocal deviation, and new running
statistics. The first three do not depend on the running statistics, but an operator that is computed again keeps all it
reads. So before the cut, an operator without running statistics makes these three; in the forward, which
needs both, it is merged with the original again.
"""

from __future__ import annotations

from torch import ops
from torch.fx import GraphModule, Node

from ort_dynamo.passes.analysis.stash import must_recompute

__all__ = ["merge_statistics", "split_statistics"]

_WITH = ops.aten._native_batch_norm_legit_functional.default
_WITHOUT = ops.aten._native_batch_norm_legit.no_stats
_SHARED = 3  # result, mean, reciprocal deviation: the first outputs of both
_ORIGINAL = "ort_dynamo.with_running_statistics"


def split_statistics(joint: GraphModule) -> None:
    """Give what BatchNorms that are computed again share to operators without running statistics."""
    for node in joint.graph.find_nodes(op="call_function", target=_WITH):
        shared = [user for user in node.users if user.args[1] in range(_SHARED)]
        if not any(map(must_recompute, shared)):
            continue
        tensor, weight, bias, _, _, training, momentum, eps = node.args
        if training is not True:
            continue  # its result is made of the running statistics, and they are not changed
        with joint.graph.inserting_after(node):
            without = joint.graph.call_function(_WITHOUT, (tensor, weight, bias, training, momentum, eps))
        without.meta = {**node.meta, "val": node.meta["val"][:_SHARED], _ORIGINAL: node.name}
        node.meta.pop("recompute", None)
        for user in list(node.users):
            if user in shared:
                user.args = (without, user.args[1])
            else:
                user.meta.pop("recompute", None)  # a result of the forward, which nothing in the backward reads
    joint.recompile()


def merge_statistics(forward: GraphModule) -> None:
    """Undo split_statistics in the forward, where both operators would be computed."""
    nodes: dict[str, Node] = {node.name: node for node in forward.graph.nodes}
    for node in forward.graph.find_nodes(op="call_function", target=_WITHOUT):
        if node.meta.get(_ORIGINAL) in nodes:
            node.replace_all_uses_with(nodes[node.meta[_ORIGINAL]])
            forward.graph.erase_node(node)
    forward.recompile()
