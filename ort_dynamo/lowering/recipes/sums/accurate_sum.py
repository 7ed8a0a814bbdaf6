"""Sums as accurate as torch's: of many float32 values, and of large integers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import onnx_ir as ir
import torch

from ort_dynamo.lowering.context import LoweringContext, Size
from ort_dynamo.lowering.op_builder import OpBuilder
from ort_dynamo.lowering.recipes.branches import either
from ort_dynamo.lowering.symbols import factors
from ort_dynamo.torch_internals.sizes.symbols import is_unbacked

__all__ = ["average", "integer_total", "is_long", "is_short", "sums_integers_exactly", "total"]

_STRIDED, _CONTIGUOUS = 1024, 4096
"""Maximum number of elements that one ReduceSum may add up: of leading dimensions, and of the last ones.

ONNX Runtime's CPU kernels add sequentially (eight values at a time along a contiguous dimension); torch adds pairwise.
ONNX Runtime's sum of a million times 0.1 has a relative error of 9e-4, and of 1e-2 along a column. In stages, as here,
the error is less than 1e-5.
"""

_SMALLEST_FACTOR = 16

_LONG = 1 << 16
"""Maximum number of elements that a kernel may sum with a relative error of at most 1e-6."""


def is_short(count: Size) -> bool:
    """Check whether `count` values can be summed in any order with a small error."""
    return isinstance(count, int) and count <= _STRIDED


def is_long(count: Size) -> bool:
    """Check whether a kernel's sum of `count` values in one stage may have an error of more than 1e-6."""
    return not isinstance(count, int) or count > _LONG


def total(
    ctx: LoweringContext,
    value: ir.Value,
    sizes: Sequence[Size],
    axes: Sequence[int],
    keepdim: bool,
    rows: bool = False,
) -> ir.Value:
    """Sum over `axes`, counted from the front, of a value of shape `sizes`.

    Long sums of float32 are computed in stages, the last dimensions first. A size that is a single symbol is summed in
    two stages if it is long at run time. This does not apply to several symbols, since each is smaller. Nor does it
    apply to sums over rows, unless `rows` is set: every gradient of a parameter is one, and a model has many.

    Args:
        rows: use stages for a symbolic number of rows, too.
    """
    op = ctx.op
    long = value.dtype == ir.DataType.FLOAT and not is_short(math.prod(sizes[a] for a in axes))
    if not long or not ctx.target.facts.sums_in_order:
        return op.ReduceSum(value, ctx.ints(axes), keepdims=int(keepdim))
    for a in axes:
        if lengths := _in_two(sizes[a]):
            both = zip(op.Split(value, ctx.ints(lengths), axis=a, _outputs=2), lengths, strict=True)
            return op.Add(*(total(ctx, v, [*sizes[:a], n, *sizes[a + 1 :]], axes, keepdim, rows) for v, n in both))
    shape: list[Size] = []
    summed: list[int] = []  # axes of `shape`
    for a, size in enumerate(sizes):
        parts = _factors(size) if a in axes else [size]
        if a in axes:
            summed.extend(range(len(shape), len(shape) + len(parts)))
        shape.extend(parts)
    stages = _stages(shape, summed)
    symbolic = [a for a in summed if isinstance(shape[a], torch.SymInt)]
    if len(shape) == len(sizes) and len(stages) == 1 and (not symbolic or (_adds_rows(stages[0], shape) and not rows)):
        return op.ReduceSum(value, ctx.ints(axes), keepdims=int(keepdim))
    if len(shape) > len(sizes):
        value = ctx.reshape(value, shape)
    for stage in stages:
        if symbolic == stage and (rows or not _adds_rows(stage, shape)):
            value = _symbolic_stage(ctx, value, len(shape), stage[0])
        else:
            value = op.ReduceSum(value, ctx.ints(stage), keepdims=0)
        shape = [size for a, size in enumerate(shape) if a not in stage]
    return op.Unsqueeze(value, ctx.ints(sorted(axes))) if keepdim else value


