"""Layer, group and root-mean-square normalization with their gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence

import onnx_ir as ir
import torch

from ort_dynamo.graph.dtypes import onnx_dtype
from ort_dynamo.lowering.context import LoweringContext, Size, is_empty
from ort_dynamo.lowering.ops.elementwise.unary import square_root
from ort_dynamo.lowering.recipes.promotion import float_dtype
from ort_dynamo.lowering.recipes.sums.accurate_sum import average, is_long, total
from ort_dynamo.lowering.registry import lowering
from ort_dynamo.torch_internals.kernels.operators import aten

__all__ = ["inverse_root", "optional", "read_saved_statistics", "settled"]


def inverse_root(ctx: LoweringContext, variance: ir.Value, eps: float) -> ir.Value:
    """1 / sqrt(variance + eps)."""
    return ctx.op.Reciprocal(square_root(ctx, ctx.op.Add(variance, eps), is_normal=eps > 1e-37))


def read_saved_statistics(ctx: LoweringContext, sizes: Sequence[Size]) -> None:
    """Compute statistics over `sizes` of two or three elements from the values that the gradient will read.

    The gradient then nearly vanishes, for two elements up to eps. It would not with the statistics of values that were
    rounded to bfloat16 afterwards. For four elements or more, such statistics give the more accurate gradient.
    """
    if math.prod(size if isinstance(size, int) else 2 for size in sizes) < 4:
        ctx.read_rounded()


def settled(ctx: LoweringContext, *values: ir.Value | None) -> tuple[ir.Value | None, ...]:
    """Return the node's results in their dtypes."""
    return tuple(
        None if value is None else ctx.cast(value, fake.dtype) for value, fake in zip(values, ctx.out, strict=True)
    )


def optional(ctx: LoweringContext, value: ir.Value | None, dtype: torch.dtype) -> ir.Value | None:
    """Return an argument that may be missing, in `dtype`."""
    return None if value is None else ctx.cast(value, dtype)


def _inner_axes(rank: int, normalized_shape: Sequence[Size]) -> list[int]:
    return list(range(rank - len(normalized_shape), rank))


def _mean(ctx: LoweringContext, value: ir.Value, sizes: Sequence[Size], axes: Sequence[int]) -> ir.Value:
    """Return the mean over `axes`, which stay, of a value of shape `sizes`."""
    if is_long(math.prod(sizes[axis] for axis in axes)):
        return average(ctx, value, sizes, axes, keepdim=True)
    return ctx.op.ReduceMean(value, ctx.ints(axes))


def _filled(ctx: LoweringContext, *numbers: float) -> tuple[ir.Value | None, ...]:
    """Return the node's results where there is nothing to normalize: each one is a scalar, repeated."""
    return tuple(
        ctx.op.Expand(ctx.constant(number, fake.dtype), ctx.shape(fake.shape)) if index in ctx.used else None
        for index, (number, fake) in enumerate(zip(numbers, ctx.out, strict=True))
    )


def _outer_sum(ctx: LoweringContext, value: ir.Value, like: ir.Value, count: int) -> ir.Value:
    """Return the sum over the first `count` dimensions; `like` has the shape of `value`, which passes look at."""
    if not count:
        return value
    value.shape = like.shape
    return total(ctx, value, ctx.sizes(like), range(count), keepdim=False)


# -- layer normalization -----------------------------------------------------------------------------------------


def _fused_dtype(ctx: LoweringContext, *values: ir.Value | None) -> torch.dtype | None:
    """Return the dtype in which LayerNormalization computes this node as exactly as torch does, if there is one."""
    target = ctx.target
    if target.has_defect("layer_norm_variance"):
        return None
    dtypes = {ctx.dtype(value) for value in values if value is not None}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    if not target.takes("LayerNormalization", "", {"T": onnx_dtype(dtype), "U": ir.DataType.FLOAT}):
        dtype = float_dtype(dtype)
    # With float64 the kernel hands out mean and deviation in float32.
    return None if dtype == torch.float64 else dtype


