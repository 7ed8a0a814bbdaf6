"""Functions that stand in a graph for operators, without their tags."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from ort_dynamo.torch_internals.kernels.operators import OpOverload

__all__ = ["stand_in", "stands_for"]


@cache
def stand_in(overload: OpOverload) -> Callable[..., Any]:
    """Make the one function that computes the same as `overload`, and has no tags."""

    def untagged(*args: Any, **kwargs: Any) -> Any:
        return overload(*args, **kwargs)

    untagged.stands_for = overload  # type: ignore[attr-defined]
    return untagged


def stands_for(target: object) -> OpOverload | None:
    """Return the operator that a node's target stands in for; None if it is no stand-in."""
    return getattr(target, "stands_for", None)