def _adds_rows(stage: list[int], shape: Sequence[Size]) -> bool:
    return stage == [0] and len(shape) > 1


def _symbolic_stage(ctx: LoweringContext, value: ir.Value, rank: int, axis: int) -> ir.Value:
    """Sum over one axis of symbolic size; if it is long, in two stages of the root of the size each."""
    op = ctx.op
    count = op.Shape(value, start=axis, end=axis + 1)  # which no input need carry: it may depend on data, and be zero
    root = op.Ceil(op.Sqrt(op.Cast(count, to=ir.DataType.FLOAT)))
    length = op.Cast(op.Max(root, 1.0), to=ir.DataType.INT64)
    parts = op.Div(op.Add(count, op.Sub(length, 1)), length)
    missing = op.Sub(op.Mul(parts, length), count)
    pads = op.Concat(ctx.ints([0] * (rank + axis)), missing, ctx.ints([0] * (rank - axis - 1)), axis=0)
    split = op.Concat(op.Shape(value, end=axis), parts, length, op.Shape(value, start=axis + 1), axis=0)

    def in_two(op: OpBuilder) -> list[ir.Value]:
        part = op.ReduceSum(op.Reshape(op.Pad(value, pads), split), [axis + 1], keepdims=0)
        return [op.ReduceSum(part, [axis], keepdims=0)]

    def at_once(op: OpBuilder) -> list[ir.Value]:
        return [op.ReduceSum(value, [axis], keepdims=0)]

    (result,) = either(ctx, op.Squeeze(op.Greater(count, _LONG), [0]), in_two, at_once)
    return result


def average(
    ctx: LoweringContext, value: ir.Value, sizes: Sequence[Size], axes: Sequence[int], keepdim: bool
) -> ir.Value:
    """Take the mean over `axes`, at least one, counted from the front, of a floating-point value of shape `sizes`."""
    op = ctx.op
    count = math.prod(sizes[a] for a in axes)
    if is_short(count):
        return op.ReduceMean(value, ctx.ints(axes), keepdims=int(keepdim))
    divisor = float(count) if isinstance(count, int) else op.Cast(ctx.scalar(count, torch.int64), to=value.dtype)
    return op.Div(total(ctx, value, sizes, axes, keepdim, rows=True), divisor)


def _factors(size: Size) -> list[Size]:
    """Factor `size` into short sizes, as far as its divisors allow."""
    parts = factors(size)
    if len(parts) > 1 and isinstance(parts[-1], int) and parts[-1] < _SMALLEST_FACTOR:
        parts[-2:] = [parts[-2] * parts[-1]]
    return [short for part in parts for short in (_divisors(part) if isinstance(part, int) else [part])]


