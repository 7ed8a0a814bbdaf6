"""Resizing (torch.nn.functional.interpolate) and its gradient: a constant matrix per axis if sizes are fixed.

The matrices hold the weights of torch's own kernels; the gradient is a matmul with their transposes. ONNX's Resize is
used if each pixel is repeated an integer number of times. Otherwise its coordinates differ from torch's in rounding.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from ort_dynamo.lowering.context import LoweringContext, Size, is_empty
from ort_dynamo.lowering.ops.memory.creation import filled
from ort_dynamo.lowering.recipes.antialias import apply_matrices, matrix_of
from ort_dynamo.lowering.recipes.interpolation import Length, LinearMap, Resize, apply_maps, resize_map, source_index
from ort_dynamo.lowering.recipes.promotion import float_dtype
from ort_dynamo.lowering.recipes.windows import fixed
from ort_dynamo.lowering.registry import register
from ort_dynamo.torch_internals.kernels.operators import aten


def _axes(
    mode: str, sizes: Sequence[Length], out: Sequence[Length], rest: Sequence[Any], dtype: torch.dtype
) -> list[Resize[Length]]:
    """Return the resized axes; `rest` follows the sizes in a signature: align_corners, not for nearest, and scales."""
    align_corners, scales = (False, rest) if mode.startswith("nearest") else (bool(rest[0]), rest[1:])
    factors = [*scales, *[None] * (len(out) - len(scales))]
    axes = zip(sizes[-len(out) :], out, factors, strict=True)
    return [Resize(mode, n, m, align_corners, factor, dtype) for n, m, factor in axes]


def _fixed_axes(
    ctx: LoweringContext, mode: str, sizes: Sequence[Size], out: Sequence[Size], rest: Sequence[Any], dtype: torch.dtype
) -> list[Resize[int]]:
    before = ctx.static(sizes[-len(out) :], "a size of a resize")
    return _axes(mode, before, ctx.static(out, "a size of a resize"), rest, dtype)


_LARGEST_MATRIX = 1 << 24
"""Entries. Beyond, the images of all unit vectors under torch's kernel cost more to find than the kernel ever would."""


def _map(ctx: LoweringContext, axis: Resize[int]) -> LinearMap:
    if axis.size * max(axis.size, axis.out) > _LARGEST_MATRIX:
        raise ctx.refuse(f"resizing an axis from {axis.size} to {axis.out}: its matrix is too large")
    return resize_map(axis)


# -- nearest -----------------------------------------------------------------------------------------------------


