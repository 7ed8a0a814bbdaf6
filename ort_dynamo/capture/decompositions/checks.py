"""These checks of eager's kernels are missing from torch's decompositions.

An argument that eager refuses whatever the data leaves the operator whole: it runs in torch, which raises its own
error. Data is checked by an assertion, whose condition is computed with what surrounds it and which torch raises.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ort_dynamo.torch_internals.operators import OpOverload, aten, present

__all__ = ["checked"]


def checked(overload: OpOverload, decomposition: Callable[..., Any]) -> Callable[..., Any]:
    """Make `decomposition` check its arguments as eager's kernel does; itself where there is nothing to check."""
    check = _CHECKS.get(overload)
    if check is None:
        return decomposition

    def decompose_checked(*args: Any, **kwargs: Any) -> Any:
        return decomposition(*args, **kwargs) if check(*args, **kwargs) else NotImplemented

    return decompose_checked


def _celu(self: torch.Tensor, alpha: float = 1.0) -> bool:
    return alpha != 0


def _mvlgamma(self: torch.Tensor, p: int) -> bool:
    return p >= 1


def _max_unpool(self: torch.Tensor, indices: torch.Tensor, output_size: Sequence[int], *_: Any) -> bool:
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