def _divisors(number: int) -> list[int]:
    if number <= _STRIDED:
        return [number]
    # Near the root: the stages are short, and the first leaves many sums to make in parallel.
    divisor = next(d for d in range(min(_STRIDED, math.isqrt(number)), 0, -1) if number % d == 0)
    return [number] if divisor < _SMALLEST_FACTOR else [*_divisors(number // divisor), divisor]


def _in_two(size: Size) -> list[int]:
    """Split a long `size` without divisors into a large part that has some, and a small rest; else []."""
    if not isinstance(size, int) or max(map(int, _factors(size))) <= _LONG:
        return []
    bits = size.bit_length() // 2
    large = size >> bits << bits
    return [large, size - large] if large < size else []


def _stages(shape: Sequence[Size], summed: Sequence[int]) -> list[list[int]]:
    """Divide `summed` into groups of few elements each, the last first."""
    stages: list[list[int]] = []
    count: Size = 0
    for a in reversed(summed):
        last = set(range(a, len(shape))) <= set(summed)
        limit = _CONTIGUOUS if last else _STRIDED
        together = count * shape[a]
        if stages and isinstance(together, int) and together <= limit:
            stages[-1].insert(0, a)
            count = together
        else:
            stages.append([a])
            count = shape[a]
    return stages


# -- integers ----------------------------------------------------------------------------------------------------


def sums_integers_exactly(ctx: LoweringContext) -> bool:
    """Check whether ReduceSum and ReduceProd compute integers as integers."""
    target = ctx.target
    return not (target.has_defect("integer_sums_in_float64") or target.has_defect("integers_reduced_in_float32"))


def integer_total(
    ctx: LoweringContext, value: ir.Value, sizes: Sequence[Size], axes: Sequence[int], keepdim: bool
) -> ir.Value:
    """Sum an integer `value` over `axes` exactly; overflow wraps modulo 2^64, as in torch.

    If a runtime sums integers in float64, the CPU uses a matmul with ones, whose kernel computes in integers. Other
    devices sum the bits of each value in parts whose sums float64 holds.
    """
    op = ctx.op
    carried = not is_unbacked(*sizes)  # sizes made from data may be no input's
    if ctx.target.facts.prefers_dense_products and carried and not sums_integers_exactly(ctx):
        return _times_ones(ctx, value, sizes, axes, keepdim)
    dtype = value.dtype
    assert dtype is not None
    if _was_narrow(value) and ctx.target.has_defect("integers_reduced_in_float32"):
        wide = op.Cast(value, to=ir.DataType.DOUBLE)
        return op.Cast(op.ReduceSum(wide, ctx.ints(axes), keepdims=int(keepdim)), to=dtype)
    if sums_integers_exactly(ctx) or _was_narrow(value):
        return op.ReduceSum(value, ctx.ints(axes), keepdims=int(keepdim))
    rest = value if dtype == ir.DataType.INT64 else op.Cast(value, to=ir.DataType.INT64)
    count = math.prod(sizes[a] for a in axes)
    bits = 32 if isinstance(count, int) and count <= 1 << 21 else 21  # 21 bits: up to 2^31 values
    result, place = None, 0
    while place < 64:
        part = rest
        if place + 2 * bits <= 64:  # not the last
            quotient = op.Div(rest, 1 << bits)
            part, rest = op.Sub(rest, op.Mul(quotient, 1 << bits)), quotient
        else:
            bits = 64
        if ctx.target.has_defect("integers_reduced_in_float32"):
            part = op.Cast(part, to=ir.DataType.DOUBLE)
        added = op.Cast(op.ReduceSum(part, ctx.ints(axes), keepdims=int(keepdim)), to=ir.DataType.INT64)
        scaled = op.Mul(added, 1 << place)
        result = scaled if result is None else op.Add(result, scaled)
        place += bits
    assert result is not None
    return result if dtype == ir.DataType.INT64 else op.Cast(result, to=dtype)


def _times_ones(
    ctx: LoweringContext, value: ir.Value, sizes: Sequence[Size], axes: Sequence[int], keepdim: bool
) -> ir.Value:
    op = ctx.op
    assert value.dtype is not None
    summed = sorted(axes)
    kept = [a for a in range(len(sizes)) if a not in summed]
    count = math.prod(sizes[a] for a in summed)
    one = ctx.builder.constant(1, value.dtype)
    if summed == list(range(len(summed))):
        rows = ctx.reshape(value, [count, math.prod(sizes[a] for a in kept)])
        result = op.MatMul(op.Expand(one, ctx.shape([1, count])), rows)
    else:
        if [*kept, *summed] != list(range(len(sizes))):
            value = op.Transpose(value, perm=[*kept, *summed])
        rows = ctx.reshape(value, [math.prod(sizes[a] for a in kept), count])
        result = op.MatMul(rows, op.Expand(one, ctx.shape([count, 1])))
    return ctx.reshape(result, [1 if a in summed else n for a, n in enumerate(sizes) if keepdim or a in kept])


def _was_narrow(value: ir.Value) -> bool:
    """Check whether `value` was cast from a dtype of which float64 holds sums of up to 2^37 values."""
    node = value.producer()
    if node is None or node.op_type != "Cast" or node.inputs[0] is None or value.dtype != ir.DataType.INT64:
        return False
    narrow = (ir.DataType.BOOL, ir.DataType.INT8, ir.DataType.UINT8, ir.DataType.INT16)
    return node.inputs[0].dtype in narrow
