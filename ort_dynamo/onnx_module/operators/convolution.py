"""Convolutions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from ort_dynamo.onnx_module.registry import onnx_operator

__all__ = ["AutoPad", "pads_of"]

AutoPad: TypeAlias = Literal["NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER"]

_FORWARD: dict[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_TRANSPOSED: dict[int, Callable[..., Tensor]] = {
    1: F.conv_transpose1d,
    2: F.conv_transpose2d,
    3: F.conv_transpose3d,
}


def _of_rank(table: dict[int, Callable[..., Tensor]], rank: int) -> Callable[..., Tensor]:
    if rank not in table:
        raise ValueError(f"convolutions have 1, 2 or 3 spatial axes, not {rank}")
    return table[rank]


def pads_of(
    auto_pad: AutoPad,
    pads: Sequence[int] | None,
    sizes: Sequence[int],
    kernel: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
) -> tuple[list[int], list[int]]:
    """Return the pads before and after each spatial axis of an operator with windows."""
    rank = len(kernel)
    if auto_pad in ("NOTSET", "VALID"):
        found = [0] * (2 * rank) if pads is None or auto_pad == "VALID" else list(pads)
        if len(found) != 2 * rank:
            raise ValueError(f"{rank} spatial axes take {2 * rank} pads, not {len(found)}")
        return found[:rank], found[rank:]
    totals = [
        max((-(-size // stride) - 1) * stride + (width - 1) * dilation + 1 - size, 0)
        for size, width, stride, dilation in zip(sizes, kernel, strides, dilations, strict=True)
    ]
    halves = [total // 2 for total in totals]
    rests = [total - half for total, half in zip(totals, halves, strict=True)]
    return (halves, rests) if auto_pad == "SAME_UPPER" else (rests, halves)


@onnx_operator("Conv")
def convolution(
    x: Tensor,
    w: Tensor,
    b: Tensor | None = None,
    *,
    auto_pad: AutoPad = "NOTSET",
    dilations: list[int] | None = None,
    group: int = 1,
    kernel_shape: list[int] | None = None,
    pads: list[int] | None = None,
    strides: list[int] | None = None,
) -> Tensor:
    """Convolve (N, C, …) with kernels (M, C / group, …)."""
    rank = w.dim() - 2
    dilations = dilations or [1] * rank
    strides = strides or [1] * rank
    before, after = pads_of(auto_pad, pads, x.shape[2:], w.shape[2:], strides, dilations)
    if before != after:
        x = F.pad(x, [width for pair in zip(reversed(before), reversed(after), strict=True) for width in pair])
        before = [0] * rank
    return _of_rank(_FORWARD, rank)(x, w, b, strides, before, dilations, group)


@onnx_operator("ConvTranspose")
def transposed_convolution(
    x: Tensor,
    w: Tensor,
    b: Tensor | None = None,
    *,
    auto_pad: AutoPad = "NOTSET",
    dilations: list[int] | None = None,
    group: int = 1,
    kernel_shape: list[int] | None = None,
    output_padding: list[int] | None = None,
    output_shape: list[int] | None = None,
    pads: list[int] | None = None,
    strides: list[int] | None = None,
) -> Tensor:
    """Return the gradient of a convolution for its input, as an operator; pads are cut off the result."""
    rank = w.dim() - 2
    dilations = dilations or [1] * rank
    strides = strides or [1] * rank
    extra = output_padding or [0] * rank
    full = [
        stride * (size - 1) + (width - 1) * dilation + 1
        for size, width, stride, dilation in zip(x.shape[2:], w.shape[2:], strides, dilations, strict=True)
    ]
    if output_shape is None and auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        output_shape = [size * stride for size, stride in zip(x.shape[2:], strides, strict=True)]
    if output_shape is not None:
        totals = [
            length + more - wanted for length, more, wanted in zip(full, extra, output_shape[-rank:], strict=True)
        ]
        halves = [total // 2 for total in totals]
        rests = [total - half for total, half in zip(totals, halves, strict=True)]
        before, after = (halves, rests) if auto_pad == "SAME_UPPER" else (rests, halves)
    else:
        before, after = pads_of(auto_pad, pads, x.shape[2:], w.shape[2:], strides, dilations)
    transpose = _of_rank(_TRANSPOSED, rank)
    if before == after and all(width >= 0 for width in before):
        return transpose(x, w, b, strides, before, extra, group, dilations)
    # The output padding is room that the kernels do not reach; the pads to cut off are counted from the outer edges.
    found = transpose(x, w, None, strides, 0, 0, group, dilations)
    edges = [
        width
        for head, tail, more in zip(before[::-1], after[::-1], extra[::-1], strict=True)
        for width in (-head, more - tail)
    ]
    found = F.pad(found, edges)
    return found if b is None else found + torch.reshape(b, (-1, *[1] * rank))
