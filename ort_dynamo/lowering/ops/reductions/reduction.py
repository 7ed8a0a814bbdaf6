"""Sums, means, extrema, norms."""

from __future__ import annotations

import math
from collections.abc import Sequence

import onnx_ir as ir
import torch

from ort_dynamo.graph.marks import IGNORES_NAN
from ort_dynamo.lowering.context import LoweringContext, Size
from ort_dynamo.lowering.op_builder import OpBuilder
from ort_dynamo.lowering.ops.elementwise.unary import is_float, square_root
from ort_dynamo.lowering.ops.memory.creation import filled
from ort_dynamo.lowering.ops.memory.views import axis
from ort_dynamo.lowering.recipes.all_are import all_are
from ort_dynamo.lowering.recipes.branches import if_finite
from ort_dynamo.lowering.recipes.checks import called, has_elements, none_missing
from ort_dynamo.lowering.recipes.first_index import first_index
from ort_dynamo.lowering.recipes.promotion import float_dtype
from ort_dynamo.lowering.recipes.sums.accurate_sum import average, integer_total, sums_integers_exactly, total
from ort_dynamo.lowering.recipes.sums.prefix_scan import prefix_scan
from ort_dynamo.lowering.registry import lowering
from ort_dynamo.torch_internals.kernels.operators import aten

Dims = int | Sequence[int] | None


def axes_of(dim: Dims, rank: int) -> list[int]:
    """Return the reduced dimensions, counted from the front; None and [] mean all."""
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return list(range(rank))
    return [axis(d, rank) for d in ([dim] if isinstance(dim, int) else dim)]


def reduce(ctx: LoweringContext, op_type: str, value: ir.Value, axes: Sequence[int], keepdim: bool) -> ir.Value:
    """One ONNX reduction over `axes` of a value, which are all its axes if none are named."""
    return getattr(ctx.op, op_type)(value, ctx.ints(axes), keepdims=int(keepdim))


def sum_of_squares(
    ctx: LoweringContext, value: ir.Value, sizes: Sequence[Size], axes: Sequence[int], keepdim: bool
) -> ir.Value:
    """Sum of value² over `axes` of a value of shape `sizes`."""
    # ReduceSumSquare takes two and a half times as long as this, eight times over leading dimensions.
    return total(ctx, ctx.op.Mul(value, value), sizes, axes, keepdim, rows=True)


def reduces_nothing(ctx: LoweringContext, value: ir.Value, axes: Sequence[int]) -> bool:
    """Check whether a reduced dimension is zero. Symbolic sizes are at least two."""
    return any(isinstance(size := ctx.sizes(value)[a], int) and size == 0 for a in axes)


def count_of(ctx: LoweringContext, value: ir.Value, axes: Sequence[int]) -> Size:
    """Count the elements that each result is reduced from."""
    count: Size = 1
    for a in axes:
        count = count * ctx.sizes(value)[a]
    return count


# -- sums --------------------------------------------------------------------------------------------------------


