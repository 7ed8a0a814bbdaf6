"""One ATen call a tensor takes the place of `aten._foreach_*`, the operators over lists that an optimizer sends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ort_dynamo.torch_internals.kernels.operators import OpOverload, aten, present, schema_of

__all__ = ["foreach_decompositions"]

_NAMED_ALIKE = (
    *("abs", "acos", "asin", "atan", "ceil", "cos", "cosh", "erf", "erfc", "exp", "expm1", "floor", "frac", "lgamma"),
    *("log", "log10", "log1p", "log2", "neg", "reciprocal", "round", "rsqrt", "sigmoid", "sign", "sin", "sinh"),
    *("sqrt", "tan", "tanh", "trunc", "add", "sub", "mul", "div", "pow", "clamp_max", "clamp_min", "lerp"),
    *("addcmul", "addcdiv", "clone"),
)
"""`_foreach_<name>` calls `torch.<name>`."""


def _with_value(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def call(self: torch.Tensor, tensor1: torch.Tensor, tensor2: torch.Tensor, value: Any = 1) -> torch.Tensor:
        return function(self, tensor1, tensor2, value=value)

    return call


def _norm(self: torch.Tensor, order: Any = 2, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Compute the norm of an entry; give NotImplemented where eager's kernel refuses the dtypes."""
    takes = self.is_floating_point() or self.is_complex()
    if not takes or (dtype is not None and torch.promote_types(self.dtype, dtype) != dtype):
        return NotImplemented
    return torch.linalg.vector_norm(self, order, dtype=dtype)


def _of_ordered(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Give `function` for an entry, or NotImplemented where numbers have no order, so that eager raises its error."""

    def call(self: torch.Tensor, other: Any) -> torch.Tensor:
        return NotImplemented if self.is_complex() else function(self, other)

    return call


_OTHER: dict[OpOverload, Callable[..., torch.Tensor]] = {
    # at::_foreach_maximum.Scalar does the same: maximum takes no scalar.
    aten._foreach_maximum.Scalar: _of_ordered(torch.clamp_min),
    aten._foreach_maximum.ScalarList: _of_ordered(torch.clamp_min),
    aten._foreach_maximum.List: _of_ordered(torch.maximum),
    aten._foreach_minimum.Scalar: _of_ordered(torch.clamp_max),
    aten._foreach_minimum.ScalarList: _of_ordered(torch.clamp_max),
    aten._foreach_minimum.List: _of_ordered(torch.minimum),
    aten._foreach_addcmul.Scalar: _with_value(torch.addcmul),
    aten._foreach_addcmul.ScalarList: _with_value(torch.addcmul),
    aten._foreach_addcdiv.Scalar: _with_value(torch.addcdiv),
    aten._foreach_addcdiv.ScalarList: _with_value(torch.addcdiv),
    aten._foreach_norm.Scalar: _norm,
    aten._foreach_copy.default: aten.copy.default,
    aten._foreach_zero.default: torch.zeros_like,
}


def foreach_decompositions() -> dict[OpOverload, Callable[..., Any]]:
    """Make the table from each overload to its decomposition."""
    calls = present(_OTHER)
    for name in _NAMED_ALIKE:
        packet = getattr(aten, f"_foreach_{name}")
        for overload in packet.overloads():
            target = getattr(packet, overload)
            # The form whose factors are the entries of a tensor cannot be traced: torch reads them.
            if not overload.endswith("out") and (name, overload) not in (("addcmul", "Tensor"), ("addcdiv", "Tensor")):
                calls.setdefault(target, getattr(torch, name))
    return {target: _one_by_one(target, function) for target, function in calls.items()}


def _one_by_one(target: OpOverload, function: Callable[..., torch.Tensor]) -> Callable[..., list[torch.Tensor]]:
    """Make a decomposition that calls `function` for each entry of the arguments that are lists.

    It gives NotImplemented if `function` does so for an entry.
    """
    listed = [isinstance(argument.type, torch.ListType) for argument in schema_of(target).arguments]
    first = listed.index(True)

    def decomposition(*args: Any, **kwargs: Any) -> list[torch.Tensor]:
        results = [
            function(*(a[i] if many else a for a, many in zip(args, listed, strict=False)), **kwargs)
            for i in range(len(args[first]))
        ]
        return NotImplemented if any(result is NotImplemented for result in results) else results

    return decomposition
