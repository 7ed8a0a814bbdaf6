"""Writes the patches of an image under a sliding window, and their adjoint, by slices alone.

Slices have kernels for every dtype; Conv, ConvTranspose and Col2Im have them for some.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence

import onnx_ir as ir

from ort_dynamo.lowering.context import LoweringContext, Size
from ort_dynamo.lowering.recipes.windows import Sliding, fixed

__all__ = ["fold", "patches"]


def patches(ctx: LoweringContext, image: ir.Value, leading: Sequence[Size], window: Sliding) -> ir.Value:
    """Take the elements of `image` (*leading, *sizes) under each position of the window: (*leading, *kernel, *out).

    `leading` are two sizes.
    """
    op, value, rank = ctx.op, _padded(ctx, image, window), window.rank
    if window.is_tiled:
        split = [size for pair in zip(window.out, window.kernel, strict=True) for size in pair]
        pairs = range(2, 2 + 2 * rank)
        return op.Transpose(ctx.reshape(value, [*leading, *split]), perm=[0, 1, *pairs[1::2], *pairs[::2]])
    steps = zip(window.kernel, window.stride, window.dilation, window.reach, strict=True)
    for i, (k, s, d, reach) in enumerate(steps):
        axis = [2 + 2 * i]  # after (*leading, *kernel[:i], *out[:i])
        parts = [
            op.Unsqueeze(op.Slice(value, [o * d], [o * d - reach or sys.maxsize], axis, [s]), [2 + i]) for o in range(k)
        ]
        value = op.Concat(*parts, axis=2 + i) if k > 1 else parts[0]
    return value


def _padded(ctx: LoweringContext, image: ir.Value, window: Sliding) -> ir.Value:
    """`image` with its padding and without the last positions, which no window reaches."""
    ends = [p - r for p, r in zip(window.padding, window.remainders, strict=True)]
    if not any(window.padding) and fixed(ends) == [0] * len(ends):
        return image
    return ctx.op.Pad(image, ctx.shape([0, 0, *window.padding, 0, 0, *ends]))


def fold(ctx: LoweringContext, columns: ir.Value, leading: Sequence[Size], window: Sliding) -> ir.Value:
    """Sum all elements of `columns` (*leading, *kernel, *out) that lie on a pixel: the adjoint of `patches`.

    (*leading, *sizes). `leading` are two sizes.
    """
    op, value, rank = ctx.op, columns, window.rank
    if window.is_tiled:
        pairs = [axis for i in range(rank) for axis in (2 + rank + i, 2 + i)]
        value = ctx.reshape(op.Transpose(value, perm=[0, 1, *pairs]), [*leading, *window.covered])
    else:
        for i in range(rank):
            value = _overlap_add(ctx, value, leading, window, i)
    starts = [-p for p in window.padding]
    ends = [r - p for p, r in zip(window.padding, window.remainders, strict=True)]
    if not any(starts) and fixed(ends) == [0] * len(ends):
        return value
    return op.Pad(value, ctx.shape([0, 0, *starts, 0, 0, *ends]))


def _overlap_add(ctx: LoweringContext, value: ir.Value, leading: Sequence[Size], window: Sliding, i: int) -> ir.Value:
    """Add up the patches along axis i.

    (*leading, *kernel[i:], *covered[:i], *out[i:]) -> (*leading, *kernel[i + 1:], *covered[:i + 1], *out[i + 1:])
    """
    op = ctx.op
    k, s, d, reach = window.kernel[i], window.stride[i], window.dilation[i], window.reach[i]
    axis = 2 + window.rank  # of out[i]
    if s > 1:
        value = op.Pad(op.Unsqueeze(value, [axis + 1]), [0, s - 1], None, [axis + 1])
        gaped = [*leading, *window.kernel[i:], *window.covered[:i], window.out[i] * s, *window.out[i + 1 :]]
        value = ctx.reshape(value, gaped)
    parts = []
    for o in range(k):
        part = op.Squeeze(op.Slice(value, [o], [o + 1], [2]), [2])
        pads = [o * d, reach - o * d - (s - 1)]  # the end cuts gaps off, or is the room for later positions
        parts.append(part if pads == [0, 0] else op.Pad(part, pads, None, [axis - 1]))
    return functools.reduce(op.Add, parts)
