"""Batch normalization and its gradient; instance normalization reaches us as batch normalization, too."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir
import torch

from ort_dynamo.graph.dtypes import onnx_dtype
from ort_dynamo.lowering.context import LoweringContext, Size, is_empty
from ort_dynamo.lowering.ops.layers.normalization import inverse_root, optional, read_saved_statistics, settled
from ort_dynamo.lowering.recipes.promotion import float_dtype
from ort_dynamo.lowering.recipes.sums.channel_sum import channel_product_sum, channel_sum
from ort_dynamo.lowering.registry import lowering, register
from ort_dynamo.lowering.symbols import same_sizes
from ort_dynamo.torch_internals.kernels.operators import aten


@dataclass(frozen=True)
class _Normalized:
    """The results of a batch normalization, in the accumulation dtype; all but `y` of shape (C,)."""

    y: ir.Value
    mean: ir.Value
    inverse_std: ir.Value
    running_mean: ir.Value | None
    running_var: ir.Value | None


def _count(sizes: Sequence[Size]) -> Size:
    """Elements per channel."""
    count = sizes[0]
    for size in sizes[2:]:
        count = count * size
    return count


def _across(ctx: LoweringContext, value: ir.Value, rank: int) -> ir.Value:
    """`value` (C,) in a shape that broadcasts against (N, C, …)."""
    return ctx.op.Reshape(value, [-1, *[1] * (rank - 2)]) if rank > 2 else value


def _check_not_empty(sizes: Sequence[Size]) -> None:
    if is_empty(sizes):
        raise LoweringContext.refuse("batch normalization of an empty tensor")


# -- forward -----------------------------------------------------------------------------------------------------


def _by_batch(
    ctx: LoweringContext,
    input: ir.Value,
    weight: ir.Value | None,
    bias: ir.Value | None,
    running: tuple[ir.Value, ir.Value] | None,
    momentum: float,
    eps: float,
) -> _Normalized:
    """With the statistics of the batch, which also move the running ones."""
    op, dtype, rank = ctx.op, float_dtype(ctx.dtype(input)), ctx.rank(input)
    _check_not_empty(ctx.sizes(input))
    read_saved_statistics(ctx, (ctx.sizes(input)[0], *ctx.sizes(input)[2:]))
    x, w, b = ctx.cast(input, dtype), optional(ctx, weight, dtype), optional(ctx, bias, dtype)
    if _has_training_kernel(ctx, ctx.sizes(input)) and dtype != torch.float64:  # whose epsilon an attribute cannot hold
        y, mean, variance = _by_one_kernel(ctx, x, w, b, rank, eps)
        inverse_std = inverse_root(ctx, variance, eps)
    else:
        sizes = ctx.sizes(input)
        count = ctx.scalar(_count(sizes), dtype)
        mean = op.Div(channel_sum(ctx, x, sizes), count)
        centred = op.Sub(x, _across(ctx, mean, rank))
        variance = op.Div(channel_product_sum(ctx, centred, centred, sizes), count)
        inverse_std = inverse_root(ctx, variance, eps)
        y = op.Mul(centred, _across(ctx, inverse_std if w is None else op.Mul(inverse_std, w), rank))
        if b is not None:
            y = op.Add(y, _across(ctx, b, rank))
    if running is None:
        return _Normalized(y, mean, inverse_std, None, None)
    running_mean, running_var = (ctx.cast(value, dtype) for value in running)
    unbiased = op.Mul(variance, _bessel(ctx, _count(ctx.sizes(input)), dtype))
    return _Normalized(
        y, mean, inverse_std, _moved(ctx, running_mean, mean, momentum), _moved(ctx, running_var, unbiased, momentum)
    )


_ACCURATE_PLANE = 1 << 14
"""Positions of an image up to which the kernel's sums, one position after another, are accurate.

