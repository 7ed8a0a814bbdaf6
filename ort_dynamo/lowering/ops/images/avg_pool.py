"""Average pooling and its gradient."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
import torch

from ort_dynamo.graph.dtypes import onnx_dtype
from ort_dynamo.lowering.context import LoweringContext, Size, is_empty
from ort_dynamo.lowering.recipes.interpolation import LinearMap, apply_maps
from ort_dynamo.lowering.recipes.patches import fold
from ort_dynamo.lowering.recipes.promotion import float_dtype
from ort_dynamo.lowering.recipes.sums.accurate_sum import integer_total
from ort_dynamo.lowering.recipes.windows import Pool, Windows, adaptive_windows, fixed, sliding_windows, window_sum
from ort_dynamo.lowering.registry import register
from ort_dynamo.torch_internals.kernels.operators import aten


def _shares(ctx: LoweringContext, lengths: Sequence[ir.Value]) -> ir.Value:
    """1 / the size of every window, (*out), from its lengths (out,) along each axis."""
    return ctx.op.Reciprocal(functools.reduce(ctx.op.Mul, _columns(ctx, lengths)))


def _columns(ctx: LoweringContext, lengths: Sequence[ir.Value]) -> list[ir.Value]:
    """Lengths (out,) along each axis in shapes that broadcast to (*out)."""
    rank = len(lengths)
    return [ctx.op.Reshape(length, [-1, *[1] * (rank - 1 - axis)]) for axis, length in enumerate(lengths)]


def _tiled(ctx: LoweringContext, value: ir.Value, pool: Pool, sizes: Sequence[Size]) -> ir.Value:
    """Every entry of a value (…, *out) spread over its tile; `sizes` is the whole shape of the result."""
    op, leading = ctx.op, len(sizes) - pool.rank
    assert value.dtype is not None
    if not ctx.target.takes("Resize", "", {"T1": value.dtype}):
        value = op.Unsqueeze(value, [leading + 2 * axis + 1 for axis in range(pool.rank)])
        tile = [size for k in pool.kernel for size in (1, k)]
        return ctx.reshape(op.Expand(value, [1] * leading + tile), sizes)
    scales = ctx.builder.constant([1] * leading + pool.kernel, ir.DataType.FLOAT)
    modes = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    return op.Resize(value, None, scales, **modes)


# -- windows of one size -----------------------------------------------------------------------------------------


def _lengths(ctx: LoweringContext, pool: Pool, count_include_pad: bool, dtype: torch.dtype) -> list[ir.Value]:
    """Give torch's divisors: along each axis, the number of window positions that lie in the input or its padding."""
    op = ctx.op
    lengths = []
    for size, out, k, s, p in zip(pool.sizes, pool.out, pool.kernel, pool.stride, pool.padding, strict=True):
        extra = p if count_include_pad else 0
        starts = op.Sub(op.Mul(op.Range(0, ctx.scalar(out, torch.int64), 1), s), p)
        ends = op.Min(op.Add(starts, k), ctx.scalar(size + extra, torch.int64))
        lengths.append(ctx.cast(op.Sub(ends, op.Max(starts, -extra)), dtype))
    return lengths


def _is_uniform(pool: Pool, count_include_pad: bool) -> bool:
    """Check whether all windows are known to have the same divisor."""
    if any(pool.padding) and not count_include_pad:
        return False
    excess = fixed(pool.excess)
    if excess is None:
        return not pool.ceil_mode
    return all(e <= p for e, p in zip(excess, pool.padding, strict=True))


