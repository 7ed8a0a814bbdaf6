"""The table names the ATen operators that AOTAutograd decomposes before we see the graph; the rest stay whole."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ort_dynamo.capture.decompositions.checks import checked
from ort_dynamo.capture.decompositions.composites import COMPOSITES
from ort_dynamo.capture.decompositions.foreach import foreach_decompositions
from ort_dynamo.capture.decompositions.layouts import LAYOUTS
from ort_dynamo.lowering.registry import is_from_outside, registered
from ort_dynamo.torch_internals.kernels.decompositions import core_decompositions, decompositions_of, prim_functions
from ort_dynamo.torch_internals.kernels.operators import AbsentOperatorError, OpOverload, aten, can_decompose
from ort_dynamo.torch_internals.pytree import tree_map

__all__ = ["decompositions"]

_ALSO: tuple[OpOverload, ...] = (
    # With the formulas below every node has a kernel; without them, these operators would be fallbacks.
    aten._addmm_activation.default,
    aten.rrelu_with_noise_backward.default,
)
"""Overloads that torch has a decomposition for outside its core table."""

_OWN_RESULTS = frozenset(
    {aten.max_unpool2d.default, aten.max_unpool3d.default, aten.rot90.default, aten.triangular_solve.default}
)
"""Overloads whose results are tensors of their own, while torch's decompositions end in views."""


def decompositions() -> dict[OpOverload, Callable[..., Any]]:
    """Make AOTAutograd's table: torch's core decompositions, those listed here and prims', less two kinds.

    1. Operators with a lowering, ours or a user's: it has one ONNX operator, or a better formula.
    2. Random ops: they give eager's numbers only if they reach the backend as eager calls them. Those of COMPOSITES
       become random ops with eager's numbers, and arithmetic on them.

    Operators in LAYOUTS have both: their decomposition only changes the traced memory layout.
    """
    return _decompositions(registered(), frozenset(filter(is_from_outside, LAYOUTS)))


@functools.lru_cache(maxsize=1)
def _decompositions(
    whole: frozenset[OpOverload], replaced: frozenset[OpOverload]
) -> dict[OpOverload, Callable[..., Any]]:
    table: dict[Any, Callable[..., Any]] = {
        **core_decompositions(),
        **decompositions_of(_ALSO),
        **_left_whole(foreach_decompositions()),
        **_left_whole(COMPOSITES),
        **prim_functions(),
    }
    kept = {
        overload: function
        for overload, function in table.items()
        if isinstance(overload, OpOverload)
        and overload not in whole
        and (overload in COMPOSITES or not _is_random(overload))
    }
    kept |= {overload: _with_copy_small_results(kept[overload]) for overload in kept.keys() & _OWN_RESULTS}
    laid = {
        overload: _either(function, kept.get(overload))
        for overload, function in _left_whole(LAYOUTS).items()
        if overload not in replaced
    }
    return {overload: checked(overload, function) for overload, function in {**kept, **laid}.items()}


def _with_copy_small_results(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a decomposition whose results are no views to whoever reads the graph."""

    @functools.wraps(function)
    def decomposition(*args: Any, **kwargs: Any) -> Any:
        def own(result: Any) -> Any:
            return aten._unsafe_view.default(result, result.shape) if isinstance(result, torch.Tensor) else result

        return tree_map(own, function(*args, **kwargs))

    return decomposition


def _either(first: Callable[..., Any], second: Callable[..., Any] | None) -> Callable[..., Any]:
    """Apply `first`, or `second` if that gives NotImplemented."""
    if second is None:
        return first

    def decomposition(*args: Any, **kwargs: Any) -> Any:
        result = first(*args, **kwargs)
        return second(*args, **kwargs) if result is NotImplemented else result

    return decomposition


def _left_whole(formulas: Mapping[OpOverload, Callable[..., Any]]) -> dict[OpOverload, Callable[..., Any]]:
    """Wrap `formulas` to give NotImplemented if they call an operator that the installed torch lacks."""

    def guarded(formula: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(formula)
        def decomposition(*args: Any, **kwargs: Any) -> Any:
            try:
                return formula(*args, **kwargs)
            except AbsentOperatorError:
                return NotImplemented

        return decomposition

    return {overload: guarded(formula) for overload, formula in formulas.items()}


def _is_random(overload: OpOverload) -> bool:
    """Check whether the overload itself is a random op; a composite (dropout, lstm) leaves that to the ops it calls."""
    return torch.Tag.nondeterministic_seeded in overload.tags and not can_decompose(overload)
