"""Find recompute candidates, in the units of ONNX Runtime's memory optimizer: clusters of operators."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import sympy
from torch.fx import Node
from torch.utils.checkpoint import CheckpointPolicy

from ort_dynamo.options.plan_grammar import Plan, PlanType
from ort_dynamo.passes.fx.analysis.operator_names import names_of
from ort_dynamo.passes.fx.analysis.saved_tensors import (
    JointGraph,
    SavedTensor,
    bytes_of,
    can_recompute,
    cast_source,
    is_number,
    is_tensor,
    time_of,
)
from ort_dynamo.passes.fx.analysis.storage import storage_of
from ort_dynamo.passes.fx.analysis.views import is_view, maker_of

__all__ = ["Candidate", "PlanRow", "decide", "find_candidates", "plan_rows"]

_LONGEST = 50
"""Computations in one cluster, as in ONNX Runtime. Longer ones are the task of memory_budget and layers."""


@dataclass(frozen=True)
class Candidate:
    """One occurrence of a cluster: the saved results of one computation, and how to recompute them.

    Attributes:
        cluster: names of the recomputed operators, each followed by "+".
        type: RECOMPUTE, or RECOMPUTE_WITH_COMPROMISE.
        again: the nodes to recompute, views included, in order.
        narrow: the narrow tensors of casts, saved instead.
    """

    cluster: str
    type: PlanType
    again: tuple[Node, ...]
    narrow: tuple[Node, ...]


@dataclass(frozen=True)
class PlanRow:
    """The effect of one plan, alone, on one graph.

    Attributes:
        plan: the plan for all occurrences; its str is the text to set.
        frequency: occurrences.
        nbytes: bytes that the forward no longer saves; symbolic sizes by their example.
        size: the same in symbols.
        time: estimated time that the backward takes longer, as a share of the forward's.
    """

    plan: Plan
    frequency: int
    nbytes: int
    size: sympy.Expr
    time: float


def find_candidates(joint: JointGraph) -> list[Candidate]:
    """Find all occurrences of all clusters of a joint graph, in the forward's order.

    A cluster has the nodes that the backward must recompute for the saved tensors of one computation. They start from
    tensors that the backward has anyway: other saved tensors, inputs, and tensors that torch.utils.checkpoint
    recomputes already. Clusters are found before any plan is applied. They contain no random ops, no ops with effects
    and no nodes with a policy.
    """
    before = joint.cut(joint.tagged())
    had = {storage_of(one.nodes[0]) for one in before.saved} | joint.inputs
    made_by: dict[Node, list[SavedTensor]] = defaultdict(list)
    for one in before.saved:
        made_by[maker_of(one.nodes[0])].append(one)
    candidates = []
    for _, group in sorted(made_by.items(), key=lambda item: joint.position(item[0])):
        available = _Available(joint, had - {storage_of(one.nodes[0]) for one in group}, frozenset(before.recomputed))
        candidates += available.ways(group)
    return candidates


def decide(joint: JointGraph, chosen: Iterable[Candidate]) -> dict[Node, CheckpointPolicy]:
    """Find the policy of each forward node if these candidates are taken, the earlier ones first.

    A node that the backward then does not need gets no policy: torch would save its inputs all the same.
    """
    wanted: dict[Node, CheckpointPolicy] = {}
    for candidate in chosen:
        wanted |= {n: CheckpointPolicy.MUST_RECOMPUTE for n in candidate.again if n not in wanted}
        wanted |= {n: CheckpointPolicy.MUST_SAVE for n in candidate.narrow if n not in wanted}
    recomputed = {node for node, policy in wanted.items() if policy is CheckpointPolicy.MUST_RECOMPUTE}
    cut = joint.cut(recomputed | joint.tagged())
    needed = {*cut.recomputed, *(node for one in cut.saved for node in one.nodes)}
    return {node: policy for node, policy in wanted.items() if node in needed}


def plan_rows(joint: JointGraph) -> tuple[PlanRow, ...]:
    """Return the planning table of a joint graph: every plan that applies to it, most bytes first."""
    groups: dict[tuple[str, PlanType], list[Candidate]] = defaultdict(list)
    for candidate in find_candidates(joint):
        groups[candidate.cluster, candidate.type].append(candidate)
    tagged = joint.tagged()
    before = joint.cut(tagged)
    rows = []
    for (cluster, kind), candidates in groups.items():
        decided = decide(joint, candidates)
        after = joint.cut(tagged | {n for n, policy in decided.items() if policy is CheckpointPolicy.MUST_RECOMPUTE})
        more = sum(time_of(node) for node in set(after.recomputed).difference(before.recomputed))
        rows.append(
            PlanRow(
                Plan(cluster, kind),
                len(candidates),
                before.nbytes - after.nbytes,
                before.size - after.size,
                more / joint.time if joint.time else 0.0,
            )
        )
    return tuple(sorted(rows, key=lambda row: (-row.nbytes, str(row.plan))))


@dataclass(frozen=True)
class _Available:
    """The tensors that the backward has without the allocations of one maker.

    Attributes:
        storages: allocations that are saved, and inputs.
        again: nodes that it recomputes already.
    """

    joint: JointGraph
    storages: Collection[int]
    again: frozenset[Node]

    def ways(self, group: Sequence[SavedTensor]) -> list[Candidate]:
        """Return the candidates for these allocations: without compromise and with one, where either exists."""
        found = []
        plain = self._back_to(group, compromise=False)
        if plain is not None:
            found.append(self._candidate(PlanType.RECOMPUTE, *plain))
        narrowed = self._back_to(group, compromise=True)
        if narrowed is not None and narrowed[1]:
            sides = {storage_of(node): bytes_of(node.meta["val"])[0] for node in narrowed[1]}
            if sum(sides.values()) < sum(one.nbytes for one in group):
                found.append(self._candidate(PlanType.RECOMPUTE_WITH_COMPROMISE, *narrowed))
        return found

    def _candidate(self, kind: PlanType, again: set[Node], narrow: set[Node]) -> Candidate:
        ordered = tuple(sorted(again, key=self.joint.position))
        cluster = "".join(f"{name}+" for name in names_of(ordered))
        return Candidate(cluster, kind, ordered, tuple(sorted(narrow, key=self.joint.position)))

    def _back_to(self, group: Sequence[SavedTensor], compromise: bool) -> tuple[set[Node], set[Node]] | None:
        """Nodes to recompute and narrow sides to save, or None if it cannot be or takes too much."""
        stops: set[Node] = set()
        while (found := self._walk(group, compromise, stops)) is not None and not found[1] <= stops:
            stops |= found[1]  # a narrow side that is saved is there for all that reads it, not for its cast alone
        return found

    def _walk(
        self, group: Sequence[SavedTensor], compromise: bool, stops: Collection[Node]
    ) -> tuple[set[Node], set[Node]] | None:
        again: set[Node] = set()
        narrow: set[Node] = set()
        wanted = [node for one in group for node in one.nodes]
        while wanted:
            node = wanted.pop()
            if not can_recompute(node):
                return None
            again.add(node)
            if sum(not is_view(one) for one in again) > _LONGEST:
                return None
            for argument in filter(self._lacks, node.all_input_nodes):
                if argument in stops or (compromise and _widens(node)):
                    narrow.add(argument)
                elif argument not in again:
                    wanted.append(argument)
        return again, narrow

    def _lacks(self, node: Node) -> bool:
        if not self.joint.is_forward(node) or is_number(node) or node in self.again:
            return False
        return not (is_tensor(node) and storage_of(node) in self.storages)


def _widens(node: Node) -> bool:
    """Check whether `node` is a cast to a dtype of more bytes."""
    source, own = cast_source(node), node.meta["val"]
    return source is not None and bool(source.meta["val"].element_size() < own.element_size())