def _has_kernel(ctx: LoweringContext, length: Size) -> bool:
    """Check whether LayerNormalization takes rows of `length` elements, and is accurate."""
    if ctx.target.has_defect("layer_norm_of_one") and not (isinstance(length, int) and length > 1):
        return False
    return not is_long(length) or (isinstance(length, int) and not ctx.target.facts.sums_in_order)


@lowering(aten.native_layer_norm.default)
def native_layer_norm(
    ctx: LoweringContext,
    input: ir.Value,
    normalized_shape: Sequence[Size],
    weight: ir.Value | None,
    bias: ir.Value | None,
    eps: float,
) -> tuple[ir.Value | None, ...]:
    """native_layer_norm(Tensor input, SymInt[] normalized_shape, Tensor? weight, Tensor? bias, float eps)
    -> (Tensor, Tensor, Tensor)
    """
    op = ctx.op
    if is_empty(ctx.sizes(input)):
        return _filled(ctx, 0, 0, math.nan)
    read_saved_statistics(ctx, normalized_shape)
    axes = _inner_axes(ctx.rank(input), normalized_shape)
    dtype = _fused_dtype(ctx, input, weight, bias) if _has_kernel(ctx, math.prod(normalized_shape)) else None
    if dtype is not None:
        x, w, b = ctx.cast(input, dtype), optional(ctx, weight, dtype), optional(ctx, bias, dtype)
        if w is None:
            w = op.Expand(ctx.constant(1, dtype), ctx.shape(normalized_shape))
        y, mean, rstd = op.LayerNormalization(x, w, b, axis=axes[0], epsilon=eps, _outputs=3)
        mean.dtype = rstd.dtype = ir.DataType.FLOAT
        return settled(ctx, y, mean, rstd)
    dtype = float_dtype(ctx.dtype(input))
    x, w, b = ctx.cast(input, dtype), optional(ctx, weight, dtype), optional(ctx, bias, dtype)
    sizes = ctx.sizes(input)
    mean = _mean(ctx, x, sizes, axes)
    centred = op.Sub(x, mean)
    rstd = inverse_root(ctx, _mean(ctx, op.Mul(centred, centred), sizes, axes), eps)
    y = op.Mul(centred, rstd)
    if w is not None:
        y = op.Mul(y, w)
    if b is not None:
        y = op.Add(y, b)
    return settled(ctx, y, mean, rstd)


@lowering(aten.native_layer_norm_backward.default)
def native_layer_norm_backward(
    ctx: LoweringContext,
    grad_out: ir.Value,
    input: ir.Value,
    normalized_shape: Sequence[Size],
    mean: ir.Value,
    rstd: ir.Value,
    weight: ir.Value | None,
    bias: ir.Value | None,
    output_mask: Sequence[bool],
) -> tuple[ir.Value | None, ...]:
    """native_layer_norm_backward(Tensor grad_out, Tensor input, SymInt[] normalized_shape, Tensor mean, Tensor rstd,
    Tensor? weight, Tensor? bias, bool[3] output_mask) -> (Tensor, Tensor, Tensor)
    """
    # LayerNormalizationGrad of the training build is not used: its CPU kernel takes four times as long as these nodes.
    op = ctx.op
    if is_empty(ctx.sizes(input)):
        return _filled(ctx, 0, 0, 0)
    axes = _inner_axes(ctx.rank(input), normalized_shape)
    wanted = [bool(mask) and index in ctx.used for index, mask in enumerate(output_mask)]
    dtype = float_dtype(ctx.dtype(input))
    grad, x, mean, rstd = (ctx.cast(value, dtype) for value in (grad_out, input, mean, rstd))
    w = optional(ctx, weight, dtype)
    normalized = op.Mul(op.Sub(x, mean), rstd)
    grad_input = grad_weight = grad_bias = None
    if wanted[0]:
        scaled = grad if w is None else op.Mul(grad, w)
        along_one, along_x = (
            _mean(ctx, value, ctx.sizes(input), axes) for value in (scaled, op.Mul(scaled, normalized))
        )
        rest = op.Sub(op.Sub(scaled, along_one), op.Mul(normalized, along_x))
        grad_input = op.Mul(rest, rstd)
    if wanted[1]:
        grad_weight = _outer_sum(ctx, op.Mul(grad, normalized), grad_out, axes[0])
    if wanted[2]:
        grad_bias = _outer_sum(ctx, grad, grad_out, axes[0])
    return settled(ctx, grad_input, grad_weight, grad_bias)


