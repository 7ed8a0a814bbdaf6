"""Table look-up with its gradient."""

from __future__ import annotations

import math

import onnx_ir as ir
import torch

from ort_dynamo.lowering.context import LoweringContext, Size
from ort_dynamo.lowering.recipes.positions import from_start
from ort_dynamo.lowering.recipes.promotion import float_dtype
from ort_dynamo.lowering.recipes.sums.add_rows import add_rows
from ort_dynamo.lowering.recipes.zeros import zeros
from ort_dynamo.lowering.registry import lowering
from ort_dynamo.torch_internals.kernels.operators import aten


@lowering(aten.embedding.default)
def embedding(
    ctx: LoweringContext,
    weight: ir.Value,
    indices: ir.Value,
    padding_idx: Size = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> ir.Value:
    """embedding(Tensor weight, Tensor indices, SymInt padding_idx=-1, bool scale_grad_by_freq=False, bool sparse=False) -> Tensor"""  # noqa: E501
    return ctx.op.Gather(weight, from_start(ctx, indices, ctx.sizes(weight)[0]), axis=0)


@lowering(aten.embedding_dense_backward.default)
def embedding_dense_backward(
    ctx: LoweringContext,
    grad_output: ir.Value,
    indices: ir.Value,
    num_weights: Size,
    padding_idx: Size,
    scale_grad_by_freq: bool,
) -> ir.Value:
    """embedding_dense_backward(Tensor grad_output, Tensor indices, SymInt num_weights, SymInt padding_idx, bool scale_grad_by_freq) -> Tensor"""  # noqa: E501
    op = ctx.op
    dtype = float_dtype(ctx.out.dtype)
    width = ctx.sizes(grad_output)[-1]
    rows = ctx.reshape(ctx.cast(indices, torch.int64), [ctx.fake(indices).numel(), 1])
    grad = ctx.reshape(ctx.cast(grad_output, dtype), [ctx.fake(indices).numel(), width])
    if scale_grad_by_freq:
        grad = _divide_by_frequency(ctx, grad, op.Reshape(rows, [-1]), num_weights)
    table = zeros(ctx, grad, [num_weights * width])
    result = ctx.reshape(add_rows(ctx, table, rows, grad, width), [num_weights, width])
    if not isinstance(padding_idx, int) or padding_idx >= 0:
        result = clear_row(ctx, result, padding_idx, width)
    return ctx.cast(result, ctx.out.dtype)


def _divide_by_frequency(ctx: LoweringContext, grad: ir.Value, rows: ir.Value, num_weights: Size) -> ir.Value:
    """Divide each row of `grad` by the count of its index in `rows`, which is 1-D and int64."""
    op = ctx.op
    ones = op.Expand(ctx.constant(1, torch.int64), op.Shape(rows))
    count = op.ScatterElements(zeros(ctx, rows, [num_weights]), rows, ones, axis=0, reduction="add")
    often = op.Cast(op.Gather(count, rows, axis=0), to=grad.dtype)
    return op.Div(grad, op.Unsqueeze(often, [-1]))


def clear_row(ctx: LoweringContext, table: ir.Value, row: Size, width: Size) -> ir.Value:
    """`table` with zeros in one row: less work than leaving that row out of a sum of gradients."""
    place = ctx.op.Reshape(ctx.shape([row]), [1, 1])
    nothing = ctx.op.Expand(ctx.constant(0, float_dtype(ctx.out.dtype)), ctx.shape([1, width]))
    return ctx.op.ScatterND(table, place, nothing)


@lowering(aten.embedding_renorm.default)
def embedding_renorm(
    ctx: LoweringContext, self: ir.Value, indices: ir.Value, max_norm: float, norm_type: float
) -> ir.Value:
    """embedding_renorm(Tensor self, Tensor indices, float max_norm, float norm_type) -> Tensor"""
    op = ctx.op
    dtype = float_dtype(ctx.dtype(self))
    rows = ctx.op.Reshape(ctx.cast(indices, torch.int64), [-1])
    table = ctx.cast(self, dtype)
    # torch takes the norm in the table's dtype and all else in float64.
    norm = ctx.cast(
        ctx.cast(_norm(ctx, op.Gather(table, rows, axis=0), norm_type, dtype), ctx.dtype(self)), torch.float64
    )
    scale = op.Where(op.Greater(norm, max_norm), op.Div(max_norm, op.Add(norm, 1e-7)), 1.0)
    scaled = op.Mul(op.Gather(table, rows, axis=0), ctx.cast(scale, dtype))
    # A repeated row is written repeatedly, with the same values.
    return op.ScatterND(self, op.Unsqueeze(rows, [-1]), ctx.cast(scaled, ctx.dtype(self)))


def _norm(ctx: LoweringContext, rows: ir.Value, order: float, dtype: torch.dtype) -> ir.Value:
    op = ctx.op
    size = op.Abs(rows)
    if order == math.inf:
        return op.ReduceMax(size, [1], keepdims=1)  # not [-1]: defect last_axis_of_nothing
    if order == 0:
        return op.ReduceSum(ctx.cast(op.Not(op.Equal(size, 0.0)), dtype), [1], keepdims=1)
    if order == 2:
        return op.Sqrt(op.ReduceSum(op.Mul(rows, rows), [1], keepdims=1))
    if order == 1:
        return op.ReduceSum(size, [1], keepdims=1)
    power, root = (ctx.constant(number, dtype) for number in (order, 1 / order))
    return op.Pow(op.ReduceSum(op.Pow(size, power), [1], keepdims=1), root)