Of rectified noise its result is off by 1e-6 at 28 by 28, 2e-5 at 112 by 112, 2e-4 at 224 by 224 and
8e-4 at 512 by 512.
"""


def _has_training_kernel(ctx: LoweringContext, sizes: Sequence[Size]) -> bool:
    plane = math.prod(sizes[2:])
    short = isinstance(plane, int) and plane <= _ACCURATE_PLANE
    return len(sizes) > 2 and short and ctx.target.facts.normalizes_batches


def _by_one_kernel(
    ctx: LoweringContext, x: ir.Value, w: ir.Value | None, b: ir.Value | None, rank: int, eps: float
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """y, mean and biased variance from BatchNormalization's training mode.

    Its running statistics with momentum 0 are the batch's own. It takes a third of torch's time and half to an
    eighth of the time of separate nodes.
    """
    op = ctx.op
    assert x.dtype is not None
    # The kernel multiplies the running statistics by the momentum 0 and overwrites them, even if other nodes read them.
    # They must be finite, and two separate values that nothing else reads and no pass merges.
    corner = op.Reshape(op.Slice(x, [0] * (rank - 1), [1] * (rank - 1), [0, *range(2, rank)]), [-1])
    scratch = [op.Cast(op.IsNaN(corner), to=x.dtype), op.Cast(op.IsInf(corner), to=x.dtype)]
    w = op.Expand(ctx.builder.constant(1.0, x.dtype), op.Shape(corner)) if w is None else w
    b = op.Expand(ctx.builder.constant(0.0, x.dtype), op.Shape(corner)) if b is None else b
    y, mean, variance = op.BatchNormalization(x, w, b, *scratch, epsilon=eps, momentum=0.0, training_mode=1, _outputs=3)
    return y, mean, variance


def _bessel(ctx: LoweringContext, count: Size, dtype: torch.dtype) -> ir.Value:
    """n / (n - 1)."""
    if isinstance(count, int):
        return ctx.constant(count / (count - 1) if count > 1 else math.nan, dtype)
    number = ctx.scalar(count, dtype)
    return ctx.op.Div(number, ctx.op.Sub(number, 1.0))


def _moved(ctx: LoweringContext, running: ir.Value, batch: ir.Value, momentum: float) -> ir.Value:
    return ctx.op.Add(ctx.op.Mul(batch, momentum), ctx.op.Mul(running, 1.0 - momentum))


def _by_running(
    ctx: LoweringContext,
    input: ir.Value,
    weight: ir.Value | None,
    bias: ir.Value | None,
    running: tuple[ir.Value, ir.Value],
    eps: float,
) -> _Normalized:
    """Normalize by the running statistics, which do not change."""
    op, dtype, rank = ctx.op, float_dtype(ctx.dtype(input)), ctx.rank(input)
    _check_not_empty(ctx.sizes(input))
    x, w, b = ctx.cast(input, dtype), optional(ctx, weight, dtype), optional(ctx, bias, dtype)
    mean, variance = (ctx.cast(value, dtype) for value in running)
    inverse_std = inverse_root(ctx, variance, eps)
    if rank > 2 and w is not None and b is not None and dtype != torch.float64:
        y = op.BatchNormalization(x, w, b, mean, variance, epsilon=eps)
    else:
        y = op.Sub(x, _across(ctx, mean, rank))
        y = op.Mul(y, _across(ctx, inverse_std if w is None else op.Mul(inverse_std, w), rank))
        if b is not None:
            y = op.Add(y, _across(ctx, b, rank))
    return _Normalized(y, mean, inverse_std, mean, variance)


def _normalize(
    ctx: LoweringContext,
    input: ir.Value,
    weight: ir.Value | None,
    bias: ir.Value | None,
    running_mean: ir.Value | None,
    running_var: ir.Value | None,
    training: bool,
    momentum: float,
    eps: float,
) -> _Normalized:
    running = None if running_mean is None or running_var is None else (running_mean, running_var)
    if training:
        return _by_batch(ctx, input, weight, bias, running, momentum, eps)
    if running is None:
        raise ctx.refuse("batch normalization without statistics")
    return _by_running(ctx, input, weight, bias, running, eps)


def _saved(ctx: LoweringContext, found: _Normalized, index: int) -> tuple[ir.Value, ir.Value]:
    """Mean and inverse deviation as outputs `index` and the next; torch's CPU kernels save nothing in inference."""
    if not same_sizes(ctx.out[index].shape, (0,)):
        return found.mean, found.inverse_std
    empty = ctx.builder.constant([], onnx_dtype(ctx.out[index].dtype))
    return empty, empty


