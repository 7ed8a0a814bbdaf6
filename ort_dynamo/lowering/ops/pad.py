"""Padding and its gradient."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
import torch

from ort_dynamo.lowering.context import LoweringContext, Number, Size
from ort_dynamo.lowering.registry import lowering

aten = torch.ops.aten


def _pads(ctx: LoweringContext, rank: int, padding: Sequence[Size]) -> ir.Value:
    """torch's (last dimension first, begin and end side by side) as ONNX's (all begins, then all ends)."""
    missing = rank - len(padding) // 2
    begins = [0] * missing + [padding[i] for i in range(len(padding) - 2, -1, -2)]
    ends = [0] * missing + [padding[i + 1] for i in range(len(padding) - 2, -1, -2)]
    return ctx.shape([*begins, *ends])


@lowering(aten.constant_pad_nd.default)
def constant_pad_nd(ctx: LoweringContext, self: ir.Value, pad: Sequence[Size], value: Number = 0) -> ir.Value:
    """constant_pad_nd(Tensor self, SymInt[] pad, Scalar value=0) -> Tensor"""
    number = ctx.scalar(value, ctx.out.dtype)
    return ctx.op.Pad(self, _pads(ctx, ctx.rank(self), pad), number)  # type: ignore[no-any-return]


@lowering(aten.reflection_pad1d.default, aten.reflection_pad2d.default, aten.reflection_pad3d.default)
def reflection_pad(ctx: LoweringContext, self: ir.Value, padding: Sequence[Size]) -> ir.Value:
    """reflection_pad2d(Tensor self, SymInt[4] padding) -> Tensor"""
    return ctx.op.Pad(self, _pads(ctx, ctx.rank(self), padding), mode="reflect")  # type: ignore[no-any-return]


@lowering(aten.replication_pad1d.default, aten.replication_pad2d.default, aten.replication_pad3d.default)
def replication_pad(ctx: LoweringContext, self: ir.Value, padding: Sequence[Size]) -> ir.Value:
    """replication_pad2d(Tensor self, SymInt[4] padding) -> Tensor"""
    return ctx.op.Pad(self, _pads(ctx, ctx.rank(self), padding), mode="edge")  # type: ignore[no-any-return]
