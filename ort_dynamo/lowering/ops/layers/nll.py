"""Negative log-likelihood with its gradient; cross-entropy is this on top of log-softmax."""

from __future__ import annotations

import onnx_ir as ir
import torch

from ort_dynamo.lowering.context import LoweringContext, Size
from ort_dynamo.lowering.recipes.positions import from_start
from ort_dynamo.lowering.recipes.promotion import float_dtype
from ort_dynamo.lowering.recipes.sums.accurate_sum import total
from ort_dynamo.lowering.recipes.zeros import zeros
from ort_dynamo.lowering.registry import lowering
from ort_dynamo.torch_internals.kernels.operators import aten

_NONE, _MEAN = 0, 1  # torch.nn._reduction


def _class_axis(ctx: LoweringContext, self: ir.Value) -> int:
    return 1 if ctx.rank(self) > 1 else 0


def _targets(
    ctx: LoweringContext,
    target: ir.Value,
    weight: ir.Value | None,
    ignore_index: Size,
    dtype: torch.dtype,
    count: Size | None = None,
) -> tuple[ir.Value, ir.Value, ir.Value | None]:
    """(which targets count, the targets with 0 for those that do not, the weight of each target's class)

    With a `count` of classes, targets out of range stop a fused kernel; without it, they were checked before.
    """
    op = ctx.op
    wanted = ctx.cast(target, torch.int64)
    valid = op.Not(op.Equal(wanted, ctx.scalar(ignore_index, torch.int64)))
    classes = from_start(ctx, op.Where(valid, wanted, 0), count)
    weights = None if weight is None else op.Gather(ctx.cast(weight, dtype), classes, axis=0)
    return valid, classes, weights


@lowering(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def nll_loss_forward(
    ctx: LoweringContext,
    self: ir.Value,
    target: ir.Value,
    weight: ir.Value | None,
    reduction: int,
    ignore_index: Size,
) -> tuple[ir.Value, ...]:
    """nll_loss_forward(Tensor self, Tensor target, Tensor? weight, int reduction, SymInt ignore_index) -> (Tensor output, Tensor total_weight)"""  # noqa: E501
    op = ctx.op
    out_dtype = ctx.out[0].dtype
    dtype = float_dtype(out_dtype)
    axis, sizes = _class_axis(ctx, self), ctx.sizes(self)
    count = sizes[axis] if sizes else None
    valid, classes, weights = _targets(ctx, target, weight, ignore_index, dtype, count)
    picked = op.Squeeze(op.GatherElements(self, op.Unsqueeze(classes, [axis]), axis=axis), [axis])
    losses = op.Neg(ctx.cast(picked, dtype))
    if weights is not None:
        losses = op.Mul(losses, weights)
    losses = op.Where(valid, losses, 0.0)
    if reduction == _NONE and ctx.rank(target) > 0:
        return ctx.cast(losses, out_dtype), ctx.constant(0.0, out_dtype)
    counted = ctx.cast(valid, dtype) if weights is None else op.Where(valid, weights, 0.0)
    if rows := ctx.sizes(target):
        losses, counted = (total(ctx, value, rows, range(len(rows)), keepdim=False) for value in (losses, counted))
    output, total_weight = losses, counted
    if reduction == _MEAN:
        output = op.Div(output, total_weight)
    return ctx.cast(output, out_dtype), ctx.cast(total_weight, out_dtype)


@lowering(aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
def nll_loss_backward(
    ctx: LoweringContext,
    grad_output: ir.Value,
    self: ir.Value,
    target: ir.Value,
    weight: ir.Value | None,
    reduction: int,
    ignore_index: Size,
    total_weight: ir.Value,
) -> ir.Value:
    """nll_loss_backward(Tensor grad_output, Tensor self, Tensor target, Tensor? weight, int reduction, SymInt ignore_index, Tensor total_weight) -> Tensor"""  # noqa: E501
    op = ctx.op
    if ctx.rank(self) == 1:  # torch's kernel reads the first of several targets and gradients
        target, grad_output = (op.Reshape(op.Slice(op.Reshape(v, [-1]), [0], [1]), []) for v in (target, grad_output))
    dtype = float_dtype(ctx.out.dtype)
    axis = _class_axis(ctx, self)
    valid, classes, weights = _targets(ctx, target, weight, ignore_index, dtype)
    slope = op.Neg(ctx.cast(grad_output, dtype))
    if reduction == _MEAN:
        slope = op.Div(slope, ctx.cast(total_weight, dtype))
    if weights is not None:
        slope = op.Mul(slope, weights)
    slope = ctx.cast(op.Where(valid, slope, 0.0), ctx.out.dtype)
    indices, updates = op.Unsqueeze(classes, [axis]), op.Unsqueeze(slope, [axis])
    if target.shape is not None:  # one entry per target, as FuseCrossEntropyGradient has to see
        rows = [*target.shape]
        indices.shape = ir.Shape([*rows[:axis], 1, *rows[axis:]])
    return op.ScatterElements(zeros(ctx, self, ctx.sizes(self)), indices, updates, axis=axis)
