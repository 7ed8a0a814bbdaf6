"""Changes of dtype, and copies that change nothing."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import torch

from ort_dynamo.lowering.context import LoweringContext, Number
from ort_dynamo.lowering.ops.memory.creation import filled
from ort_dynamo.lowering.registry import lowering
from ort_dynamo.lowering.symbols import same_sizes
from ort_dynamo.torch_internals.kernels.operators import aten, prims


@lowering(aten._to_copy.default, prims.convert_element_type.default)
def to_copy(ctx: LoweringContext, self: ir.Value | Number, *args: Any, **kwargs: Any) -> ir.Value:
    """_to_copy(Tensor self, *, ScalarType? dtype=None, Layout? layout=None, Device? device=None, ...) -> Tensor"""
    if not isinstance(self, ir.Value):  # torch.vmap hands over a scalar for a 0-d tensor
        return ctx.scalar(self, ctx.out.dtype)
    if ctx.out.device != ctx.fake(self).device:
        raise ctx.refuse(f"a copy from {ctx.fake(self).device} to {ctx.out.device}")
    return ctx.convert(self, ctx.out.dtype)


@lowering(
    aten.clone.default,
    aten.alias.default,
    aten.alias_copy.default,
    aten.detach.default,
    aten.detach_copy.default,
    aten.contiguous.default,
    aten.lift.default,
    aten.lift_fresh.default,
    aten.lift_fresh_copy.default,
    aten.positive.default,
)
def same(ctx: LoweringContext, self: ir.Value, **kwargs: Any) -> ir.Value:
    """clone(Tensor self, *, MemoryFormat? memory_format=None) -> Tensor"""
    return self


@lowering(aten.copy.default)
def copy(ctx: LoweringContext, self: ir.Value, src: ir.Value | Number, non_blocking: bool = False) -> ir.Value:
    """copy(Tensor self, Tensor src, bool non_blocking=False) -> Tensor"""
    if not isinstance(src, ir.Value):
        return filled(ctx, src)
    if ctx.out.device != ctx.fake(src).device:
        raise ctx.refuse(f"a copy from {ctx.fake(src).device} to {ctx.out.device}")
    value = ctx.convert(src, ctx.out.dtype)
    if same_sizes(ctx.sizes(src), ctx.out.shape):
        return value
    return ctx.op.Expand(value, ctx.shape(ctx.out.shape))


_BYTES = (torch.uint8, torch.int8)


@lowering(aten.view.dtype, aten.view_copy.dtype)
def view_dtype(ctx: LoweringContext, self: ir.Value, dtype: torch.dtype) -> ir.Value:
    """view.dtype(Tensor(a) self, ScalarType dtype) -> Tensor(a)"""
    own = ctx.dtype(self)
    if dtype == own:
        return self
    if dtype in _BYTES and own in (*_BYTES, torch.bool):
        return ctx.cast(self, dtype)  # wraps around
    raise ctx.refuse(f"ONNX cannot reinterpret the bytes of {own} as {dtype}")