def _avg_pool(
    rank: int,
    ctx: LoweringContext,
    self: ir.Value,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> ir.Value:
    """avg_pool2d(Tensor self, int[2] kernel_size, int[2] stride=[], int[2] padding=0, bool ceil_mode=False,
    bool count_include_pad=True, int? divisor_override=None) -> Tensor
    """
    op, sizes, out = ctx.op, ctx.sizes(self), tuple(ctx.out.shape)
    if is_empty(out):
        return op.Expand(ctx.constant(0, ctx.out.dtype), ctx.shape(out))
    pool = Pool.of(sizes, out, kernel_size, stride, padding, (1,), ceil_mode, rank)
    dtype = float_dtype(ctx.dtype(self))
    x = ctx.cast(self, dtype)
    corrected = divisor_override is not None or (count_include_pad and not _is_uniform(pool, True))
    counts_padding = count_include_pad or corrected
    if not pool.fits_onnx or not ctx.target.takes("AveragePool", "", {"T": onnx_dtype(dtype)}):
        total = _window_total(ctx, x, pool, sizes)
        y = _divided(ctx, total, pool, count_include_pad, divisor_override, dtype)
        return ctx.cast(y, ctx.out.dtype)
    batched = len(sizes) == rank + 2
    y = op.AveragePool(
        x if batched else op.Unsqueeze(x, [0]),
        kernel_shape=pool.kernel,
        strides=pool.stride,
        pads=[*pool.padding, *pool.ends],
        count_include_pad=int(counts_padding),
    )
    y = y if batched else op.Squeeze(y, [0])
    if corrected:
        total = op.Mul(y, float(pool.places))
        y = _divided(ctx, total, pool, count_include_pad, divisor_override, dtype)
    return ctx.cast(y, ctx.out.dtype)


def _window_total(ctx: LoweringContext, value: ir.Value, pool: Pool, sizes: Sequence[Size]) -> ir.Value:
    """Return the sums (…, *out) of a value of shape `sizes` over windows; sums of integers are exact and wrap."""
    axes = zip(pool.sizes, pool.out, pool.kernel, pool.stride, pool.padding, pool.dilation, strict=True)
    windows, rank = [sliding_windows(ctx, *axis) for axis in axes], len(sizes)
    assert value.dtype is not None
    if value.dtype.is_floating_point():
        return window_sum(ctx, value, rank, windows)
    shape = list(sizes)
    for axis, window, out, k in zip(range(rank - pool.rank, rank), windows, pool.out, pool.kernel, strict=True):
        found, shape[axis] = window.gather(ctx.op, value, rank, axis), out
        value = integer_total(ctx, found, [*shape[: axis + 1], k, *shape[axis + 1 :]], [axis + 1], keepdim=False)
    return value


def _divided(
    ctx: LoweringContext,
    value: ir.Value,
    pool: Pool,
    count_include_pad: bool,
    divisor_override: int | None,
    dtype: torch.dtype,
) -> ir.Value:
    """Return a value (…, *out) divided by torch's divisor of the windows' sums."""
    if not dtype.is_floating_point:
        places = _lengths(ctx, pool, count_include_pad, dtype)
        return ctx.op.Div(value, divisor_override or functools.reduce(ctx.op.Mul, _columns(ctx, places)))
    if divisor_override is not None:
        return ctx.op.Mul(value, 1 / divisor_override)
    if _is_uniform(pool, count_include_pad):
        return ctx.op.Mul(value, 1 / pool.places)
    return ctx.op.Mul(value, _shares(ctx, _lengths(ctx, pool, count_include_pad, dtype)))


def _avg_pool_backward(
    rank: int,
    ctx: LoweringContext,
    grad_output: ir.Value,
    self: ir.Value,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> ir.Value:
    """avg_pool2d_backward(Tensor grad_output, Tensor self, int[2] kernel_size, int[2] stride, int[2] padding,
    bool ceil_mode, bool count_include_pad, int? divisor_override) -> Tensor
    """
    op, sizes, out = ctx.op, ctx.sizes(self), ctx.sizes(grad_output)
    if is_empty(sizes) or is_empty(out):
        return op.Expand(ctx.constant(0, ctx.out.dtype), ctx.shape(sizes))
    pool = Pool.of(sizes, out, kernel_size, stride, padding, (1,), ceil_mode, rank)
    dtype = float_dtype(ctx.dtype(self))
    shares = _divided(ctx, ctx.cast(grad_output, dtype), pool, count_include_pad, divisor_override, dtype)
    spread = _tiled(ctx, shares, pool, sizes) if pool.covers else _spread(ctx, shares, pool, sizes)
    return ctx.cast(spread, ctx.out.dtype)


def _spread(ctx: LoweringContext, shares: ir.Value, pool: Pool, sizes: Sequence[Size]) -> ir.Value:
    """Every entry of a value (…, *out) added to all positions of its window: a transposed convolution with ones."""
    op = ctx.op
    assert shares.dtype is not None
    if not ctx.target.takes("ConvTranspose", "", {"T": shares.dtype}):
        return _overlapped(ctx, shares, pool, sizes)
    planes = op.Reshape(shares, ctx.shape([-1, 1, *pool.out]))
    ones = op.Expand(ctx.builder.constant(1, shares.dtype), [1, 1, *pool.kernel])
    excess = fixed(pool.excess)
    # The input may end before or after the last window; if that is unknown, it is padded and cut to size.
    ends = [0] * pool.rank if excess is None else [max(e, 0) for e in excess]
    extra = [s - 1 for s in pool.stride] if excess is None else [max(-e, 0) for e in excess]
    result = op.ConvTranspose(
        planes,
        ones,
        kernel_shape=pool.kernel,
        strides=pool.stride,
        pads=[*pool.padding, *ends],
        output_padding=extra,
    )
    if excess is None:
        result = op.Slice(result, [0] * pool.rank, ctx.shape(pool.sizes), list(range(2, 2 + pool.rank)))
    return ctx.reshape(result, sizes)


def _overlapped(ctx: LoweringContext, shares: ir.Value, pool: Pool, sizes: Sequence[Size]) -> ir.Value:
    """Return the same by slices."""
    leading: list[Size] = [math.prod(sizes[: -pool.rank]), 1]
    columns = ctx.reshape(shares, [*leading, *[1] * pool.rank, *pool.out])
    columns = ctx.op.Expand(columns, [1, 1, *pool.kernel, *[1] * pool.rank])
    return ctx.reshape(fold(ctx, columns, leading, pool), sizes)


# -- windows of adapted sizes ------------------------------------------------------------------------------------


def _adaptive_windows(ctx: LoweringContext, sizes: Sequence[Size], out: Sequence[Size]) -> list[Windows]:
    return [adaptive_windows(ctx, size, count) for size, count in zip(sizes, out, strict=True)]


_LONGEST = 1 << 10
"""Size of an axis up to which its average is a matmul."""


def _averages(sizes: Sequence[Size], out: Sequence[Size]) -> list[LinearMap] | None:
    """Give the matrix that each axis is multiplied by; None where sizes are symbolic or too long.

    A tenth of the work of gathering the windows; with onnxruntime-training 1.19.2, less than its kernels for tiles.
    """
    lengths, counts = fixed(sizes), fixed(out)
    if lengths is None or counts is None or max(*lengths, *counts) > _LONGEST:
        return None
    maps = []
    for size, count in zip(lengths, counts, strict=True):
        rows, places = np.arange(count)[:, None], np.arange(size)
        starts, ends = rows * size // count, -(-(rows + 1) * size // count)
        under = (starts <= places) & (places < ends)
        maps.append(LinearMap(under / (ends - starts), under))
    return maps


def _adaptive_avg_pool(rank: int, ctx: LoweringContext, self: ir.Value, output_size: Sequence[Size]) -> ir.Value:
    """_adaptive_avg_pool2d(Tensor self, SymInt[2] output_size) -> Tensor"""
    if not ctx.dtype(self).is_floating_point:
        raise ctx.refuse(f"torch does not support adaptive pooling of {ctx.dtype(self)} either")
    op, sizes, out = ctx.op, ctx.sizes(self), tuple(ctx.out.shape)
    if is_empty(out):
        return op.Expand(ctx.constant(0, ctx.out.dtype), ctx.shape(out))
    if is_empty(sizes[-rank:]):
        raise ctx.refuse("torch cannot pool an empty tensor")
    dtype = float_dtype(ctx.dtype(self))
    x, axes = ctx.cast(self, dtype), list(range(len(sizes) - rank, len(sizes)))
    maps, pool = _averages(sizes[-rank:], out[-rank:]), Pool.tiles(sizes, out, rank)
    if fixed(out[-rank:]) == [1] * rank:
        y = op.ReduceMean(x, axes)
    elif (
        pool is not None
        and dtype == torch.float32
        and (maps is None or not ctx.target.has_defect("slow_pools_of_tiles"))
    ):
        y = op.AveragePool(
            x if len(sizes) == rank + 2 else op.Unsqueeze(x, [0]), kernel_shape=pool.kernel, strides=pool.stride
        )
        y = y if len(sizes) == rank + 2 else op.Squeeze(y, [0])
    elif maps is not None:
        y = apply_maps(ctx, x, len(sizes) - rank, [int(size) for size in sizes[-rank:]], maps)
    else:
        windows = _adaptive_windows(ctx, sizes[-rank:], out[-rank:])
        y = window_sum(ctx, x, len(sizes), windows)
        y = op.Mul(y, _shares(ctx, [window.lengths(ctx, dtype) for window in windows]))
    return ctx.cast(y, ctx.out.dtype)


def _adaptive_avg_pool_backward(rank: int, ctx: LoweringContext, grad_output: ir.Value, self: ir.Value) -> ir.Value:
    """_adaptive_avg_pool2d_backward(Tensor grad_output, Tensor self) -> Tensor"""
    op, sizes, out = ctx.op, ctx.sizes(self), ctx.sizes(grad_output)
    if is_empty(sizes) or is_empty(out):
        return op.Expand(ctx.constant(0, ctx.out.dtype), ctx.shape(sizes))
    dtype = float_dtype(ctx.dtype(self))
    grad, pool = ctx.cast(grad_output, dtype), Pool.tiles(sizes, out, rank)
    maps = _averages(sizes[-rank:], out[-rank:])
    if pool is not None and (maps is None or not ctx.target.has_defect("slow_pools_of_tiles")):
        spread = _tiled(ctx, op.Mul(grad, 1 / pool.places), pool, sizes)
        return ctx.cast(spread, ctx.out.dtype)
    if maps is not None:
        turned = [one.transposed for one in maps]
        spread = apply_maps(ctx, grad, len(sizes) - rank, [int(size) for size in out[-rank:]], turned)
        return ctx.cast(spread, ctx.out.dtype)
    windows = _adaptive_windows(ctx, sizes[-rank:], out[-rank:])
    shares = op.Mul(grad, _shares(ctx, [window.lengths(ctx, dtype) for window in windows]))
    # Each position of the input gathers from the windows that it belongs to.
    result = window_sum(ctx, shares, len(sizes), _adaptive_windows(ctx, out[-rank:], sizes[-rank:]))
    return ctx.cast(result, ctx.out.dtype)


for _overload, _function, _rank in (
    (aten.avg_pool2d.default, _avg_pool, 2),
    (aten.avg_pool3d.default, _avg_pool, 3),
    (aten.avg_pool2d_backward.default, _avg_pool_backward, 2),
    (aten.avg_pool3d_backward.default, _avg_pool_backward, 3),
    (aten._adaptive_avg_pool2d.default, _adaptive_avg_pool, 2),
    (aten._adaptive_avg_pool3d.default, _adaptive_avg_pool, 3),
    (aten._adaptive_avg_pool2d_backward.default, _adaptive_avg_pool_backward, 2),
    (aten._adaptive_avg_pool3d_backward.default, _adaptive_avg_pool_backward, 3),
):
    register(_overload, functools.partial(_function, _rank))
