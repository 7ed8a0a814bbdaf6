"""These checks of eager's kernels are missing from decompositions.

An argument that eager refuses for any data leaves the operator whole: it runs in torch, which raises its own
error. Dtypes and dimensions are checked by the rules of lowering/kernel_checks.py, other arguments by functions here.
Data is checked by an assertion, whose condition is computed with the nodes around it and which torch raises.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch

from ort_dynamo.lowering.kernel_checks import calls_for_entries, left_to_torch
from ort_dynamo.torch_internals.kernels.operators import OpOverload, aten, can_decompose, present

__all__ = ["checked"]


_inside: ContextVar[bool] = ContextVar("_inside", default=False)
"""True while a decomposition runs: eager does not run the operators that it calls."""


def checked(overload: OpOverload, decomposition: Callable[..., Any]) -> Callable[..., Any]:
    """Make `decomposition` check its arguments as eager's kernel does, unless eager decomposes the operator, too."""
    if can_decompose(overload) or calls_for_entries(overload):
        return decomposition
    check = _CHECKS.get(overload)

    def decompose_checked(*args: Any, **kwargs: Any) -> Any:
        if check is not None and not check(*args, **kwargs):
            return NotImplemented
        if _inside.get():
            return decomposition(*args, **kwargs)
        if left_to_torch(overload, args, kwargs) is not None:
            return NotImplemented
        token = _inside.set(True)
        try:
            return decomposition(*args, **kwargs)
        finally:
            _inside.reset(token)

    return decompose_checked


def _celu(self: torch.Tensor, alpha: float = 1.0) -> bool:
    return alpha != 0


def _mvlgamma(self: torch.Tensor, p: int) -> bool:
    return p >= 1


def _max_unpool(self: torch.Tensor, indices: torch.Tensor, output_size: Sequence[int], *_: Any) -> bool:
    if 0 not in output_size:  # eager's kernel reads no index for a result without elements
        size = math.prod(output_size)
        aten._assert_async.msg(((indices >= 0) & (indices < size)).all(), "Found an invalid max index")
    return True


_CHECKS: Mapping[OpOverload, Callable[..., bool]] = present(
    {
        aten.celu.default: _celu,
        aten.max_unpool2d.default: _max_unpool,
        aten.max_unpool3d.default: _max_unpool,
        aten.mvlgamma.default: _mvlgamma,
    }
)
"""Overload -> whether its decomposition may take its place, with the overload's own arguments."""
