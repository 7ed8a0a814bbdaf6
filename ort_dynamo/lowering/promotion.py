"""The dtype in which an elementwise operator computes, by torch's own rules."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import torch
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND as KIND
from torch._prims_common import elementwise_dtypes

from ort_dynamo.lowering.context import LoweringContext, Number

__all__ = ["DEFAULT", "INT_TO_FLOAT", "KIND", "float_dtype", "promote"]

DEFAULT = KIND.DEFAULT
INT_TO_FLOAT = KIND.INT_TO_FLOAT


def promote(
    ctx: LoweringContext, *operands: ir.Value | Number, kind: KIND = KIND.DEFAULT
) -> tuple[list[ir.Value], torch.dtype]:
    """The operands as values of their common computation dtype, and that dtype.

    float16 and bfloat16 compute in float32, as torch's kernels do; the caller casts the result to `ctx.out.dtype`.
    """
    fakes: list[Any] = [ctx.fake(o) if isinstance(o, ir.Value) else o for o in operands]
    dtype, _ = elementwise_dtypes(*fakes, type_promotion_kind=kind)
    return [ctx.cast(o, dtype) if isinstance(o, ir.Value) else ctx.scalar(o, dtype) for o in operands], dtype


def float_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype torch accumulates a floating-point `dtype` in: float32 for the half-width ones."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
