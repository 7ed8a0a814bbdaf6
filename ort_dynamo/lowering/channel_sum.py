"""Sums that leave the channels of a batch."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from ort_dynamo.lowering.context import LoweringContext, Size
from ort_dynamo.lowering.total import total

__all__ = ["channel_sum"]


def channel_sum(ctx: LoweringContext, value: ir.Value, sizes: Sequence[Size]) -> ir.Value:
    """The sum of `value`, of shape `sizes` (N, C, …), over all of them but C: shape (C,).

    Places first, then the batch: one ReduceSum over all takes ONNX Runtime's CPU kernel up to five times as long.
    """
    if len(sizes) > 2:
        value = total(ctx, value, sizes, range(2, len(sizes)), keepdim=False)
    return total(ctx, value, sizes[:2], [0], keepdim=False)
