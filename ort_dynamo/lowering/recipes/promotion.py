"""Finds the dtype in which an elementwise operator computes, by torch's own rules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from ort_dynamo.graph.dtypes import onnx_dtype
from ort_dynamo.lowering.context import LoweringContext, Number
from ort_dynamo.torch_internals.kernels.promotion import KIND, elementwise_dtypes

__all__ = ["DEFAULT", "INT_TO_FLOAT", "KIND", "accumulator", "float_dtype", "narrowed", "promote", "rounded"]

DEFAULT = KIND.DEFAULT
INT_TO_FLOAT = KIND.INT_TO_FLOAT


def promote(
    ctx: LoweringContext,
    *operands: ir.Value | Number,
    kind: KIND = KIND.DEFAULT,
    wide_numbers: bool = False,
    stand_ins: Mapping[ir.Value, ir.Value] = {},
) -> tuple[list[ir.Value], torch.dtype]:
    """Cast the operands to the dtype that torch computes in, and return that dtype as well.

    float16 and bfloat16 compute in float32, as torch's kernels do; the caller casts the result to `ctx.out.dtype`.
    A scalar beside tensors of half dtypes is rounded to their dtype first, as in torch, and so is a tensor of no
    dimensions of a wider dtype. Multiplications and divisions do not round it: they pass `wide_numbers`. An operand
    with a stand-in decides the dtype, and the stand-in is cast.
    """
    fakes: list[Any] = [ctx.fake(o) if isinstance(o, ir.Value) else o for o in operands]
    dtype, result = elementwise_dtypes(*fakes, type_promotion_kind=kind)

    def settle(operand: ir.Value | Number) -> ir.Value:
        if isinstance(operand, ir.Value):
            value = operand if wide_numbers else narrowed(ctx, operand, result)
            return ctx.cast(stand_ins.get(operand, value), dtype)
        return ctx.scalar(operand if wide_numbers else rounded(operand, result), dtype)

    return [settle(operand) for operand in operands], dtype


def rounded(number: Number, dtype: torch.dtype) -> Number:
    """Round the scalar `number` to float16 or bfloat16; for other dtypes, return it unchanged."""
    if dtype in (torch.float16, torch.bfloat16) and isinstance(number, (int, float)):
        with np.errstate(over="ignore"):
            return float(np.asarray(number, onnx_dtype(dtype).numpy()))
    return number


def narrowed(ctx: LoweringContext, tensor: ir.Value, dtype: torch.dtype) -> ir.Value:
    """Round a tensor argument of a wider floating dtype to a half `dtype`; return it unchanged for any other."""
    if dtype not in (torch.float16, torch.bfloat16) or ctx.dtype(tensor) not in (torch.float32, torch.float64):
        return tensor
    return ctx.stand_in(ctx.convert(ctx.convert(tensor, dtype), torch.float32), tensor)


def float_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype torch accumulates a floating-point `dtype` in: float32 for the half-width ones."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums, products and extremes of `dtype` are computed: `float_dtype`; int32 for bool.

    A sum of bools that is cast back to bool is their logical or, as in torch.
    """
    return torch.int32 if dtype == torch.bool else float_dtype(dtype)