@lowering(aten.sum.default, aten.sum.dim_IntList)
def sum_(
    ctx: LoweringContext, self: ir.Value, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> ir.Value:
    """sum.dim_IntList(Tensor self, int[1]? dim, bool keepdim=False, *, ScalarType? dtype=None) -> Tensor"""
    value = ctx.cast(self, float_dtype(ctx.out.dtype))
    if ctx.rank(self):
        add = total if ctx.out.dtype.is_floating_point else integer_total
        value = add(ctx, value, ctx.sizes(self), axes_of(dim, ctx.rank(self)), keepdim)
    return ctx.cast(value, ctx.out.dtype)


@lowering(aten.mean.default, aten.mean.dim)
def mean(
    ctx: LoweringContext, self: ir.Value, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> ir.Value:
    """mean.dim(Tensor self, int[1]? dim, bool keepdim=False, *, ScalarType? dtype=None) -> Tensor"""
    axes = axes_of(dim, ctx.rank(self)) if ctx.rank(self) else []
    if reduces_nothing(ctx, self, axes):
        return filled(ctx, math.nan)
    value = ctx.cast(self, float_dtype(ctx.out.dtype))
    if axes:
        value = average(ctx, value, ctx.sizes(self), axes, keepdim)
    return ctx.cast(value, ctx.out.dtype)


@lowering(aten.prod.default, aten.prod.dim_int)
def prod(
    ctx: LoweringContext, self: ir.Value, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> ir.Value:
    """prod.dim_int(Tensor self, int dim, bool keepdim=False, *, ScalarType? dtype=None) -> Tensor"""
    value = ctx.cast(self, float_dtype(ctx.out.dtype))
    if not ctx.rank(self):
        return ctx.cast(value, ctx.out.dtype)
    axes = axes_of(dim, ctx.rank(self))
    own = value.dtype
    assert own is not None
    lossy = not ctx.out.dtype.is_floating_point and not sums_integers_exactly(ctx)
    missing = own == ir.DataType.DOUBLE and not ctx.target.takes("ReduceProd", "", {"T": own})
    if not (lossy or missing) or reduces_nothing(ctx, self, axes):
        return ctx.cast(reduce(ctx, "ReduceProd", value, axes, keepdim), ctx.out.dtype)
    sizes = ctx.sizes(self)
    if dim is None:
        value, axes, sizes = ctx.op.Reshape(value, [-1]), [0], (count_of(ctx, self, axes),)
    (a,) = axes
    if not has_elements(sizes[a]):  # an empty product is 1
        one = [1 if place == a else size for place, size in enumerate(sizes)]
        value = ctx.op.Concat(ctx.op.Expand(ctx.builder.constant(1, own), ctx.shape(one)), value, axis=a)
        sizes = tuple(size + 1 if place == a else size for place, size in enumerate(sizes))
    running = prefix_scan(ctx, value, axes[0], sizes, _multiply, 1)
    last = ctx.op.Gather(running, ctx.constant(-1, torch.int64), axis=axes[0])
    return ctx.cast(ctx.op.Unsqueeze(last, axes) if keepdim else last, ctx.out.dtype)


def _multiply(op: OpBuilder, earlier: ir.Value, later: ir.Value) -> ir.Value:
    return op.Mul(earlier, later)


# -- extrema -----------------------------------------------------------------------------------------------------


def _extreme_integer(
    ctx: LoweringContext, op_type: str, value: ir.Value, axes: Sequence[int], keepdim: bool
) -> ir.Value:
    if not ctx.target.has_defect("integers_reduced_in_float32"):
        return reduce(ctx, op_type, value, axes, keepdim)
    if value.dtype == ir.DataType.INT64:
        return _extreme_by_halves(ctx, op_type, value, axes, keepdim)
    wide = ctx.op.Cast(value, to=ir.DataType.DOUBLE)
    return ctx.op.Cast(reduce(ctx, op_type, wide, axes, keepdim), to=value.dtype)


def _extreme_by_halves(
    ctx: LoweringContext, op_type: str, value: ir.Value, axes: Sequence[int], keepdim: bool
) -> ir.Value:
    """Compute the maximum or minimum of int64 in float64, which holds each 32-bit half exactly.

    It takes the extreme of the high halves, then that of the low halves of the entries with this high half.

    The quotient is truncated, and the remainder has the sign of the value. Pairs (quotient, remainder) keep the
    order of the values.
    """
    op, half = ctx.op, 1 << 32
    quotient = op.Div(value, half)
    rest = op.Cast(op.Sub(value, op.Mul(quotient, half)), to=ir.DataType.DOUBLE)
    high = op.Cast(quotient, to=ir.DataType.DOUBLE)
    top = reduce(ctx, op_type, high, axes, True)
    outside = -2.0 * half if op_type == "ReduceMax" else 2.0 * half
    best = reduce(ctx, op_type, op.Where(op.Equal(high, top), rest, outside), axes, True)
    top, best = (op.Cast(one, to=ir.DataType.INT64) for one in (top, best))
    found = op.Add(op.Mul(top, half), best)
    return found if keepdim else op.Squeeze(found, ctx.ints(axes))


def extremum(ctx: LoweringContext, op_type: str, value: ir.Value, axes: Sequence[int], keepdim: bool) -> ir.Value:
    """ReduceMax or ReduceMin as torch has them: a nan wins. The kernels lose it (defect comparisons_lose_nan)."""
    if not is_float(value):
        return _extreme_integer(ctx, op_type, value, axes, keepdim)

    def without_nan(op: OpBuilder) -> list[ir.Value]:
        found = getattr(op, op_type)(value, ctx.ints(axes), keepdims=int(keepdim))
        if not ctx.target.has_defect("extremes_of_infinity"):
            return [found]
        worst = -math.inf if op_type == "ReduceMax" else math.inf
        return [op.Where(all_are(op, value, worst, ctx.ints(axes), keepdim=keepdim), worst, found)]

    def with_nan(op: OpBuilder) -> list[ir.Value]:
        found = op.ReduceMax(op.IsNaN(value), ctx.ints(axes), keepdims=int(keepdim))
        return [op.Where(found, math.nan, *without_nan(op))]

    # A sum of all is a tenth of the work, and finite where none is nan.
    (result,) = if_finite(ctx, value, without_nan, with_nan)
    return result


def _extremum(op_type: str, ctx: LoweringContext, self: ir.Value, dim: Dims, keepdim: bool) -> ir.Value:
    if not ctx.rank(self):
        return self
    axes = None if dim is None or (not isinstance(dim, int) and not dim) else axes_of(dim, ctx.rank(self))
    checked = none_missing(ctx, self, axes, called(ctx))
    value = ctx.cast(checked, float_dtype(ctx.dtype(self)))
    return ctx.cast(extremum(ctx, op_type, value, axes_of(dim, ctx.rank(self)), keepdim), ctx.out.dtype)


@lowering(aten.amax.default, aten.max.default)
def amax(ctx: LoweringContext, self: ir.Value, dim: Dims = None, keepdim: bool = False) -> ir.Value:
    """amax(Tensor self, int[1] dim=[], bool keepdim=False) -> Tensor"""
    if ctx.node.meta.get(IGNORES_NAN):
        return ctx.op.ReduceMax(self, ctx.ints(axes_of(dim, ctx.rank(self))), keepdims=int(keepdim))
    return _extremum("ReduceMax", ctx, self, dim, keepdim)


@lowering(aten.amin.default, aten.min.default)
def amin(ctx: LoweringContext, self: ir.Value, dim: Dims = None, keepdim: bool = False) -> ir.Value:
    """amin(Tensor self, int[1] dim=[], bool keepdim=False) -> Tensor"""
    return _extremum("ReduceMin", ctx, self, dim, keepdim)


@lowering(aten.max.dim)
def max_dim(ctx: LoweringContext, self: ir.Value, dim: int, keepdim: bool = False) -> tuple[ir.Value | None, ...]:
    """max.dim(Tensor self, int dim, bool keepdim=False) -> (Tensor values, Tensor indices)"""
    return _with_index("ReduceMax", ctx, self, dim, keepdim)


@lowering(aten.min.dim)
def min_dim(ctx: LoweringContext, self: ir.Value, dim: int, keepdim: bool = False) -> tuple[ir.Value | None, ...]:
    """min.dim(Tensor self, int dim, bool keepdim=False) -> (Tensor values, Tensor indices)"""
    return _with_index("ReduceMin", ctx, self, dim, keepdim)


def is_extremum(ctx: LoweringContext, value: ir.Value, kept: ir.Value) -> ir.Value:
    """Mark the elements that are the extremum `kept` of their row. A nan is the extremum, and equal to nothing."""
    found = ctx.op.Equal(value, kept)
    return ctx.op.Or(found, ctx.op.IsNaN(value)) if is_float(value) else found


def _with_index(
    op_type: str, ctx: LoweringContext, self: ir.Value, dim: int, keepdim: bool
) -> tuple[ir.Value | None, ...]:
    if not ctx.rank(self):
        return self, ctx.constant(0, torch.int64)
    op, axes = ctx.op, axes_of(dim, ctx.rank(self))
    value = ctx.cast(none_missing(ctx, self, axes, called(ctx)), float_dtype(ctx.dtype(self)))
    kept = extremum(ctx, op_type, value, axes, True)
    values = ctx.cast(kept if keepdim else op.Squeeze(kept, axes), ctx.dtype(self))
    if 1 not in ctx.used:
        return values, None
    found = is_extremum(ctx, value, kept)
    (a,), rank = axes, ctx.rank(self)
    return values, first_index(ctx, found, a, ctx.sizes(self)[a], rank, keepdims=keepdim)


# -- truth -------------------------------------------------------------------------------------------------------


@lowering(aten.any.default, aten.any.dim, aten.any.dims)
def any_(ctx: LoweringContext, self: ir.Value, dim: Dims = None, keepdim: bool = False) -> ir.Value:
    """any.dims(Tensor self, int[]? dim=None, bool keepdim=False) -> Tensor"""
    return _truth("ReduceMax", False, ctx, self, dim, keepdim)


@lowering(aten.all.default, aten.all.dim, aten.all.dims)
def all_(ctx: LoweringContext, self: ir.Value, dim: Dims = None, keepdim: bool = False) -> ir.Value:
    """all.dims(Tensor self, int[]? dim=None, bool keepdim=False) -> Tensor"""
    return _truth("ReduceMin", True, ctx, self, dim, keepdim)


def _truth(op_type: str, of_nothing: bool, ctx: LoweringContext, self: ir.Value, dim: Dims, keepdim: bool) -> ir.Value:
    axes = axes_of(dim, ctx.rank(self)) if ctx.rank(self) else []
    if reduces_nothing(ctx, self, axes):
        return filled(ctx, of_nothing)
    value = ctx.cast(self, torch.bool)
    # any.dims and all.dims with dim=[] reduce nothing.
    keeps = ctx.node.target in (aten.any.dims, aten.all.dims) and isinstance(dim, Sequence) and not dim
    if axes and not keeps:
        if all(has_elements(ctx.sizes(self)[a]) for a in axes):
            value = reduce(ctx, op_type, value, axes, keepdim)
        else:  # the kernels for truth values do not reduce nothing
            other = value if op_type == "ReduceMax" else ctx.op.Not(value)
            count = reduce(ctx, "ReduceSum", ctx.cast(other, torch.int64), axes, keepdim)
            value = ctx.op.Equal(count, 0) if op_type == "ReduceMin" else ctx.op.Greater(count, 0)
    return ctx.cast(value, ctx.out.dtype)


# -- norms -------------------------------------------------------------------------------------------------------


@lowering(aten.linalg_vector_norm.default)
def vector_norm(
    ctx: LoweringContext, self: ir.Value, ord: float = 2, dim: Dims = None, keepdim: bool = False,
    *, dtype: torch.dtype | None = None,
) -> ir.Value:  # fmt: skip
    """linalg_vector_norm(Tensor self, Scalar ord=2, int[1]? dim=None, bool keepdim=False, *, ScalarType? dtype=None)
    -> Tensor
    """
    rank = ctx.rank(self)
    if rank and (ord < 0 or ord == math.inf):
        self = none_missing(ctx, self, axes_of(dim, rank), "linalg.vector_norm")
    x = ctx.cast(self, float_dtype(ctx.out.dtype))
    if not rank:
        x, dim, keepdim = ctx.op.Reshape(x, [1]), None, False
    sizes, axes = ctx.sizes(self) if rank else (1,), axes_of(dim, max(rank, 1))
    if ord and all(isinstance(sizes[axis], int) and sizes[axis] == 1 for axis in axes):
        # torch does the same, and so keeps a value whose power is out of range.
        alone = ctx.op.Abs(x)
        return ctx.cast(alone if keepdim else ctx.op.Squeeze(alone, axes), ctx.out.dtype)
    return ctx.cast(norm(ctx, x, sizes, ord, axes, keepdim), ctx.out.dtype)


def norm(
    ctx: LoweringContext, x: ir.Value, sizes: Sequence[Size], order: float, axes: Sequence[int], keepdim: bool
) -> ir.Value:
    """(Σ |x|^order)^(1 / order) and its limits, of a floating-point value of shape `sizes`."""
    op = ctx.op
    assert x.dtype is not None
    match order:
        case 0:
            return total(ctx, op.Cast(op.Not(op.Equal(x, 0.0)), to=x.dtype), sizes, axes, keepdim)
        case 1:
            return total(ctx, op.Abs(x), sizes, axes, keepdim)
        case 2:
            return square_root(ctx, sum_of_squares(ctx, x, sizes, axes, keepdim))
        case math.inf:
            return extremum(ctx, "ReduceMax", op.Abs(x), axes, keepdim)
        case _ if order == -math.inf:
            return extremum(ctx, "ReduceMin", op.Abs(x), axes, keepdim)
    powers = op.Pow(op.Abs(x), ctx.builder.constant(float(order), x.dtype))
    return op.Pow(total(ctx, powers, sizes, axes, keepdim), ctx.builder.constant(1 / order, x.dtype))
