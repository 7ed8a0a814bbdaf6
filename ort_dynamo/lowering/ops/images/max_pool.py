"""Max pooling and its gradient."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import onnx_ir as ir
import torch

from ort_dynamo.graph.dtypes import onnx_dtype
from ort_dynamo.lowering.context import LoweringContext, Size, is_empty
from ort_dynamo.lowering.op_builder import OpBuilder
from ort_dynamo.lowering.recipes.branches import if_finite
from ort_dynamo.lowering.recipes.promotion import float_dtype
from ort_dynamo.lowering.recipes.windows import Pool, Windows, adaptive_windows, gather_windows, sliding_windows
from ort_dynamo.lowering.recipes.zeros import zeros
from ort_dynamo.lowering.registry import register
from ort_dynamo.torch_internals.kernels.operators import aten

_FURTHEST = 2**62
"""Beyond every index of a tensor."""

_LOWEST = -(2**63)
"""The lowest int64."""

Pooled = tuple[ir.Value, ir.Value | None]
"""The maxima, and their indices within the plane; None if no node reads the indices."""


def _plane_starts(ctx: LoweringContext, leading: Sequence[Size], pool_sizes: Sequence[Size]) -> ir.Value:
    """Return the index of every plane's first element in the whole tensor, (*leading, 1, …)."""
    op = ctx.op
    planes = op.Range(0, ctx.scalar(math.prod(leading), torch.int64), 1)
    starts = op.Mul(planes, ctx.scalar(math.prod(pool_sizes), torch.int64))
    return ctx.reshape(starts, [*leading, *[1] * len(pool_sizes)])


# -- forward -----------------------------------------------------------------------------------------------------


