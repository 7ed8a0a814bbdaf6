"""Sampling an image at the positions of a grid (torch.nn.functional.grid_sample), and its gradient.

Every sample is a weighted sum of pixels, its taps. A tap's weight is the product of one weight per axis. The image
becomes a table of pixels, one row of channels each. A row of zeros after each image serves the taps outside it. ONNX's
GridSample has no gradient and, in onnxruntime-training 1.19.2, lacks kernels for some modes.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import torch

from ort_dynamo.lowering.context import LoweringContext, Size, is_empty
from ort_dynamo.lowering.ops.memory.creation import filled
from ort_dynamo.lowering.recipes.promotion import float_dtype
from ort_dynamo.lowering.recipes.sums.add_rows import add_rows
from ort_dynamo.lowering.recipes.zeros import zeros
from ort_dynamo.lowering.registry import lowering
from ort_dynamo.torch_internals.kernels.operators import aten

_BILINEAR, _NEAREST, _BICUBIC = 0, 1, 2
_ZEROS, _BORDER, _REFLECTION = 0, 1, 2


@dataclass(frozen=True)
class Tap:
    """One tap of every sample along one axis; all (N, samples).

    Attributes:
        index: int64, 0 for a tap beside the image.
        inside: whether it is in the image.
        weight: its weight; None for 1.
        slope: the weight's derivative by the grid's coordinate; None for 0.
    """

    index: ir.Value
    inside: ir.Value
    weight: ir.Value | None
    slope: ir.Value | None


@dataclass(frozen=True)
class Sampling:
    """The sizes and modes of one sampling operator.

    Attributes:
        sizes: the shape of the image, (N, C, *space).
        out: the shape of the grid without its last dimension, (N, *space).
        mode: the interpolation mode.
        padding: the padding mode.
        align_corners: whether -1 and 1 are the centres of the corner pixels, not their edges.
        dtype: the dtype of the computation.
    """

    sizes: tuple[Size, ...]
    out: tuple[Size, ...]
    mode: int
    padding: int
    align_corners: bool
    dtype: torch.dtype

    @property
    def space(self) -> tuple[Size, ...]:
        """The image's sizes without batch and channels."""
        return self.sizes[2:]

    @property
    def pixels(self) -> Size:
        """Number of pixels of one image."""
        return math.prod(self.space)

    @property
    def samples(self) -> Size:
        """Number of samples of one image."""
        return math.prod(self.out[1:])


# -- coordinates -------------------------------------------------------------------------------------------------


