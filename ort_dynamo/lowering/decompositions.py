"""Which ATen operators AOTAutograd decomposes before we see the graph, and why the rest stay whole."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import _prims
from torch._decomp import core_aten_decompositions, get_decompositions
from torch._ops import OpOverload

from ort_dynamo.lowering.composites import COMPOSITES
from ort_dynamo.lowering.foreach import foreach_decompositions
from ort_dynamo.lowering.layouts import LAYOUTS
from ort_dynamo.lowering.registry import registered

__all__ = ["decompositions"]

aten = torch.ops.aten

_ALSO: tuple[OpOverload, ...] = (
    # With the formulas below every node has a kernel; whole, they would stay in eager.
    aten._addmm_activation.default,
    aten.rrelu_with_noise_backward.default,
)
"""Overloads that torch has a decomposition for outside its core table."""


def decompositions() -> dict[OpOverload, Callable[..., Any]]:
    """The table given to AOTAutograd: torch's core decompositions, those listed here and prims', less two kinds.

    1. Those with a lowering, ours or a user's: one ONNX operator, or a better formula, in the decomposition's place.
    2. Random draws: torch draws them in eager's order only if they reach us as eager calls them. Those of COMPOSITES
       are draws of eager's own numbers and arithmetic on them.

    Operators in LAYOUTS have both: their decomposition only changes what layout they are traced with.
    """
    return _decompositions(registered())


@functools.lru_cache(maxsize=1)
def _decompositions(whole: frozenset[OpOverload]) -> dict[OpOverload, Callable[..., Any]]:
    table: dict[Any, Callable[..., Any]] = {
        **core_aten_decompositions(),
        **get_decompositions(_ALSO),
        **foreach_decompositions(),
        **COMPOSITES,
        **_prim_functions(),
    }
    kept = {
        overload: function
        for overload, function in table.items()
        if isinstance(overload, OpOverload)
        and overload not in whole
        and (overload in COMPOSITES or not _draws(overload))
    }
    return {**kept, **LAYOUTS}


def _prim_functions() -> dict[OpOverload, Callable[..., Any]]:
    """Functional prim -> the ATen function that torch itself runs for it."""
    prims = (value for value in vars(_prims).values() if isinstance(value, OpOverload))
    return {prim: prim.impl_aten for prim in prims if not prim._schema.is_mutable}  # type: ignore[attr-defined]


def _draws(overload: OpOverload) -> bool:
    """Whether the overload itself draws; a composite one (dropout, lstm) leaves that to what it calls."""
    return torch.Tag.nondeterministic_seeded in overload.tags and not overload._can_decompose()