# -- root-mean-square normalization ------------------------------------------------------------------------------


@lowering(aten._fused_rms_norm.default)
def fused_rms_norm(
    ctx: LoweringContext, input: ir.Value, normalized_shape: Sequence[int], weight: ir.Value | None, eps: float | None
) -> tuple[ir.Value | None, ...]:
    """_fused_rms_norm(Tensor input, int[] normalized_shape, Tensor? weight, float? eps) -> (Tensor, Tensor)"""
    op, dtype = ctx.op, float_dtype(ctx.dtype(input))
    if is_empty(ctx.sizes(input)):
        return _filled(ctx, 0, math.nan)
    read_saved_statistics(ctx, normalized_shape)
    axes = _inner_axes(ctx.rank(input), normalized_shape)
    x, w = ctx.cast(input, dtype), optional(ctx, weight, dtype)
    square = _mean(ctx, op.Mul(x, x), ctx.sizes(input), axes)
    rstd = inverse_root(ctx, square, torch.finfo(dtype).eps if eps is None else eps)
    y = op.Mul(x, rstd)
    return settled(ctx, y if w is None else op.Mul(y, w), rstd)


@lowering(aten._fused_rms_norm_backward.default)
def fused_rms_norm_backward(
    ctx: LoweringContext,
    grad_out: ir.Value,
    input: ir.Value,
    normalized_shape: Sequence[int],
    rstd: ir.Value,
    weight: ir.Value | None,
    output_mask: Sequence[bool],
) -> tuple[ir.Value | None, ...]:
    """_fused_rms_norm_backward(Tensor grad_out, Tensor input, int[] normalized_shape, Tensor rstd, Tensor? weight,
    bool[2] output_mask) -> (Tensor, Tensor)
    """
    op, dtype = ctx.op, float_dtype(ctx.dtype(input))
    if is_empty(ctx.sizes(input)):
        return _filled(ctx, 0, 0)
    axes = _inner_axes(ctx.rank(input), normalized_shape)
    wanted = [bool(mask) and index in ctx.used for index, mask in enumerate(output_mask)]
    grad, x, rstd = (ctx.cast(value, dtype) for value in (grad_out, input, rstd))
    w = optional(ctx, weight, dtype)
    normalized = op.Mul(x, rstd)
    grad_input = grad_weight = None
    if wanted[0]:
        scaled = grad if w is None else op.Mul(grad, w)
        along_x = _mean(ctx, op.Mul(scaled, normalized), ctx.sizes(input), axes)
        grad_input = op.Mul(op.Sub(scaled, op.Mul(normalized, along_x)), rstd)
    if wanted[1]:
        grad_weight = _outer_sum(ctx, op.Mul(grad, normalized), grad_out, axes[0])
    return settled(ctx, grad_input, grad_weight)


# -- group normalization -----------------------------------------------------------------------------------------


