"""Recompute in the backward the nodes that take the least time for their bytes, down to the option memory_budget."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassBase, PassResult
from torch.utils.checkpoint import CheckpointPolicy

from ort_dynamo.passes.fx.analysis.saved_tensors import (
    JointGraph,
    SavedTensor,
    can_recompute,
    is_number,
    is_tensor,
    tag,
    time_of,
)
from ort_dynamo.passes.fx.analysis.storage import storage_of
from ort_dynamo.passes.ordering import Condition, ordering

__all__ = ["RecomputeToBudget"]


@ordering(
    needs=[Condition.RANDOM_APART, Condition.READS_OF_MUTATED_SAVED, Condition.BUDGET_LEFT],
    ends=[Condition.AS_TRACED, Condition.BUDGET_LEFT],
)
@dataclass(frozen=True)
class RecomputeToBudget(PassBase):
    """Tag nodes for recomputation until the forward saves no more than the budget.

    Each step drops the allocation with the most bytes per time of recomputation (Dantzig's greedy order for the
    knapsack). The time counts only nodes that are not recomputed already. A smaller budget continues the same sequence,
    so saved bytes never rise when the budget falls. An exact solution for each budget would not guarantee that.

    Args:
        budget: a fraction in [0, 1] of the bytes saved without recomputation (float), or bytes (int).
    """

    budget: float | int
    name: str = "recompute_to_budget"

    def call(self, graph_module: GraphModule) -> PassResult:
        """Tag nodes of a joint graph, in place."""
        joint = JointGraph(graph_module)
        tagged = joint.tagged()
        limit = self.budget * joint.cut(()).nbytes if isinstance(self.budget, float) else self.budget
        chosen = _give_up(joint, tagged, limit)
        return PassResult(graph_module, tag(chosen, CheckpointPolicy.MUST_RECOMPUTE, self.name))


def _give_up(joint: JointGraph, recomputed: set[Node], limit: float) -> list[Node]:
    """Choose nodes to recompute beside `recomputed`, so that at most `limit` bytes are saved, or as few as can be."""
    kept = {storage_of(one.nodes[0]): one for one in joint.cut(recomputed).saved}
    again = set(recomputed)
    total = sum(one.nbytes for one in kept.values())
    offers = {key: _Offer(joint, one, kept.keys(), again) for key, one in kept.items()}
    while total > limit and any(offer.possible for offer in offers.values()):
        key = max((k for k, offer in offers.items() if offer.possible), key=lambda k: offers[k].worth)
        total -= kept.pop(key).nbytes
        chosen = offers.pop(key)
        again |= chosen.nodes
        for other, offer in offers.items():
            if key in offer.sources or offer.nodes & chosen.nodes:
                offers[other] = _Offer(joint, kept[other], kept.keys(), again)
    return [node for node in joint.forward if node in again and node not in recomputed]


class _Offer:
    """The cost and gain of not saving one allocation.

    Attributes:
        nodes: nodes to recompute, from other saved allocations and inputs.
        sources: the storages of these allocations.
        possible: whether all of them can be recomputed.
        worth: bytes per unit of time.
    """

    def __init__(self, joint: JointGraph, kept: SavedTensor, held: Collection[int], again: Collection[Node]) -> None:
        self.nodes: set[Node] = set()
        self.sources: set[int] = set()
        self.possible = True
        own = storage_of(kept.nodes[0])
        wanted = list(kept.nodes)
        while wanted and self.possible:
            node = wanted.pop()
            self.possible = node in again or can_recompute(node)
            self.nodes.add(node)
            for argument in filter(joint.is_forward, node.all_input_nodes):
                if is_tensor(argument) and (storage := storage_of(argument)) in held and storage != own:
                    self.sources.add(storage)
                elif argument not in self.nodes and not is_number(argument):
                    wanted.append(argument)
        time = sum(time_of(node) for node in self.nodes.difference(again))
        self.worth = kept.nbytes / (time + 1.0)
