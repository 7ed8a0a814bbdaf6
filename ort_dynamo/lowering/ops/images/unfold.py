"""Gather the elements under a sliding window as columns, and sum columns into an image."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from ort_dynamo.lowering.context import LoweringContext, Size, is_empty
from ort_dynamo.lowering.ops.memory.creation import filled
from ort_dynamo.lowering.recipes.patches import fold, patches
from ort_dynamo.lowering.recipes.promotion import float_dtype
from ort_dynamo.lowering.recipes.windows import Sliding
from ort_dynamo.lowering.registry import lowering
from ort_dynamo.torch_internals.kernels.operators import aten


def _sliding(
    sizes: Sequence[Size],
    kernel_size: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> Sliding:
    kernel, dilation, padding, stride = (
        list(numbers) * (2 // len(numbers)) for numbers in (kernel_size, dilation, padding, stride)
    )
    lengths = zip(sizes, kernel, dilation, padding, stride, strict=True)
    out = tuple((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, d, p, s in lengths)
    return Sliding(kernel, stride, padding, dilation, tuple(sizes), out)


@lowering(aten.im2col.default)
def im2col(
    ctx: LoweringContext,
    self: ir.Value,
    kernel_size: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> ir.Value:
    """im2col(Tensor self, int[2] kernel_size, int[2] dilation, int[2] padding, int[2] stride) -> Tensor"""
    sizes = ctx.sizes(self)
    if is_empty(sizes):
        return filled(ctx, 0)
    image, leading = (self, sizes[:2]) if len(sizes) == 4 else (ctx.op.Unsqueeze(self, [0]), (1, sizes[0]))
    window = _sliding(sizes[-2:], kernel_size, dilation, padding, stride)
    return ctx.reshape(patches(ctx, image, leading, window), ctx.out.shape)


@lowering(aten.col2im.default)
def col2im(
    ctx: LoweringContext,
    self: ir.Value,
    output_size: Sequence[Size],
    kernel_size: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> ir.Value:
    """col2im(Tensor self, SymInt[2] output_size, int[2] kernel_size, int[2] dilation, int[2] padding, int[2] stride)
    -> Tensor
    """
    out = tuple(ctx.out.shape)
    if is_empty(out):
        return ctx.op.Expand(ctx.constant(0, ctx.out.dtype), ctx.shape(out))
    leading = out[:2] if len(out) == 4 else (1, out[0])
    window = _sliding(output_size, kernel_size, dilation, padding, stride)
    columns = ctx.reshape(ctx.cast(self, float_dtype(ctx.dtype(self))), [*leading, *window.kernel, *window.out])
    return ctx.cast(ctx.reshape(fold(ctx, columns, leading, window), out), ctx.out.dtype)