@lowering(aten.native_group_norm.default)
def native_group_norm(
    ctx: LoweringContext,
    input: ir.Value,
    weight: ir.Value | None,
    bias: ir.Value | None,
    N: Size,  # noqa: N803
    C: Size,  # noqa: N803
    HxW: Size,  # noqa: N803
    group: int,
    eps: float,
) -> tuple[ir.Value | None, ...]:
    """native_group_norm(Tensor input, Tensor? weight, Tensor? bias, SymInt N, SymInt C, SymInt HxW, int group,
    float eps) -> (Tensor, Tensor, Tensor)
    """
    op = ctx.op
    if is_empty(ctx.sizes(input)):
        return _filled(ctx, 0, 0, math.nan)
    read_saved_statistics(ctx, (C // group, HxW))
    dtype = float_dtype(ctx.dtype(input))
    w, b = optional(ctx, weight, dtype), optional(ctx, bias, dtype)
    x = op.Reshape(ctx.cast(input, dtype), [0, group, -1])
    sizes = (N, group, C // group * HxW)
    mean = average(ctx, x, sizes, [2], keepdim=True)
    centred = op.Sub(x, mean)
    rstd = inverse_root(ctx, average(ctx, op.Mul(centred, centred), sizes, [2], keepdim=True), eps)
    if w is None:
        y = op.Mul(centred, rstd)
    else:
        factor = op.Reshape(op.Mul(rstd, op.Reshape(w, [group, -1])), [0, -1, 1])
        y = op.Mul(op.Reshape(centred, ctx.shape([0, C, -1])), factor)
    if b is not None:
        y = op.Add(op.Reshape(y, ctx.shape([0, C, -1])), op.Reshape(b, [-1, 1]))
    return settled(ctx, ctx.reshape(y, ctx.sizes(input)), op.Squeeze(mean, [2]), op.Squeeze(rstd, [2]))


@lowering(aten.native_group_norm_backward.default)
def native_group_norm_backward(
    ctx: LoweringContext,
    grad_out: ir.Value,
    input: ir.Value,
    mean: ir.Value,
    rstd: ir.Value,
    weight: ir.Value | None,
    N: Size,  # noqa: N803
    C: Size,  # noqa: N803
    HxW: Size,  # noqa: N803
    group: int,
    output_mask: Sequence[bool],
) -> tuple[ir.Value | None, ...]:
    """native_group_norm_backward(Tensor grad_out, Tensor input, Tensor mean, Tensor rstd, Tensor? weight, SymInt N,
    SymInt C, SymInt HxW, int group, bool[3] output_mask) -> (Tensor, Tensor, Tensor)
    """
    op, dtype = ctx.op, float_dtype(ctx.dtype(input))
    if is_empty([N]):
        return _filled(ctx, 0, 0, 0)
    if is_empty([C, HxW]):
        raise ctx.refuse("gradient of group normalization over 0 positions")  # torch does not trace it either
    wanted = [bool(mask) and index in ctx.used for index, mask in enumerate(output_mask)]
    grad, x, mean, rstd = (ctx.cast(value, dtype) for value in (grad_out, input, mean, rstd))
    w = optional(ctx, weight, dtype)
    mean, rstd = op.Unsqueeze(mean, [2]), op.Unsqueeze(rstd, [2])
    per_group, per_channel = [0, group, -1], ctx.shape([0, C, -1])
    centred = op.Sub(op.Reshape(x, per_group), mean)
    grad = op.Reshape(grad, per_channel)
    # Per image and channel: the sums of grad and of grad * normalized, (N, group, C / group).
    ones, along = (
        op.Reshape(total(ctx, value, (N, C, HxW), [2], keepdim=False), per_group)
        for value in (grad, op.Mul(grad, op.Reshape(centred, per_channel)))
    )
    along = op.Mul(along, rstd)
    grad_input = grad_weight = grad_bias = None
    if wanted[0]:
        size = ctx.scalar(C // group * HxW, dtype)
        column = None if w is None else op.Reshape(w, [group, -1])
        along_one, along_x = (
            op.Div(op.ReduceSum(sums if column is None else op.Mul(sums, column), [2]), size) for sums in (ones, along)
        )
        factor = rstd if column is None else op.Reshape(op.Mul(rstd, column), [0, -1, 1])
        scaled = op.Reshape(op.Mul(grad if w is not None else op.Reshape(grad, per_group), factor), per_group)
        shift = op.Add(op.Mul(centred, op.Mul(op.Mul(rstd, rstd), along_x)), op.Mul(rstd, along_one))
        grad_input = ctx.reshape(op.Sub(scaled, shift), ctx.sizes(input))
    if wanted[1]:
        grad_weight = op.Reshape(op.ReduceSum(along, [0], keepdims=0), [-1])
    if wanted[2]:
        grad_bias = op.Reshape(op.ReduceSum(ones, [0], keepdims=0), [-1])
    return settled(ctx, grad_input, grad_weight, grad_bias)
