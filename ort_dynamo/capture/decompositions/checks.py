"""These checks of eager's kernels are missing from decompositions.

An argument that eager refuses for any data leaves the operator whole: it runs in torch, which raises its own
error. Dtypes and dimensions are checked by the rules of lowering/kernel_checks.py, other arguments by functions here.
A number that the result's dtype may not hold leaves it whole, too: eager's kernels raise, or round it to infinity.
Data is checked by an assertion, whose condition is computed with the nodes around it and which torch raises.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
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
        if left_to_torch(overload, args, kwargs) is not None or not _holds_numbers(args, kwargs):
            return NotImplemented
        token = _inside.set(True)
        try:
            return decomposition(*args, **kwargs)
        finally:
            _inside.reset(token)

    return decompose_checked


def _holds_numbers(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Check whether all dtypes of floats in a call hold the floats among its arguments, unless they are symbolic."""
    given = (*args, *kwargs.values())
    dtypes = (one.dtype if isinstance(one, torch.Tensor) else one for one in given)
    greatest = _greatest(one for one in dtypes if isinstance(one, torch.dtype))
    return not any(type(one) is float and greatest < abs(one) < math.inf for one in given)


def _greatest(dtypes: Iterable[torch.dtype]) -> float:
    """Return the greatest number that each of those dtypes that are not of integers holds."""
    floats = [one for one in dtypes if one.is_floating_point or one.is_complex]
    return min(torch.finfo(one).max for one in floats or [torch.get_default_dtype()])


def _celu(self: torch.Tensor, alpha: float = 1.0) -> bool:
    return 0 < abs(alpha) < math.inf and abs(1 / alpha) <= _greatest([self.dtype])


def _isin_of_a_number(element: float, test_elements: torch.Tensor, **_: Any) -> bool:
    """Leave the number to eager, which rounds it to the tensor's dtype or not, depending on the tensor's size."""
    return False


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
        aten.isin.Scalar_Tensor: _isin_of_a_number,
        aten.max_unpool2d.default: _max_unpool,
        aten.max_unpool3d.default: _max_unpool,
        aten.mvlgamma.default: _mvlgamma,
    }
)
"""Overload -> whether its decomposition may take its place, with the overload's own arguments."""
