"""Writes sums that leave the channels of a batch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import onnx_ir as ir

from ort_dynamo.lowering.context import LoweringContext, Size
from ort_dynamo.lowering.recipes.sums.accurate_sum import total

__all__ = ["channel_product_sum", "channel_sum"]

_LONGEST_DOT, _SHORTEST_DOT = 1 << 14, 1 << 9
"""Maximum and minimum length of one dot product of ONNX Runtime.

A longer one is less accurate. A shorter one is slower than a multiplication and a sum: a plane of 32 by 32 takes 0.6
of that time, one of 64 by 64 a half to a fifth.
"""


def channel_sum(ctx: LoweringContext, value: ir.Value, sizes: Sequence[Size]) -> ir.Value:
    """Sum `value`, of shape `sizes` (N, C, …), over all of them but C: shape (C,).

    Positions first, then the batch: one ReduceSum over all takes ONNX Runtime's CPU kernel up to five times as long.
    """
    if len(sizes) > 2:
        value = total(ctx, value, sizes, range(2, len(sizes)), keepdim=False)
    return total(ctx, value, sizes[:2], [0], keepdim=False)


def channel_product_sum(ctx: LoweringContext, a: ir.Value, b: ir.Value, sizes: Sequence[Size]) -> ir.Value:
    """Sum `a * b`, both of shape `sizes` (N, C, …), over all dimensions but C: shape (C,).

    For float32 on the CPU it uses dot products of planes, so `a * b` is never materialized.
    """
    plane = math.prod(sizes[2:])
    length = _dot_length(plane)
    dots = ctx.target.facts.prefers_dense_products and a.dtype == ir.DataType.FLOAT and ctx.has_fused_matmul(a)
    if length is None or not dots:
        return channel_sum(ctx, ctx.op.Mul(a, b), sizes)
    shape = [*sizes[:2], plane // length, 1, length]
    planes = ctx.contrib.FusedMatMul(ctx.reshape(a, shape), ctx.reshape(b, shape), transB=1)
    return channel_sum(ctx, planes, [*shape[:3], 1, 1])


def _dot_length(plane: Size) -> int | None:
    """Return the largest divisor of `plane` that is a good length for dot products."""
    if not isinstance(plane, int):
        return None
    fitting = (plane // count for count in range(1, plane // _SHORTEST_DOT + 1) if plane % count == 0)
    return next((length for length in fitting if length <= _LONGEST_DOT), None)