@lowering(aten._native_batch_norm_legit_functional.default)
def batch_norm_functional(
    ctx: LoweringContext,
    input: ir.Value,
    weight: ir.Value | None,
    bias: ir.Value | None,
    running_mean: ir.Value,
    running_var: ir.Value,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[ir.Value | None, ...]:
    """_native_batch_norm_legit_functional(Tensor input, Tensor? weight, Tensor? bias, Tensor running_mean,
    Tensor running_var, bool training, float momentum, float eps)
    -> (Tensor, Tensor, Tensor, Tensor running_mean_out, Tensor running_var_out)
    """
    found = _normalize(ctx, input, weight, bias, running_mean, running_var, training, momentum, eps)
    return settled(ctx, found.y, *_saved(ctx, found, 1), found.running_mean, found.running_var)


@lowering(aten._native_batch_norm_legit.no_stats)
def batch_norm_without_statistics(
    ctx: LoweringContext,
    input: ir.Value,
    weight: ir.Value | None,
    bias: ir.Value | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[ir.Value | None, ...]:
    """_native_batch_norm_legit.no_stats(Tensor input, Tensor? weight, Tensor? bias, bool training, float momentum,
    float eps) -> (Tensor, Tensor, Tensor)
    """
    found = _normalize(ctx, input, weight, bias, None, None, training, momentum, eps)
    return settled(ctx, found.y, *_saved(ctx, found, 1))


@lowering(aten._native_batch_norm_legit_no_training.default)
def batch_norm_inference(
    ctx: LoweringContext,
    input: ir.Value,
    weight: ir.Value | None,
    bias: ir.Value | None,
    running_mean: ir.Value,
    running_var: ir.Value,
    momentum: float,
    eps: float,
) -> tuple[ir.Value | None, ...]:
    """_native_batch_norm_legit_no_training(Tensor input, Tensor? weight, Tensor? bias, Tensor running_mean,
    Tensor running_var, float momentum, float eps) -> (Tensor, Tensor, Tensor)
    """
    found = _normalize(ctx, input, weight, bias, running_mean, running_var, False, momentum, eps)
    return settled(ctx, found.y, *_saved(ctx, found, 1))


@lowering(aten.native_batch_norm.default)
def native_batch_norm(
    ctx: LoweringContext,
    input: ir.Value,
    weight: ir.Value | None,
    bias: ir.Value | None,
    running_mean: ir.Value | None,
    running_var: ir.Value | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[ir.Value | None, ...]:
    """native_batch_norm(Tensor input, Tensor? weight, Tensor? bias, Tensor? running_mean, Tensor? running_var,
    bool training, float momentum, float eps) -> (Tensor, Tensor, Tensor)
    """
    if training and running_mean is not None:
        raise ctx.refuse("it changes its running statistics in place")
    found = _normalize(ctx, input, weight, bias, running_mean, running_var, training, momentum, eps)
    return settled(ctx, found.y, *_saved(ctx, found, 1))


@lowering(aten._batch_norm_with_update_functional.default)
def batch_norm_with_update(
    ctx: LoweringContext,
    input: ir.Value,
    weight: ir.Value | None,
    bias: ir.Value | None,
    running_mean: ir.Value,
    running_var: ir.Value,
    momentum: float,
    eps: float,
) -> tuple[ir.Value | None, ...]:
    """_batch_norm_with_update_functional(Tensor input, Tensor? weight, Tensor? bias, Tensor running_mean,
    Tensor running_var, float momentum, float eps)
    -> (Tensor, Tensor, Tensor, Tensor, Tensor running_mean_out, Tensor running_var_out)
    """
    found = _normalize(ctx, input, weight, bias, running_mean, running_var, True, momentum, eps)
    return settled(ctx, found.y, *_saved(ctx, found, 1), _reserve(ctx), found.running_mean, found.running_var)


@lowering(aten._batch_norm_no_update.default)
def batch_norm_no_update(
    ctx: LoweringContext,
    input: ir.Value,
    weight: ir.Value | None,
    bias: ir.Value | None,
    running_mean: ir.Value | None,
    running_var: ir.Value | None,
    momentum: float,
    eps: float,
) -> tuple[ir.Value | None, ...]:
    """_batch_norm_no_update(Tensor input, Tensor? weight, Tensor? bias, Tensor? running_mean, Tensor? running_var,
    float momentum, float eps) -> (Tensor, Tensor, Tensor, Tensor)
    """
    found = _normalize(ctx, input, weight, bias, running_mean, running_var, False, momentum, eps)
    return settled(ctx, found.y, *_saved(ctx, found, 1), _reserve(ctx))


def _reserve(ctx: LoweringContext) -> ir.Value:
    """cuDNN's scratch space, which nothing here needs."""
    return ctx.builder.constant([], onnx_dtype(ctx.out[3].dtype))


# -- gradient ----------------------------------------------------------------------------------------------------


@lowering(aten.native_batch_norm_backward.default)
def native_batch_norm_backward(
    ctx: LoweringContext,
    grad_out: ir.Value,
    input: ir.Value,
    weight: ir.Value | None,
    running_mean: ir.Value | None,
    running_var: ir.Value | None,
    save_mean: ir.Value | None,
    save_invstd: ir.Value | None,
    train: bool,
    eps: float,
    output_mask: Sequence[bool],
) -> tuple[ir.Value | None, ...]:
    """native_batch_norm_backward(Tensor grad_out, Tensor input, Tensor? weight, Tensor? running_mean,
    Tensor? running_var, Tensor? save_mean, Tensor? save_invstd, bool train, float eps, bool[3] output_mask)
    -> (Tensor, Tensor, Tensor)
    """
    op, dtype, rank = ctx.op, float_dtype(ctx.dtype(input)), ctx.rank(input)
    _check_not_empty(ctx.sizes(input))
    across = functools.partial(_across, ctx, rank=rank)
    wanted = [bool(mask) and index in ctx.used for index, mask in enumerate(output_mask)]
    grad, x, w = ctx.cast(grad_out, dtype), ctx.cast(input, dtype), optional(ctx, weight, dtype)
    mean, inverse_std = (save_mean, save_invstd) if train else (running_mean, running_var)
    if mean is None or inverse_std is None:
        raise ctx.refuse("batch normalization without statistics")
    mean, inverse_std = ctx.cast(mean, dtype), ctx.cast(inverse_std, dtype)
    if not train:
        inverse_std = inverse_root(ctx, inverse_std, eps)
    factor = inverse_std if w is None else op.Mul(inverse_std, w)
    grad_bias = channel_sum(ctx, grad, ctx.sizes(input)) if wanted[2] or (wanted[0] and train) else None
    grad_weight = centred = None
    if wanted[1] or (wanted[0] and train):
        centred = op.Sub(x, across(mean))
        grad_weight = op.Mul(channel_product_sum(ctx, grad, centred, ctx.sizes(input)), inverse_std)
    grad_input = None
    if wanted[0] and not train:
        grad_input = op.Mul(grad, across(factor))
    elif wanted[0]:
        count = ctx.scalar(_count(ctx.sizes(input)), dtype)
        along_x = op.Mul(centred, across(op.Div(op.Mul(grad_weight, inverse_std), count)))
        rest = op.Sub(op.Sub(grad, along_x), across(op.Div(grad_bias, count)))
        grad_input = op.Mul(rest, across(factor))
    return settled(ctx, grad_input, grad_weight if wanted[1] else None, grad_bias if wanted[2] else None)


def _batch_norm_backward(
    ctx: LoweringContext,
    grad_out: ir.Value,
    input: ir.Value,
    weight: ir.Value,
    running_mean: ir.Value | None,
    running_var: ir.Value | None,
    save_mean: ir.Value | None,
    save_var: ir.Value | None,
    update: bool,
    eps: float,
    output_mask: Sequence[bool],
    reserve: ir.Value,
) -> tuple[ir.Value | None, ...]:
    """batch_norm_backward(Tensor grad_out, Tensor input, Tensor weight, Tensor? running_mean, Tensor? running_var,
    Tensor? save_mean, Tensor? save_var, bool update, float eps, bool[3] output_mask, Tensor reserve)
    -> (Tensor, Tensor, Tensor)
    """
    del reserve
    return native_batch_norm_backward(
        ctx, grad_out, input, weight, running_mean, running_var, save_mean, save_var, update, eps, output_mask
    )


register(aten.batch_norm_backward.default, _batch_norm_backward)
