"""Pooling: extremes and means of windows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ort_dynamo.onnx_module.operators.convolution import AutoPad, pads_of
from ort_dynamo.onnx_module.registry import onnx_operator

__all__: list[str] = []

_MAX: dict[int, Callable[..., tuple[Tensor, Tensor]]] = {
    1: F.max_pool1d_with_indices,
    2: F.max_pool2d_with_indices,
    3: F.max_pool3d_with_indices,
}
_CONVOLUTION: dict[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def _flat(before: Sequence[int], after: Sequence[int]) -> list[int]:
    return [width for pair in zip(reversed(before), reversed(after), strict=True) for width in pair]


def _windows(size: int, width: int, stride: int, dilation: int, before: int, after: int, ceil: bool) -> int:
    """Return the number of windows of an axis; none begins in the padding at its end."""
    room = size + before + after - ((width - 1) * dilation + 1)
    count = (-(-room // stride) if ceil else room // stride) + 1
    return count - 1 if ceil and (count - 1) * stride >= size + before else count


def _missing(
    x: Tensor,
    kernel: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
    before: Sequence[int],
    after: Sequence[int],
    ceil: bool,
) -> list[int]:
    """Return the pads after each axis with which exactly its windows fit; negative where less is read."""
    return [
        (_windows(size, width, stride, dilation, head, tail, ceil) - 1) * stride
        + ((width - 1) * dilation + 1)
        - (size + head)
        for size, width, stride, dilation, head, tail in zip(
            x.shape[2:], kernel, strides, dilations, before, after, strict=True
        )
    ]


@onnx_operator("MaxPool")
def max_pool(
    x: Tensor,
    *,
    kernel_shape: list[int],
    auto_pad: AutoPad = "NOTSET",
    ceil_mode: int = 0,
    dilations: list[int] | None = None,
    pads: list[int] | None = None,
    storage_order: int = 0,
    strides: list[int] | None = None,
    outputs: int,
) -> tuple[Tensor, Tensor]:
    """Give the largest of each window of (N, C, …), and its index in the whole input, in row- or column-major order."""
    rank = len(kernel_shape)
    if rank not in _MAX or x.dim() != rank + 2:
        raise ValueError(f"MaxPool of {x.dim()} axes with a kernel of {rank}")
    dilations = dilations or [1] * rank
    strides = strides or [1] * rank
    before, after = pads_of(auto_pad, pads, x.shape[2:], kernel_shape, strides, dilations)
    if not x.is_floating_point():
        limits = torch.iinfo(x.dtype)
        if limits.bits > 32:
            raise ValueError("MaxPool of integers of 64 bits is not supported")
    wide = x if x.is_floating_point() else x.to(torch.float64)
    simple = before == after and not ceil_mode
    if simple and all(2 * pad <= width for pad, width in zip(before, kernel_shape, strict=True)):
        head, edge = [0] * rank, before
        padded = wide
    else:
        room = _missing(x, kernel_shape, strides, dilations, before, after, bool(ceil_mode))
        padded = F.pad(wide, _flat(before, room), value=-math.inf)
        head, edge = before, [0] * rank
    found, places = _MAX[rank](padded, kernel_shape, strides, edge, dilations)
    values = found.to(x.dtype)
    if outputs == 1:
        return values, places
    return values, _whole_indices(places, padded.shape[2:], x.shape, head, bool(storage_order))


def _whole_indices(
    places: Tensor, padded: Sequence[int], shape: Sequence[int], before: Sequence[int], columns: bool
) -> Tensor:
    """Return the indices within a padded plane as ones within the whole input."""
    coordinates = []
    for size, head in zip(reversed(padded), reversed(before), strict=True):
        coordinates.append(torch.remainder(places, size) - head)
        places = torch.div(places, size, rounding_mode="floor")
    coordinates.reverse()
    axes = list(range(len(coordinates)))
    order = axes[::-1] if columns else axes
    flat = torch.zeros_like(places)
    for axis in order:
        flat = flat * shape[2 + axis] + coordinates[axis]
    planes = torch.arange(shape[0] * shape[1], device=places.device)
    offsets = torch.reshape(planes * math.prod(shape[2:]), (shape[0], shape[1], *[1] * len(axes)))
    return flat + offsets


@onnx_operator("AveragePool")
def average_pool(
    x: Tensor,
    *,
    kernel_shape: list[int],
    auto_pad: AutoPad = "NOTSET",
    ceil_mode: int = 0,
    count_include_pad: int = 0,
    dilations: list[int] | None = None,
    pads: list[int] | None = None,
    strides: list[int] | None = None,
) -> Tensor:
    """Return the mean of each window of (N, C, …), of the padding too if asked."""
    rank = len(kernel_shape)
    if rank not in _CONVOLUTION or x.dim() != rank + 2:
        raise ValueError(f"AveragePool of {x.dim()} axes with a kernel of {rank}")
    dilations = dilations or [1] * rank
    strides = strides or [1] * rank
    before, after = pads_of(auto_pad, pads, x.shape[2:], kernel_shape, strides, dilations)
    room = _missing(x, kernel_shape, strides, dilations, before, after, bool(ceil_mode))
    if not ceil_mode and not any(before) and not any(after) and all(step == 1 for step in dilations):
        return (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[rank - 1](x, kernel_shape, strides)
    ones = torch.ones_like(x[:1, :1])
    counted = F.pad(ones, _flat(before, after), value=1.0 if count_include_pad else 0.0)
    rest = [more - tail for more, tail in zip(room, after, strict=True)]
    counts = _window_sums(F.pad(counted, _flat([0] * rank, rest)), kernel_shape, strides, dilations)
    return _window_sums(F.pad(x, _flat(before, room)), kernel_shape, strides, dilations) / counts


def _window_sums(x: Tensor, kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int]) -> Tensor:
    """Return the sum of each window, by a convolution with ones of each plane."""
    rank = len(kernel)
    planes = torch.reshape(x, (x.shape[0] * x.shape[1], 1, *x.shape[2:]))
    ones = torch.ones((1, 1, *kernel), dtype=x.dtype, device=x.device)
    found = _CONVOLUTION[rank](planes, ones, None, strides, 0, dilations)
    return torch.reshape(found, (x.shape[0], x.shape[1], *found.shape[2:]))


@onnx_operator("GlobalAveragePool")
def global_average_pool(x: Tensor) -> Tensor:
    """Return the mean of each plane of (N, C, …)."""
    return torch.mean(x, list(range(2, x.dim())), keepdim=True)


@onnx_operator("GlobalMaxPool")
def global_max_pool(x: Tensor) -> Tensor:
    """Return the largest of each plane of (N, C, …)."""
    return torch.amax(x, list(range(2, x.dim())), keepdim=True)
