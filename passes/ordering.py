"""Conditions between passes: those that a pass needs of earlier passes, and those that it leaves to later ones.

A pass states its conditions by the decorator `ordering`. `check_order` follows them through a pipeline, so a pass at a
wrong place is an error when the pipeline is built, not a wrong graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from onnx_ir.passes.common import (
    CommonSubexpressionEliminationPass,
    IdentityEliminationPass,
    RemoveUnusedNodesPass,
    RemoveUnusedOpsetsPass,
)

from ort_dynamo.errors import PassOrderError

__all__ = ["AT_FIRST", "Condition", "Ordering", "check_order", "ordering", "ordering_of"]

_C = TypeVar("_C", bound=type)


class Condition(Enum):
    """A condition that may hold of a graph; its value completes the sentence "it needs that …"."""

    # FX graphs
    FUNCTIONAL = "no operator of the graph writes to a tensor in place"
    RANDOM_APART = "random operators stand apart"
    WHOLE_KERNELS_PLACED = "it is decided which convolutions, normalizations and attentions torch runs"
    PLACED = "it is decided what torch runs by choice"
    READS_OF_MUTATED_SAVED = "reads of tensors that are written to later are saved"
    AS_TRACED = "no policy has decided about recomputation, so that clusters have the names that memory_plan() shows"
    BUDGET_LEFT = "the memory budget is not yet spent"
    VIEWS_AS_TRACED = "views are as the program made them, by which layers are found"
    VIEWS_MERGED = "views of views are views of their base"
    STATISTICS_SPLIT = "updates of running statistics stand beside batch norms"
    SEEDLESS_HIDDEN = "attention without dropout does not look random"
    RESULTS_OWNED = "results that the program may resize are torch's own"
    STRIDES_GIVEN = "outputs have eager's strides"

    # ONNX models
    CASTS_OF_EACH = "each operator has the casts that its lowering gave it"
    OUTPUTS_SEPARATE = "no two outputs are one value"
    EQUALS_MERGED = "equal nodes are one"
    ROUND_TRIPS_GONE = "no cast only undoes another"
    BEFORE_FUSIONS = "no fusion has made nodes that stay float32"
    CASTS_MOVED = "casts are where they stay"
    NO_DEAD_NODES = "nothing is computed that nothing reads"
    IN_ORDER = "nodes stand in AOTAutograd's order"


AT_FIRST = frozenset(
    {
        Condition.FUNCTIONAL,
        Condition.AS_TRACED,
        Condition.BUDGET_LEFT,
        Condition.VIEWS_AS_TRACED,
        Condition.CASTS_OF_EACH,
        Condition.BEFORE_FUSIONS,
    }
)
"""The conditions that hold before any pass."""


@dataclass(frozen=True)
class Ordering:
    """The conditions of a pass.

    Attributes:
        needs: those that must hold before it.
        gives: those that hold after it.
        ends: those that no longer hold after it.
    """

    needs: frozenset[Condition] = frozenset()
    gives: frozenset[Condition] = frozenset()
    ends: frozenset[Condition] = frozenset()


def ordering(
    needs: Iterable[Condition] = (), gives: Iterable[Condition] = (), ends: Iterable[Condition] = ()
) -> Callable[[_C], _C]:
    """Make a class decorator that states the conditions of a pass."""
    stated = Ordering(frozenset(needs), frozenset(gives), frozenset(ends))

    def state(cls: _C) -> _C:
        _STATED[cls] = stated
        return cls

    return state


_STATED: dict[type, Ordering] = {
    IdentityEliminationPass: Ordering(ends=frozenset({Condition.CASTS_OF_EACH})),
    CommonSubexpressionEliminationPass: Ordering(
        needs=frozenset({Condition.OUTPUTS_SEPARATE}),
        gives=frozenset({Condition.EQUALS_MERGED}),
        ends=frozenset({Condition.OUTPUTS_SEPARATE, Condition.CASTS_OF_EACH}),
    ),
    RemoveUnusedNodesPass: Ordering(gives=frozenset({Condition.NO_DEAD_NODES})),
    RemoveUnusedOpsetsPass: Ordering(needs=frozenset({Condition.NO_DEAD_NODES})),
}
"""Class of a pass -> its conditions; here, of those that are not ours."""


def ordering_of(pass_: Any) -> Ordering:
    """Give the conditions of a pass; one that states none, such as a program's own, needs nothing and ends nothing."""
    return _STATED.get(type(pass_), Ordering())


def check_order(passes: Iterable[Any], holding: Set[Condition] = AT_FIRST) -> frozenset[Condition]:
    """Check that each pass of a pipeline has the conditions that it needs.

    Args:
        passes: in order.
        holding: the conditions that hold before the first.

    Returns:
        The conditions that hold after the last.

    Raises:
        PassOrderError: a condition that a pass needs does not hold before it.
    """
    holds = frozenset(holding)
    ended: dict[Condition, str] = {}
    for pass_ in passes:
        stated, name = ordering_of(pass_), type(pass_).__name__
        for condition in sorted(stated.needs - holds, key=lambda one: one.name):
            cause = (
                f"{ended[condition]}, which runs before it, ends that" if condition in ended else _no_giver(condition)
            )
            raise PassOrderError(name=name, condition=condition.value, cause=cause)
        holds = (holds - stated.ends) | stated.gives
        ended |= dict.fromkeys(stated.ends - stated.gives, name)
    return holds


def _no_giver(condition: Condition) -> str:
    givers = sorted(cls.__name__ for cls, stated in _STATED.items() if condition in stated.gives)
    return f"no pass before it gives that; {' and '.join(givers)} would" if givers else "no pass gives that"
