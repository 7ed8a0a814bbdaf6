"""Find saved tensors that the backward can recompute from tensors that live anyway."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator

from torch.fx import Node

from ort_dynamo.passes.fx.analysis.saved_tensors import JointGraph, can_recompute, is_number, is_tensor
from ort_dynamo.passes.fx.analysis.storage import storage_of
from ort_dynamo.passes.fx.analysis.views import is_view

__all__ = ["repeatable"]


def repeatable(
    joint: JointGraph, lives: frozenset[int], chooses: Callable[[Node, Node], bool], *, chained: bool = False
) -> Iterator[Node]:
    """Yield the nodes that make saved results, with their views, if the other saved tensors suffice to recompute them.

    Of an operator with several results the first is recomputed; the others stay saved. Nodes that are tagged already
    are left alone, and count as not saved.

    Args:
        joint: the graph.
        lives: allocations that live although nothing saves them.
        chooses: whether an operator may be repeated, by its node and that of its result, which may be the same.
        chained: whether a repeated result suffices to repeat more: the backward reads it, and so makes it anyway.
    """
    returned = frozenset(map(storage_of, filter(is_tensor, joint.outputs)))
    kept = {storage_of(one.nodes[0]) for one in joint.cut(joint.tagged()).saved}
    lives = lives | kept
    for maker in joint.forward:
        result = _result_of(maker)
        if result is None or storage_of(result) not in kept or not chooses(maker, result):
            continue
        storage, made = storage_of(result), joint.sharing([result])
        if storage in returned or not all(map(can_recompute, made)):
            continue
        arguments = [argument for argument in maker.all_input_nodes if not is_number(argument)]
        if all(is_tensor(one) and storage_of(one) in lives for one in arguments):
            if not chained:
                lives = lives - {storage}
            yield from made if maker is result else (maker, *made)


def _result_of(maker: Node) -> Node | None:
    """Return the node of the first tensor that an operator makes; None for a view, or if nothing reads it."""
    if is_view(maker):
        return None
    if is_tensor(maker):
        return maker
    firsts = (user for user in maker.users if user.target is operator.getitem and user.args[1] == 0)
    return next(filter(is_tensor, firsts), None)
