"""Compare a result that the program may write to in the forward, so that the backward reads the mask alone."""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from ort_dynamo.graph.marks import HALF
from ort_dynamo.passes.fx.analysis.mutation import mutated_storages
from ort_dynamo.passes.fx.analysis.saved_tensors import (
    JointGraph,
    allocations,
    is_number,
    is_random,
    is_tensor,
    must_recompute,
)
from ort_dynamo.passes.fx.analysis.storage import storage_of, storages_of
from ort_dynamo.torch_internals.kernels.operators import OpOverload, is_mutable
from ort_dynamo.torch_internals.pytree import tree_leaves

__all__ = ["CompareInForward"]


@dataclass(frozen=True)
class CompareInForward(PassBase):
    """Move a backward's comparison with a result of the program into the forward, which saves its mask.

    The gradient of a maximum compares the operand with the result. If the backward compared them, the result would be
    saved. Then autograd would refuse the backward after an in-place write to the result, even if the loss does not
    depend on it. torch's own partitioner, which aot_eager uses, saves the mask as well.

    The pass skips a result that the backward reads for anything but boolean tensors, since it is saved anyway. It also
    skips masks that take more memory than the tensors that they replace, as torch's partitioner does.

    Args:
        outputs: the number of the graph's results that belong to the forward.
    """

    outputs: int
    name: str = "compare_in_forward"

    def call(self, graph_module: GraphModule) -> PassResult:
        """Rewrite a joint graph in place."""
        joint = JointGraph(graph_module)
        moved = _comparisons(joint, self.outputs)
        if moved:
            last = joint.forward[-1]
            for node in moved:
                last.append(node)
                node.meta[HALF] = "is_forward"
                last = node
            graph_module.recompile()
        return PassResult(graph_module, bool(moved))


def _comparisons(joint: JointGraph, outputs: int) -> list[Node]:
    """Return the backward nodes that are to move, in order."""
    (output,) = joint.gm.graph.find_nodes(op="output")
    returned = [one for one in tree_leaves(output.args[0])[:outputs] if isinstance(one, Node) and joint.is_forward(one)]
    storages = {storage_of(one) for one in returned if is_tensor(one)} - joint.inputs
    if not storages:
        return []
    known = _known(joint)
    moved: set[Node] = set()
    for storage in storages:
        compared = _compared(joint, storage, known) or set()
        for node in reversed(joint.backward):
            if node in compared:
                compared |= {argument for argument in node.all_input_nodes if argument in known}
        if _saves_memory(joint, compared):
            moved |= compared
    return [node for node in joint.backward if node in moved]


def _saves_memory(joint: JointGraph, moved: set[Node]) -> bool:
    """Check whether the masks that `moved` nodes make are smaller than the tensors that only they read.

    Results of the forward do not count, as the program keeps them.
    """
    masks: dict[int, int] = {}
    freed: dict[int, int] = {}
    needed: set[int] = set().union(*map(storages_of, joint.outputs))
    for node in (*joint.backward, *joint.gm.graph.find_nodes(op="output")):
        for argument in node.all_input_nodes:
            if argument in moved:
                masks |= {} if node in moved else dict(allocations(argument))
            elif node in moved:
                freed |= dict(allocations(argument))
            elif node.op != "output" and not is_number(node):
                needed |= storages_of(argument)
    gained = sum(nbytes for storage, nbytes in freed.items() if storage not in needed)
    return gained > sum(masks.values())


def _known(joint: JointGraph) -> set[Node]:
    """Return the backward nodes that the forward could compute: no tangent or written value reaches them."""
    mutated = mutated_storages(joint.gm)
    known: set[Node] = set()
    for node in joint.backward:
        arguments = node.all_input_nodes
        computed = all(one in known or joint.is_forward(one) or _is_given(one) for one in arguments)
        if computed and _is_pure(node) and not any(storages_of(one) & mutated for one in arguments):
            known.add(node)
    return known


def _is_given(node: Node) -> bool:
    return node.op == "get_attr" or (node.op == "placeholder" and "tangents" not in str(node.target))


def _is_pure(node: Node) -> bool:
    if node.target is operator.getitem or is_number(node):
        return True
    return isinstance(node.target, OpOverload) and not is_mutable(node.target) and not is_random(node)


def _compared(joint: JointGraph, storage: int, known: set[Node]) -> set[Node] | None:
    """Return the nodes from a result to its masks; None if the backward has other readers of it."""
    shown = [node for node in joint.forward if is_tensor(node) and storage_of(node) == storage]
    if any(map(must_recompute, shown)):
        return None
    found: set[Node] = set()
    waiting = [user for node in shown for user in node.users if not joint.is_forward(user)]
    while waiting:
        node = waiting.pop()
        if node in found or is_number(node) or node.op == "output":
            continue
        if node not in known:
            return None
        found.add(node)
        waiting += [one for one in node.users if one in known and _is_mask(one)] if _is_mask(node) else node.users
    return found


def _is_mask(node: Node) -> bool:
    return is_tensor(node) and node.meta["val"].dtype is torch.bool