def _repeats(axes: Sequence[Resize[int]]) -> list[int] | None:
    """Count the repeats of each pixel, one count per axis; None if the pixels of an axis repeat unequally often."""
    counts = []
    for axis in axes:
        count = axis.out // axis.size
        if count * axis.size != axis.out or not np.array_equal(source_index(axis), np.arange(axis.out) // count):
            return None
        counts.append(count)
    return counts


def _nearest(mode: str, ctx: LoweringContext, self: ir.Value, output_size: Sequence[Size], *scales: Any) -> ir.Value:
    """upsample_nearest2d(Tensor self, SymInt[2] output_size, float? scales_h=None, float? scales_w=None) -> Tensor"""
    if is_empty(ctx.sizes(self)):
        return filled(ctx, 0)
    op, dtype = ctx.op, ctx.out.dtype
    axes = _fixed_axes(ctx, mode, ctx.sizes(self), output_size, scales, float_dtype(dtype))
    counts = _repeats(axes)
    leading = ctx.rank(self) - len(axes)
    if counts is not None and dtype == torch.float32:
        factors = ctx.builder.constant([1] * leading + counts, ir.DataType.FLOAT)
        modes = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
        return op.Resize(self, None, factors, **modes)
    result = self
    for place, axis in enumerate(axes, start=leading):
        index = source_index(axis)
        if not np.array_equal(index, np.arange(axis.size)):
            result = op.Gather(result, ctx.ints(index.tolist()), axis=place)
    return result


def _nearest_backward(
    mode: str,
    ctx: LoweringContext,
    grad_output: ir.Value,
    output_size: Sequence[Size],
    input_size: Sequence[Size],
    *scales: Any,
) -> ir.Value:
    """upsample_nearest2d_backward(Tensor grad_output, SymInt[2] output_size, SymInt[4] input_size, float? scales_h=None, float? scales_w=None) -> Tensor"""  # noqa: E501
    if is_empty(ctx.sizes(grad_output)):
        return filled(ctx, 0)
    dtype = float_dtype(ctx.out.dtype)
    axes = _fixed_axes(ctx, mode, input_size, output_size, scales, dtype)
    grad = ctx.cast(grad_output, dtype)
    counts = _repeats(axes)
    if counts is None:
        return _transposed(ctx, grad, axes)
    leading = ctx.rank(grad_output) - len(axes)
    pairs = [number for axis, count in zip(axes, counts, strict=True) for number in (axis.size, count)]
    tiles = ctx.op.Reshape(grad, [*[0] * leading, *pairs])
    total = ctx.op.ReduceSum(tiles, [leading + 1 + 2 * i for i in range(len(axes))], keepdims=0)
    return ctx.cast(total, ctx.out.dtype)


# -- linear, cubic, antialiased ----------------------------------------------------------------------------------


def _smooth(mode: str, ctx: LoweringContext, self: ir.Value, output_size: Sequence[Size], *rest: Any) -> ir.Value:
    """upsample_bilinear2d(Tensor self, SymInt[2] output_size, bool align_corners, float? scales_h=None, float? scales_w=None) -> Tensor"""  # noqa: E501
    if not ctx.out.dtype.is_floating_point:
        raise ctx.refuse("resizing integers: torch rounds in fixed-point arithmetic")
    if is_empty(ctx.sizes(self)):
        return filled(ctx, 0)
    dtype = float_dtype(ctx.out.dtype)
    if _is_symbolic_antialiased(mode, ctx.sizes(self), output_size):
        matrices = [matrix_of(ctx, axis) for axis in _axes(mode, ctx.sizes(self), output_size, rest, dtype)]
        return ctx.cast(apply_matrices(ctx, ctx.cast(self, dtype), matrices, transposed=False), ctx.out.dtype)
    axes = _fixed_axes(ctx, mode, ctx.sizes(self), output_size, rest, dtype)
    maps, sizes = [_map(ctx, axis) for axis in axes], [axis.size for axis in axes]
    result = apply_maps(ctx, ctx.cast(self, dtype), ctx.rank(self) - len(axes), sizes, maps)
    return ctx.cast(result, ctx.out.dtype)


def _smooth_backward(
    mode: str,
    ctx: LoweringContext,
    grad_output: ir.Value,
    output_size: Sequence[Size],
    input_size: Sequence[Size],
    *rest: Any,
) -> ir.Value:
    """upsample_bilinear2d_backward(Tensor grad_output, SymInt[2] output_size, SymInt[4] input_size, bool align_corners, float? scales_h=None, float? scales_w=None) -> Tensor"""  # noqa: E501
    if is_empty(ctx.sizes(grad_output)):
        return filled(ctx, 0)
    dtype = float_dtype(ctx.out.dtype)
    if _is_symbolic_antialiased(mode, input_size, output_size):
        matrices = [matrix_of(ctx, axis) for axis in _axes(mode, input_size, output_size, rest, dtype)]
        return ctx.cast(apply_matrices(ctx, ctx.cast(grad_output, dtype), matrices, transposed=True), ctx.out.dtype)
    axes = _fixed_axes(ctx, mode, input_size, output_size, rest, dtype)
    return _transposed(ctx, ctx.cast(grad_output, dtype), axes)


def _is_symbolic_antialiased(mode: str, sizes: Sequence[Size], out: Sequence[Size]) -> bool:
    """Check whether an antialiased mode has symbolic sizes. torch decomposes the other modes if sizes are symbolic."""
    return mode.endswith("_aa") and fixed((*sizes[-2:], *out)) is None


def _transposed(ctx: LoweringContext, grad: ir.Value, axes: Sequence[Resize[int]]) -> ir.Value:
    maps, sizes = [_map(ctx, axis).transposed for axis in axes], [axis.out for axis in axes]
    result = apply_maps(ctx, grad, len(ctx.out.shape) - len(axes), sizes, maps)
    return ctx.cast(result, ctx.out.dtype)


for _mode, _forward, _backward, _overloads in (
    ("nearest", _nearest, _nearest_backward, ("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d")),
    (
        "nearest_exact",
        _nearest,
        _nearest_backward,
        ("_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d"),
    ),
    ("linear", _smooth, _smooth_backward, ("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d")),
    ("cubic", _smooth, _smooth_backward, ("upsample_bicubic2d",)),
    ("linear_aa", _smooth, _smooth_backward, ("_upsample_bilinear2d_aa",)),
    ("cubic_aa", _smooth, _smooth_backward, ("_upsample_bicubic2d_aa",)),
    ("lanczos_aa", _smooth, _smooth_backward, ("_upsample_lanczos2d_aa",)),
):
    for _name in _overloads:
        if not hasattr(aten, _name):  # torch 2.11 has no Lanczos filter
            continue
        register(getattr(aten, _name).default, functools.partial(_forward, _mode))
        register(getattr(aten, f"{_name}_backward").default, functools.partial(_backward, _mode))
