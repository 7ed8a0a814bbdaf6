"""Recompute clusters of operators in the backward that the user names: the option recompute_plan."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch.fx import GraphModule
from torch.fx.passes.infra.pass_base import PassBase, PassResult
from torch.utils.checkpoint import CheckpointPolicy

from ort_dynamo.graph.marks import DECIDED_BY, RECOMPUTE
from ort_dynamo.options.plan_grammar import Plan, PlanType
from ort_dynamo.passes.fx.analysis.plans import Candidate, decide, find_candidates
from ort_dynamo.passes.fx.analysis.saved_tensors import JointGraph, tag
from ort_dynamo.passes.ordering import Condition, ordering
from ort_dynamo.program.program_warning import warn_program

__all__ = ["RecomputePlan"]

_LISTED = 8


@ordering(
    needs=[Condition.RANDOM_APART, Condition.READS_OF_MUTATED_SAVED, Condition.AS_TRACED, Condition.VIEWS_AS_TRACED]
)
@dataclass(frozen=True)
class RecomputePlan(PassBase):
    """Tag for recomputation the occurrences of clusters that plans name.

    It is ONNX Runtime's MemoryOptimizer with a user's configuration.

    Clusters are found in the graph before any plan, so plans do not depend on one another. If two plans match the same
    tensors, the earlier one applies. A count takes the earliest occurrences. A plan without a match, or a count above
    the occurrences, gives a warning and no error: one text is for all graphs of a model, and a recompiled model may
    have other graphs.

    Args:
        plans: the plans to apply.
    """

    plans: tuple[Plan, ...]
    name: str = "recompute_plan"

    def call(self, graph_module: GraphModule) -> PassResult:
        """Tag nodes of a joint graph, in place."""
        joint = JointGraph(graph_module)
        # A second run must see the graph that the first one saw.
        own = {node: node.meta.pop(RECOMPUTE) for node in joint.forward if node.meta.get(DECIDED_BY) == self.name}
        candidates = find_candidates(joint)
        decided = decide(joint, self._chosen(candidates))
        for policy in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE):
            tag((node for node, one in decided.items() if one is policy), policy, self.name)
        for node in own.keys() - decided.keys():
            del node.meta[DECIDED_BY]
        return PassResult(graph_module, own != decided)

    def _chosen(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        chosen: list[Candidate] = []
        unmatched: list[Plan] = []
        for plan in self.plans:
            if plan.type is PlanType.NONE:
                continue
            found = [one for one in candidates if (one.cluster, one.type) == (plan.cluster, plan.type)]
            if not found:
                unmatched.append(plan)
            elif plan.count > len(found):
                warn_program(
                    f"recompute_plan '{plan}': a graph has only {len(found)} of this cluster; all are recomputed"
                )
            chosen += found if plan.count < 0 else found[: plan.count]
        if unmatched and candidates:
            warn_program(
                f"recompute_plan {_quoted(unmatched)} matches nothing in a graph that has "
                f"{_existing(candidates, unmatched)}; ort_dynamo.memory_plan shows all with their bytes"
            )
        return chosen


def _existing(candidates: Iterable[Candidate], unmatched: Sequence[Plan]) -> str:
    """List the plans there are, nearest to the unmatched ones first."""
    plans = sorted({str(Plan(one.cluster, one.type)) for one in candidates})
    nearness = {
        text: max(difflib.SequenceMatcher(None, str(plan), text).ratio() for plan in unmatched) for text in plans
    }
    nearest = sorted(plans, key=lambda text: -nearness[text])
    more = f" and {len(nearest) - _LISTED} more" if len(nearest) > _LISTED else ""
    return _quoted(nearest[:_LISTED]) + more


def _quoted(texts: Iterable[object]) -> str:
    return ", ".join(f"'{text}'" for text in texts)