def _place(ctx: LoweringContext, this: Sampling, coordinate: ir.Value, size: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Return the pixel coordinate of a grid coordinate in -1 … 1, and its derivative."""
    op = ctx.op
    raised = op.Add(coordinate, 1.0)
    if this.align_corners:
        slope = op.Mul(op.Sub(size, 1.0), 0.5)
        return op.Mul(op.Mul(raised, 0.5), op.Sub(size, 1.0)), slope
    return op.Mul(op.Sub(op.Mul(raised, size), 1.0), 0.5), op.Mul(size, 0.5)


def _padded(ctx: LoweringContext, this: Sampling, place: ir.Value, size: ir.Value) -> tuple[ir.Value, ir.Value | None]:
    """Apply the padding mode to the position `place`; give the result and its derivative (None for 1).

    NaN becomes what torch's kernels make of it: index 0 in an image, the last index in a volume. With zero padding it
    is outside.
    """
    op = ctx.op
    is_volume = len(this.space) == 3
    if this.padding == _ZEROS:
        # All that is outside is alike, and its weights are finite.
        outside = op.Where(op.Greater(place, -2.0), op.Min(place, op.Add(size, 1.0)), -2.0) if is_volume else place
        return outside, None
    sign = None
    if this.padding == _REFLECTION:
        place, sign = _reflected(ctx, this, place, size)
    last = op.Sub(size, 1.0)
    above, below = op.Greater(place, 0.0), op.Less(place, last)
    within = ctx.cast(op.And(above, below), this.dtype)
    if is_volume:
        clipped = op.Where(below, op.Max(place, 0.0), last)
    else:
        clipped = op.Where(above, op.Min(place, last), 0.0)
    return clipped, within if sign is None else op.Mul(sign, within)


def _reflected(ctx: LoweringContext, this: Sampling, place: ir.Value, size: ir.Value) -> tuple[ir.Value, ir.Value]:
    """`place` reflected at the image's ends until it is between them, and the sign of the way."""
    op = ctx.op
    low = 0.0 if this.align_corners else -0.5
    span = op.Sub(size, 1.0) if this.align_corners else size
    # An image of one aligned pixel has no way between its ends: everything is at 0.
    way = op.Max(span, 1.0)
    shifted = op.Sub(place, low)
    distance = op.Abs(shifted)
    back = op.Equal(op.Mod(op.Floor(op.Div(distance, way)), ctx.constant(2, this.dtype), fmod=1), 1.0)
    rest = op.Mod(distance, way, fmod=1)
    found = op.Add(op.Where(back, op.Sub(way, rest), rest), low)
    sign = op.Mul(
        op.Where(back, -1.0, ctx.constant(1, this.dtype)),
        op.Where(op.Less(shifted, 0.0), -1.0, ctx.constant(1, this.dtype)),
    )
    exists = ctx.cast(op.Greater(span, 0.0), this.dtype)
    return op.Mul(found, exists), op.Mul(sign, exists)


def _cubic(ctx: LoweringContext, t: ir.Value) -> list[tuple[ir.Value, ir.Value]]:
    """(weight, derivative by t) of the pixels at -1, 0, 1 and 2.

    Cubic convolution with a = -0.75 (R. Keys, Cubic Convolution Interpolation for Digital Image Processing, 1981).
    """
    op, a = ctx.op, -0.75

    def near(x: ir.Value) -> tuple[ir.Value, ir.Value]:
        value = op.Add(op.Mul(op.Mul(op.Sub(op.Mul(x, a + 2), a + 3), x), x), 1.0)
        return value, op.Mul(op.Sub(op.Mul(x, 3 * (a + 2)), 2 * (a + 3)), x)

    def far(x: ir.Value) -> tuple[ir.Value, ir.Value]:
        value = op.Sub(op.Mul(op.Add(op.Mul(op.Sub(op.Mul(x, a), 5 * a), x), 8 * a), x), 4 * a)
        return value, op.Add(op.Mul(op.Sub(op.Mul(x, 3 * a), 10 * a), x), 8 * a)

    rest = op.Sub(1.0, t)
    (right, right_slope), (last, last_slope) = near(rest), far(op.Add(rest, 1.0))
    return [far(op.Add(t, 1.0)), near(t), (right, op.Neg(right_slope)), (last, op.Neg(last_slope))]


def _taps(ctx: LoweringContext, this: Sampling, coordinate: ir.Value, length: Size) -> list[Tap]:
    """Return the taps along one axis of a grid's coordinates, (N, samples)."""
    op = ctx.op
    size = ctx.scalar(length, this.dtype)
    place, slope = _place(ctx, this, coordinate, size)

    def tap(at: ir.Value, weight: ir.Value | None, derivative: ir.Value | None) -> Tap:
        inside = op.And(op.GreaterOrEqual(at, 0.0), op.Less(at, size))
        index = ctx.cast(op.Where(inside, at, 0.0), torch.int64)
        return Tap(index, inside, weight, None if derivative is None else op.Mul(derivative, slope))

    if this.mode == _BICUBIC:
        first = op.Floor(place)
        weights = _cubic(ctx, op.Sub(place, first))
        places = [_padded(ctx, this, op.Add(first, float(k)), size)[0] for k in (-1, 0, 1, 2)]
        return [tap(at, weight, derivative) for at, (weight, derivative) in zip(places, weights, strict=True)]
    place, sign = _padded(ctx, this, place, size)
    if this.mode == _NEAREST:
        return [tap(op.Round(place), None, None)]
    slope = slope if sign is None else op.Mul(slope, sign)
    first = op.Floor(place)
    right = op.Sub(place, first)
    one = ctx.constant(1, this.dtype)
    return [tap(first, op.Sub(1.0, right), op.Neg(one)), tap(op.Add(first, 1.0), right, one)]


# -- pixels ------------------------------------------------------------------------------------------------------


def _sampling(
    ctx: LoweringContext, image: ir.Value, grid: ir.Value, mode: int, padding: int, align_corners: bool
) -> tuple[Sampling, list[list[Tap]]]:
    """Give the sizes and modes, and the taps along each axis of the image, outermost first."""
    op, dtype = ctx.op, float_dtype(ctx.dtype(image))
    if dtype != ctx.dtype(image) and ctx.target.facts.samples_in_own_dtype:
        # A position that is off by its rounding is another pixel. torch's CUDA kernels compute in float32, as here.
        raise ctx.refuse(f"grid_sample of {ctx.dtype(image)}: torch's CPU kernel rounds the positions to that dtype")
    this = Sampling(ctx.sizes(image), ctx.sizes(grid)[:-1], mode, padding, align_corners, dtype)
    rows = ctx.reshape(ctx.cast(grid, dtype), [this.out[0], this.samples, len(this.space)])
    axes = []
    for axis, size in enumerate(reversed(this.space)):  # the grid's first coordinate is along the image's last axis
        axes.append(_taps(ctx, this, op.Gather(rows, axis, axis=2), size))
    return this, axes[::-1]


def _row(ctx: LoweringContext, this: Sampling, corner: Sequence[Tap]) -> ir.Value:
    """(N, samples): the table's row of a tap along every axis."""
    op = ctx.op
    inside = functools.reduce(op.And, [tap.inside for tap in corner])
    index = corner[0].index
    for tap, size in zip(corner[1:], this.space[1:], strict=True):
        index = op.Add(op.Mul(index, ctx.scalar(size, torch.int64)), tap.index)
    pixels = ctx.scalar(this.pixels, torch.int64)
    images = op.Unsqueeze(op.Range(0, ctx.scalar(this.sizes[0], torch.int64), 1), [1])
    return op.Add(op.Where(inside, index, pixels), op.Mul(images, op.Add(pixels, 1)))


def _product(ctx: LoweringContext, factors: Sequence[ir.Value | None]) -> ir.Value | None:
    present = [factor for factor in factors if factor is not None]
    return functools.reduce(ctx.op.Mul, present) if present else None


def _weighted(ctx: LoweringContext, value: ir.Value, weight: ir.Value | None) -> ir.Value:
    return value if weight is None else ctx.op.Mul(value, ctx.op.Unsqueeze(weight, [2]))


def _channels_last(ctx: LoweringContext, this: Sampling, value: ir.Value, places: Size) -> ir.Value:
    """(N, C, *space) -> (N, positions, C)"""
    batch, channels = this.sizes[:2]
    flat = ctx.reshape(ctx.cast(value, this.dtype), [batch, channels, places])
    return ctx.op.Transpose(flat, perm=[0, 2, 1])


def _channels_first(ctx: LoweringContext, value: ir.Value) -> ir.Value:
    """(N, positions, C) -> (N, C, *space) of the output"""
    return ctx.op.Transpose(value, perm=[0, 2, 1])


def _table(ctx: LoweringContext, this: Sampling, image: ir.Value) -> ir.Value:
    """(N * (pixels + 1), C)"""
    rows = ctx.op.Pad(_channels_last(ctx, this, image, this.pixels), [0, 0, 0, 0, 1, 0])
    return ctx.reshape(rows, [this.sizes[0] * (this.pixels + 1), this.sizes[1]])


# -- the operators -----------------------------------------------------------------------------------------------


@lowering(aten.grid_sampler_2d.default, aten.grid_sampler_3d.default)
def grid_sampler(
    ctx: LoweringContext, image: ir.Value, grid: ir.Value, mode: int, padding: int, align_corners: bool
) -> ir.Value:
    """grid_sampler_2d(Tensor input, Tensor grid, int interpolation_mode, int padding_mode, bool align_corners) -> Tensor"""  # noqa: E501
    if is_empty(ctx.sizes(image)[2:]):
        raise ctx.refuse("torch cannot sample an empty tensor")
    if is_empty((*ctx.sizes(image), *ctx.sizes(grid))):
        return filled(ctx, 0)
    this, axes = _sampling(ctx, image, grid, mode, padding, align_corners)
    table = _table(ctx, this, image)
    parts = []
    for corner in itertools.product(*axes):
        pixels = ctx.op.Gather(table, _row(ctx, this, corner), axis=0)
        parts.append(_weighted(ctx, pixels, _product(ctx, [tap.weight for tap in corner])))
    result = _channels_first(ctx, functools.reduce(ctx.op.Add, parts))
    return ctx.cast(ctx.reshape(result, ctx.out.shape), ctx.out.dtype)


@lowering(aten.grid_sampler_2d_backward.default, aten.grid_sampler_3d_backward.default)
def grid_sampler_backward(
    ctx: LoweringContext,
    grad_output: ir.Value,
    image: ir.Value,
    grid: ir.Value,
    mode: int,
    padding: int,
    align_corners: bool,
    output_mask: Sequence[bool],
) -> tuple[Any, ...]:
    """grid_sampler_2d_backward(Tensor grad_output, Tensor input, Tensor grid, int interpolation_mode, int padding_mode, bool align_corners, bool[2] output_mask) -> (Tensor, Tensor)"""  # noqa: E501
    if is_empty((*ctx.sizes(image), *ctx.sizes(grid))):
        raise ctx.refuse("grid_sample of an empty tensor or an empty grid")
    op = ctx.op
    this, axes = _sampling(ctx, image, grid, mode, padding, align_corners)
    grad = _channels_last(ctx, this, grad_output, this.samples)
    corners = list(itertools.product(*axes))
    rows = [_row(ctx, this, corner) for corner in corners]
    grad_image = _image_gradient(ctx, this, image, grad, corners, rows) if 0 in ctx.used else None
    if 1 not in ctx.used:
        return grad_image, None
    if mode == _NEAREST:
        return grad_image, zeros(ctx, grid, ctx.sizes(grid))
    table = _table(ctx, this, image)
    # The dot product of each tap's pixel with the gradient: (N, samples).
    agree = [op.ReduceSum(op.Mul(op.Gather(table, row, axis=0), grad), [2], keepdims=0) for row in rows]
    numbers = []
    for axis in reversed(range(len(axes))):
        parts = []
        for corner, one in zip(corners, agree, strict=True):
            factors = [tap.slope if place == axis else tap.weight for place, tap in enumerate(corner)]
            slope = _product(ctx, factors)
            parts.append(one if slope is None else op.Mul(one, slope))
        numbers.append(op.Unsqueeze(functools.reduce(op.Add, parts), [2]))
    grad_grid = ctx.reshape(op.Concat(*numbers, axis=2), ctx.sizes(grid))
    return grad_image, ctx.cast(grad_grid, ctx.out[1].dtype)


def _image_gradient(
    ctx: LoweringContext,
    this: Sampling,
    image: ir.Value,
    grad: ir.Value,
    corners: Sequence[Sequence[Tap]],
    rows: Sequence[ir.Value],
) -> ir.Value:
    op = ctx.op
    batch, channels = this.sizes[:2]
    parts = [_weighted(ctx, grad, _product(ctx, [tap.weight for tap in corner])) for corner in corners]
    empty = zeros(ctx, ctx.cast(image, this.dtype), [batch * (this.pixels + 1) * channels])
    table = add_rows(ctx, empty, op.Concat(*rows, axis=1), op.Concat(*parts, axis=1), channels)
    table = ctx.reshape(table, [batch, this.pixels + 1, channels])
    table = op.Slice(table, [0], ctx.shape([this.pixels]), [1])
    return ctx.cast(ctx.reshape(_channels_first(ctx, table), this.sizes), ctx.out[0].dtype)
