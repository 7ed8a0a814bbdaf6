"""Reductions: sums, means, extremes, norms, and where an extreme is."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ort_dynamo.graph.rounded_numbers import round_to
from ort_dynamo.onnx_module.host_values import Host, Setting, Value, as_tensor, integers, largest, smallest
from ort_dynamo.onnx_module.registry import onnx_operator

__all__: list[str] = []


def _all_axes(x: Tensor, axes: list[int] | None) -> list[int]:
    return axes if axes else list(range(x.dim()))


def _extreme(x: Tensor, axes: list[int], keepdims: bool, largest: bool) -> Tensor:
    if x.dtype == torch.bool:
        return _extreme(x.to(torch.uint8), axes, keepdims, largest).to(torch.bool)
    if x.numel() == 0:
        return _empty_extreme(x, axes, keepdims, largest)
    return (torch.amax if largest else torch.amin)(x, axes, keepdim=keepdims)


def _empty_extreme(x: Tensor, axes: list[int], keepdims: bool, largest: bool) -> Tensor:
    """Return the extremes of empty slices: the largest of nothing is the dtype's least value."""
    if x.is_floating_point():
        fill: Any = -math.inf if largest else math.inf
    else:
        fill = torch.iinfo(x.dtype).min if largest else torch.iinfo(x.dtype).max
    counts = torch.sum(torch.zeros_like(x), axes, keepdim=keepdims)
    return torch.full(counts.shape, fill, dtype=x.dtype, device=x.device)


def _product(x: Tensor, axes: list[int], keepdims: bool) -> Tensor:
    for axis in sorted((axis % x.dim() for axis in axes), reverse=True):
        x = torch.prod(x, axis, keepdim=keepdims, dtype=x.dtype)
    return x


def _sum(x: Tensor, axes: list[int], keepdims: bool) -> Tensor:
    return torch.sum(x, axes, keepdim=keepdims, dtype=x.dtype) if axes else x


def _mean(x: Tensor, axes: list[int], keepdims: bool) -> Tensor:
    if not axes:
        return x
    if x.is_floating_point():
        return torch.mean(x, axes, keepdim=keepdims)
    return torch.div(_sum(x, axes, keepdims), math.prod(x.shape[axis] for axis in axes), rounding_mode="trunc")


def _norm(x: Tensor, axes: list[int], keepdims: bool) -> Tensor:
    if not axes:
        return torch.abs(x)
    if x.is_floating_point():  # its gradient of zeros is 0, and that of a square root NaN
        return torch.linalg.vector_norm(x, 2, axes, keepdim=keepdims)
    return torch.sqrt(_sum(x * x, axes, keepdims)).to(x.dtype)


def _log_sum_exp(x: Tensor, axes: list[int], keepdims: bool) -> Tensor:
    return torch.logsumexp(x, axes, keepdim=keepdims).to(x.dtype) if axes else x


_REDUCTIONS: dict[str, Callable[[Tensor, list[int], bool], Tensor]] = {
    "ReduceSum": _sum,
    "ReduceMean": _mean,
    "ReduceMax": lambda x, axes, keepdims: _extreme(x, axes, keepdims, largest=True) if axes else x,
    "ReduceMin": lambda x, axes, keepdims: _extreme(x, axes, keepdims, largest=False) if axes else x,
    "ReduceProd": _product,
    "ReduceL1": lambda x, axes, keepdims: _sum(torch.abs(x), axes, keepdims),
    "ReduceL2": _norm,
    "ReduceLogSum": lambda x, axes, keepdims: torch.log(_sum(x, axes, keepdims)).to(x.dtype),
    "ReduceLogSumExp": _log_sum_exp,
    "ReduceSumSquare": lambda x, axes, keepdims: _sum(x * x, axes, keepdims),
}

_HOST: dict[str, Callable[[tuple[Any, ...]], Any]] = {
    "ReduceSum": sum,
    "ReduceProd": math.prod,
    "ReduceMax": largest,
    "ReduceMin": smallest,
}
"""Reductions of a shape."""

_INPUT_SINCE = {"ReduceSum": 13}
"""The version from which on the axes are an input; 18 of the others."""


def _register(name: str, function: Callable[[Tensor, list[int], bool], Tensor]) -> None:
    on_host = _HOST.get(name)

    def reduced(x: Value, axes: list[int] | None, keepdims: bool, device: torch.device | None) -> Value:
        if isinstance(x, Host) and on_host is not None and x.values and not x.scalar:
            return Host((round_to(on_host(x.values), x.dtype),), not keepdims, x.dtype, x.fixed)
        tensor = as_tensor(x, device)
        return function(tensor, _all_axes(tensor, axes), keepdims)

    def by_attribute(
        x: Value, *, axes: list[int] | None = None, keepdims: int = 1, device: torch.device | None
    ) -> Value:
        return reduced(x, axes, keepdims == 1, device)

    def by_input(
        x: Value,
        axes: Setting | None = None,
        *,
        keepdims: int = 1,
        noop_with_empty_axes: int = 0,
        device: torch.device | None,
    ) -> Value:
        wanted = None if axes is None else integers(axes)
        if not wanted and noop_with_empty_axes:
            return function(as_tensor(x, device), [], True)
        return reduced(x, wanted, keepdims == 1, device)

    for since, apply in ((1, by_attribute), (_INPUT_SINCE.get(name, 18), by_input)):
        apply.__name__ = apply.__qualname__ = f"onnx_{name}_{since}"
        globals()[apply.__name__] = onnx_operator(name, since)(apply)


for _name, _function in _REDUCTIONS.items():
    _register(_name, _function)


def _place(x: Tensor, axis: int, keepdims: int, last: int, largest: bool) -> Tensor:
    find = torch.argmax if largest else torch.argmin
    if not last:
        return find(x, axis, keepdim=keepdims == 1)
    return x.shape[axis] - 1 - find(torch.flip(x, [axis]), axis, keepdim=keepdims == 1)


@onnx_operator("ArgMax")
def argmax(x: Tensor, *, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> Tensor:
    """Return the index of the largest along an axis: the first or the last one."""
    return _place(x, axis, keepdims, select_last_index, largest=True)


@onnx_operator("ArgMin")
def argmin(x: Tensor, *, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> Tensor:
    """Return the index of the smallest along an axis: the first or the last one."""
    return _place(x, axis, keepdims, select_last_index, largest=False)


@onnx_operator("CumSum")
def running_sum(x: Tensor, axis: Setting, *, exclusive: int = 0, reverse: int = 0) -> Tensor:
    """Return sums of all elements up to each one, itself included unless `exclusive`, or from it on."""
    (along,) = integers(axis)
    turned = torch.flip(x, [along]) if reverse else x
    found = torch.cumsum(turned, along, dtype=x.dtype)
    if exclusive:
        length = x.shape[along]
        none = torch.zeros_like(torch.narrow(turned, along, 0, min(length, 1)))
        found = torch.cat([none, torch.narrow(found, along, 0, max(length - 1, 0))], along)
    return torch.flip(found, [along]) if reverse else found
