"""Which ATen operators AOTAutograd decomposes before we see the graph, and why the rest stay whole.

We start from torch's core decompositions and take out what has a lowering of our own, and random draws.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._decomp import core_aten_decompositions
from torch._ops import OpOverload

from ort_dynamo.lowering.registry import registered

__all__ = ["DRAWS", "decompositions"]

aten = torch.ops.aten

DRAWS: tuple[Any, ...] = (
    aten.native_dropout,
    aten.bernoulli,
    aten.bernoulli_,
    aten.rand_like,
    aten.randn_like,
    aten.randint_like,
    aten.rand,
    aten.randn,
    aten.randint,
    aten.randperm,
    aten.normal,
    aten.normal_functional,
    aten.uniform,
    aten.exponential,
    aten.geometric,
    aten.log_normal,
    aten.cauchy,
    aten.multinomial,
    aten.poisson,
    aten.rrelu_with_noise_functional,
    aten.rrelu_with_noise,
)
"""Random operators: torch draws them, in eager's order, only if they reach us as eager calls them."""


@functools.cache
def decompositions() -> dict[OpOverload, Callable[..., Any]]:
    """The table given to AOTAutograd: torch's core decompositions without random draws and without every overload
    that has a lowering of our own (one ONNX operator, or a better formula, in its place).
    """
    table: dict[Any, Callable[..., Any]] = dict(core_aten_decompositions())
    kept = set(registered()) | {getattr(packet, name) for packet in DRAWS for name in packet.overloads()}
    return {overload: function for overload, function in table.items() if overload not in kept}
