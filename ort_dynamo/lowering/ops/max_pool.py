"""Max pooling and its gradient."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import onnx_ir as ir
import torch
from onnxscript import OpBuilder

from ort_dynamo.dtypes import onnx_dtype
from ort_dynamo.lowering.builder import LoweringBuilder
from ort_dynamo.lowering.context import LoweringContext, Size
from ort_dynamo.lowering.promotion import float_dtype
from ort_dynamo.lowering.registry import lowering, register
from ort_dynamo.lowering.windows import (
    Pool,
    Windows,
    adaptive_windows,
    fixed,
    gather_windows,
    sliding_windows,
)
from ort_dynamo.lowering.zeros import zeros
from ort_dynamo.target import OPSET

aten = torch.ops.aten

_FURTHEST = 2**62
"""Beyond every place of a tensor."""


def _size(sizes: Sequence[Size]) -> Size:
    product: Size = 1
    for size in sizes:
        product = product * size
    return product


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
    sizes = ctx.sizes(self)
    pool = Pool.of(sizes, ctx.out[0].shape, kernel_size, stride, padding, dilation, ceil_mode, rank)
    axes = zip(pool.sizes, pool.out, pool.kernel, pool.stride, pool.padding, pool.dilation, strict=True)
    return _pooled(ctx, self, pool, lambda: [sliding_windows(ctx, *axis) for axis in axes])


def _adaptive_max_pool(
    rank: int, ctx: LoweringContext, self: ir.Value, output_size: Sequence[int]
) -> tuple[ir.Value | None, ...]:
    """adaptive_max_pool2d(Tensor self, int[2] output_size) -> (Tensor, Tensor)"""
    sizes, out = ctx.sizes(self)[-rank:], tuple(ctx.out[0].shape)[-rank:]
    pool = _tiles(sizes, out)
    return _pooled(
        ctx, self, pool, lambda: [adaptive_windows(ctx, size, count) for size, count in zip(sizes, out, strict=True)]
    )


def _tiles(sizes: Sequence[Size], out: Sequence[Size]) -> Pool | None:
    """Adaptive pooling as an ordinary one, where the windows are known to share no place."""
    lengths, counts = fixed(sizes), fixed(out)
    if lengths is None or counts is None or 0 in counts or any(n % m for n, m in zip(lengths, counts, strict=True)):
        return None
    kernel = [n // m for n, m in zip(lengths, counts, strict=True)]
    return Pool.of(sizes, out, kernel, (), (0,), (1,), False, len(kernel))


def _pooled(
    ctx: LoweringContext, self: ir.Value, pool: Pool | None, windows: functools.partial[list[Windows]]
) -> tuple[ir.Value | None, ...]:
    """Maximum and index within its plane of every window, by the kernel of `pool` where it has one.

    ONNX Runtime's CPU kernel misses a nan that is not its window's first place, and the training build's gives places
    outside the tensor for windows of nothing but -inf. So a tensor whose sum is not finite goes another way.
    """
    op, wanted = ctx.op, 1 in ctx.used
    if any(isinstance(size, int) and size == 0 for size in ctx.out[0].shape):
        return tuple(op.Expand(ctx.constant(0, fake.dtype), ctx.shape(fake.shape)) for fake in ctx.out)
    x = ctx.cast(self, float_dtype(ctx.dtype(self)))
    rank = ctx.rank(self)
    if pool is None or not pool.fits_onnx:
        y, place = _by_tables(ctx, op, x, rank, windows(), wanted)
    elif ctx.target.device_type != "cpu" or not ctx.dtype(self).is_floating_point:
        y, place = _by_kernel(ctx, op, x, pool, wanted)
    else:
        tables = windows()
        finite = op.Less(op.Abs(op.ReduceSum(x, keepdims=0)), math.inf)
        offsets = _offsets(ctx, ctx.sizes(self), pool) if wanted else None
        branches = {
            "then_branch": _branch(ctx, "kernel", lambda inner: _by_kernel(ctx, inner, x, pool, wanted, offsets)),
            "else_branch": _branch(ctx, "tables", lambda inner: _by_tables(ctx, inner, x, rank, tables, wanted)),
        }
        found = op.If(finite, **branches, _outputs=2 if wanted else 1)
        y, place = found if wanted else (found, None)
        y.dtype = x.dtype
        if place is not None:
            place.dtype = ir.DataType.INT64
    return ctx.cast(y, ctx.out[0].dtype), place


def _branch(ctx: LoweringContext, name: str, build: functools.partial[tuple[ir.Value | None, ...]]) -> ir.Graph:
    """A branch of If: a graph without inputs that reads the values around it."""
    graph = ir.Graph([], [], nodes=[], opset_imports={"": OPSET}, name=f"{ctx.node.name}_{name}")
    builder = LoweringBuilder(graph, ctx.target)
    builder.push_module(f"{ctx.node.name}.{name}")  # names are unique across branches
    graph.outputs.extend(value for value in build(builder.op) if value is not None)
    return graph


def _offsets(ctx: LoweringContext, sizes: Sequence[Size], pool: Pool) -> ir.Value:
    """The index of every plane's first place in the whole tensor, to broadcast against the output."""
    op, leading = ctx.op, sizes[: len(sizes) - pool.rank]
    planes = op.Range(0, ctx.scalar(_size(leading), torch.int64), 1)
    offsets = op.Mul(planes, ctx.scalar(_size(pool.sizes), torch.int64))
    return ctx.reshape(offsets, [*leading, *[1] * pool.rank])


def _by_kernel(
    ctx: LoweringContext, op: OpBuilder, x: ir.Value, pool: Pool, wanted: bool, offsets: ir.Value | None = None
) -> tuple[ir.Value, ir.Value | None]:
    """MaxPool, its indices counted within the plane as torch does."""
    batched = ctx.rank(ctx.node_input) > pool.rank + 1
    attributes = {
        "kernel_shape": pool.kernel,
        "strides": pool.stride,
        "pads": [*pool.padding, *pool.ends],
        "dilations": pool.dilation,
    }
    raise NotImplementedError
