"""Pad."""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from ort_dynamo.onnx_module.host_values import Host, Setting, Value, as_tensor, integers
from ort_dynamo.onnx_module.registry import onnx_operator

__all__: list[str] = []

_Mode: TypeAlias = Literal["constant", "reflect", "edge", "wrap"]


def _places(length: int, before: int, after: int, mode: str, device: torch.device) -> Tensor:
    """Return the indices along an axis that fill it with its own entries."""
    place = torch.arange(-before, length + after, device=device)
    if mode == "edge":
        return torch.clamp(place, 0, length - 1)
    if mode == "wrap":
        return torch.remainder(place, length)
    period = max(2 * (length - 1), 1)
    folded = torch.remainder(place, period)
    return torch.minimum(folded, period - folded) if length > 1 else torch.zeros_like(place)


def _pad(x: Tensor, pads: list[int], mode: str, value: Value | None, axes: list[int] | None) -> Tensor:
    axes = list(range(x.dim())) if axes is None else [axis % x.dim() for axis in axes]
    if len(pads) != 2 * len(axes):
        raise ValueError(f"Pad of {len(axes)} axes takes {2 * len(axes)} pads, not {len(pads)}")
    widths = {axis: (pads[place], pads[place + len(axes)]) for place, axis in enumerate(axes)}
    if mode == "constant":
        flat = [width for axis in reversed(range(x.dim())) for width in widths.get(axis, (0, 0))]
        if value is None or isinstance(value, Host):
            return F.pad(x, flat, value=0 if value is None else value.values[0])
        inside = F.pad(torch.ones_like(x, dtype=torch.bool), flat, value=False)
        return torch.where(inside, F.pad(x, flat), torch.reshape(as_tensor(value), ()))
    for axis, (before, after) in widths.items():
        if before < 0 or after < 0:  # is cut first, and filled with the rest
            cut = max(-before, 0)
            x = torch.narrow(x, axis, cut, x.shape[axis] - cut - max(-after, 0))
            before, after = max(before, 0), max(after, 0)
        x = torch.index_select(x, axis, _places(x.shape[axis], before, after, mode, x.device))
    return x


@onnx_operator("Pad", 2)
def pad_by_attributes(x: Tensor, *, pads: list[int], mode: _Mode = "constant", value: float = 0.0) -> Tensor:
    """Lengthen axes at both ends, with a number or with their own entries."""
    return _pad(x, pads, mode, Host((value,), True, x.dtype), None)


@onnx_operator("Pad", 11)
def pad(
    x: Tensor, pads: Setting, value: Setting | None = None, axes: Setting | None = None, *, mode: _Mode = "constant"
) -> Tensor:
    """Lengthen axes at both ends, with a number or with their own entries; a negative length cuts."""
    return _pad(x, integers(pads), mode, value, None if axes is None else integers(axes))