def _max_pool(
    rank: int,
    ctx: LoweringContext,
    self: ir.Value,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> tuple[ir.Value | None, ...]:
    """max_pool2d_with_indices(Tensor self, int[2] kernel_size, int[2] stride=[], int[2] padding=0, int[2] dilation=1,
    bool ceil_mode=False) -> (Tensor, Tensor)
    """
    out = ctx.out[0].shape
    pool = Pool.of(ctx.sizes(self), out, kernel_size, stride, padding, dilation, ceil_mode, rank)
    if not pool.has_elements:
        raise ctx.refuse("a window may have no element, for which only torch's kernel has an index")

    def windows() -> list[Windows]:
        axes = zip(pool.sizes, pool.out, pool.kernel, pool.stride, pool.padding, pool.dilation, strict=True)
        return [sliding_windows(ctx, *axis) for axis in axes]

    return _pooled(rank, ctx, self, pool, windows)


def _adaptive_max_pool(
    rank: int, ctx: LoweringContext, self: ir.Value, output_size: Sequence[Size]
) -> tuple[ir.Value | None, ...]:
    """adaptive_max_pool2d(Tensor self, int[2] output_size) -> (Tensor, Tensor)"""
    if not ctx.dtype(self).is_floating_point:
        raise ctx.refuse(f"torch does not support adaptive pooling of {ctx.dtype(self)} either")
    sizes, out = ctx.sizes(self), ctx.out[0].shape

    def windows() -> list[Windows]:
        return [adaptive_windows(ctx, size, count) for size, count in zip(sizes[-rank:], out[-rank:], strict=True)]

    return _pooled(rank, ctx, self, Pool.tiles(sizes, out, rank), windows)


def _pooled(
    rank: int, ctx: LoweringContext, self: ir.Value, pool: Pool | None, windows: Callable[[], list[Windows]]
) -> tuple[ir.Value | None, ...]:
    """Return the maximum of every window and its index, by a kernel if `pool` has one, or by tables of `windows`.

    If kernels miss nan or are wrong about -inf, a tensor whose sum is not finite uses the tables.
    """
    op, sizes, wanted = ctx.op, ctx.sizes(self), 1 in ctx.used
    if is_empty(ctx.out[0].shape):
        return tuple(op.Expand(ctx.constant(0, fake.dtype), ctx.shape(fake.shape)) for fake in ctx.out)
    is_float = ctx.dtype(self).is_floating_point
    x = ctx.cast(self, float_dtype(ctx.dtype(self)) if is_float else torch.int64)
    is_batched = len(sizes) == rank + 2
    x, sizes = (x, sizes) if is_batched else (op.Unsqueeze(x, [0]), (1, *sizes))
    tables = functools.partial(_by_tables, ctx, x=x, sizes=sizes, wanted=wanted)
    if pool is None or not pool.fits_onnx or not is_float:
        y, place = tables(op, windows=windows())
    else:
        kernel = functools.partial(_by_kernel, ctx, pool=pool, x=x, sizes=sizes, wanted=wanted)
        if ctx.target.has_defect("max_pool_misses_nan"):
            exact = functools.partial(tables, windows=windows())
            found = if_finite(ctx, x, _present(kernel), _present(exact))
            y, place = found if wanted else (found[0], None)
        else:
            y, place = kernel(op)
    if not is_batched:
        y, place = op.Squeeze(y, [0]), None if place is None else op.Squeeze(place, [0])
    return ctx.cast(y, ctx.out[0].dtype), place


def _present(build: Callable[[OpBuilder], Pooled]) -> Callable[[OpBuilder], list[ir.Value]]:
    """Wrap `build` to drop the output that is not needed."""
    return lambda op: [value for value in build(op) if value is not None]


def _by_kernel(
    ctx: LoweringContext, op: OpBuilder, *, pool: Pool, x: ir.Value, sizes: Sequence[Size], wanted: bool
) -> Pooled:
    """MaxPool. It counts indices in the whole tensor, torch within the plane."""
    attributes = {
        "kernel_shape": pool.kernel,
        "strides": pool.stride,
        "pads": [*pool.padding, *pool.ends],
        "dilations": pool.dilation,
    }
    if not wanted:
        return op.MaxPool(x, **attributes), None
    y, place = op.MaxPool(x, _outputs=2, **attributes)
    return y, op.Sub(place, _plane_starts(ctx, sizes[:2], pool.sizes))


def _by_tables(
    ctx: LoweringContext, op: OpBuilder, *, x: ir.Value, sizes: Sequence[Size], windows: list[Windows], wanted: bool
) -> Pooled:
    """torch's own rule: the index of the first occurrence of the largest element, or the last nan."""
    rank = len(windows)
    under = list(range(2 + rank, 2 + 2 * rank))  # the dimensions (*longest) of (N, C, *out, *longest)

    def crossed(table: ir.Value, axis: int) -> ir.Value:
        """Return a table (out, longest) of one axis as (*out, *longest) of all."""
        return op.Unsqueeze(table, [d for d in range(2 * rank) if d not in (axis, rank + axis)])

    inside = functools.reduce(op.And, [crossed(window.inside, axis) for axis, window in enumerate(windows)])
    is_float = x.dtype != ir.DataType.INT64
    found = op.Where(inside, gather_windows(op, x, 2 + rank, windows), -math.inf if is_float else _LOWEST)
    largest = op.ReduceMax(found, under)
    if is_float:
        is_nan = op.IsNaN(found)
        any_nan = op.Greater(op.ReduceMax(op.Cast(is_nan, to=ir.DataType.INT32), under), 0)
        largest = op.Where(any_nan, math.nan, largest)
    y = op.Squeeze(largest, under)
    if not wanted:
        return y, None
    steps = [ctx.scalar(math.prod(sizes[3 + axis :]), torch.int64) for axis in range(rank)]
    places = [op.Mul(crossed(window.index, axis), steps[axis]) for axis, window in enumerate(windows)]
    place = functools.reduce(op.Add, places)
    is_largest = op.And(op.Equal(found, largest), inside)  # False everywhere if it is nan
    first = op.ReduceMin(op.Where(is_largest, place, _FURTHEST), under)
    if not is_float:
        return y, op.Squeeze(first, under)
    last = op.ReduceMax(op.Where(is_nan, place, -1), under)
    return y, op.Squeeze(op.Where(any_nan, last, first), under)


# -- gradient ----------------------------------------------------------------------------------------------------


def _max_pool_backward(
    rank: int,
    ctx: LoweringContext,
    grad_output: ir.Value,
    self: ir.Value,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    indices: ir.Value,
) -> ir.Value:
    """max_pool2d_with_indices_backward(Tensor grad_output, Tensor self, int[2] kernel_size, int[2] stride,
    int[2] padding, int[2] dilation, bool ceil_mode, Tensor indices) -> Tensor
    """
    sizes, out = ctx.sizes(self), ctx.sizes(grad_output)
    pool = Pool.of(sizes, out, kernel_size, stride, padding, dilation, ceil_mode, rank)
    return _unpooled(rank, ctx, grad_output, indices, sizes, pool)


def _adaptive_max_pool_backward(
    rank: int, ctx: LoweringContext, grad_output: ir.Value, self: ir.Value, indices: ir.Value
) -> ir.Value:
    """adaptive_max_pool2d_backward(Tensor grad_output, Tensor self, Tensor indices) -> Tensor"""
    sizes = ctx.sizes(self)
    return _unpooled(rank, ctx, grad_output, indices, sizes, Pool.tiles(sizes, ctx.sizes(grad_output), rank))


def _unpooled(
    rank: int,
    ctx: LoweringContext,
    grad_output: ir.Value,
    indices: ir.Value,
    sizes: tuple[Size, ...],
    pool: Pool | None,
) -> ir.Value:
    """Every entry of the gradient added to the position that its window took the maximum from."""
    op, out = ctx.op, ctx.sizes(grad_output)
    if is_empty(out):
        return op.Expand(ctx.constant(0, ctx.out.dtype), ctx.shape(sizes))
    dtype = float_dtype(ctx.dtype(grad_output))
    grad, leading = ctx.cast(grad_output, dtype), sizes[: len(sizes) - rank]
    kinds = {"T1": onnx_dtype(dtype), "T2": ir.DataType.INT64}
    fits = pool is not None and pool.is_disjoint and pool.fits_onnx and pool.has_elements and len(leading) == 2
    if pool is not None and fits and ctx.target.takes("MaxUnpool", "", kinds):
        # No position is the maximum of two windows: MaxUnpool, which overwrites, is ten times as fast as adding.
        places = op.Add(indices, _plane_starts(ctx, leading, sizes[-rank:]))
        pads = [*pool.padding, *pool.ends]  # the kernel checks that the windows fit into the result
        result = op.MaxUnpool(grad, places, ctx.shape(sizes), kernel_shape=pool.kernel, strides=pool.stride, pads=pads)
    else:
        planes = math.prod(leading)
        flat = [planes, math.prod(out[-rank:])]
        ground = zeros(ctx, grad, [planes, math.prod(sizes[-rank:])])
        result = op.ScatterElements(
            ground, ctx.reshape(indices, flat), ctx.reshape(grad, flat), axis=1, reduction="add"
        )
        result = ctx.reshape(result, sizes)
    return ctx.cast(result, ctx.out.dtype)


for _overload, _function, _rank in (
    (aten.max_pool2d_with_indices.default, _max_pool, 2),
    (aten.max_pool3d_with_indices.default, _max_pool, 3),
    (aten.adaptive_max_pool2d.default, _adaptive_max_pool, 2),
    (aten.adaptive_max_pool3d.default, _adaptive_max_pool, 3),
    (aten.max_pool2d_with_indices_backward.default, _max_pool_backward, 2),
    (aten.max_pool3d_with_indices_backward.default, _max_pool_backward, 3),
    (aten.adaptive_max_pool2d_backward.default, _adaptive_max_pool_backward, 2),
    (aten.adaptive_max_pool3d_backward.default, _adaptive_max_pool_backward, 3),
):
    register(_overload, functools.partial(_function, _rank))
