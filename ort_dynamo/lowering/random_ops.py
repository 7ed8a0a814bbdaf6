"""Random ops as ONNX operators, for saved models only; in a graph that runs here, torch runs random ops.

Each node has its own seed, made from its name. So equal random ops are not merged, and a model generates the same
numbers in every new session. They are not torch's.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import onnx_ir as ir
import torch

from ort_dynamo.graph.dtypes import onnx_dtype
from ort_dynamo.lowering.context import LoweringContext
from ort_dynamo.lowering.registry import Lowering
from ort_dynamo.torch_internals.kernels.operators import OpOverload, aten

__all__ = ["RANDOM_OPS"]


def _seed(ctx: LoweringContext) -> int:
    return zlib.crc32(ctx.node.name.encode()) & 0xFFFFFF  # a float holds it, too


def _native_dropout(ctx: LoweringContext, input: ir.Value, p: float, train: bool | None) -> Any:
    """native_dropout(Tensor input, float p, bool? train) -> (Tensor, Tensor)"""
    ratio = ctx.constant(float(p), torch.float32)
    mode = ctx.constant(train is not False, torch.bool)
    return ctx.op.Dropout(input, ratio, mode, seed=_seed(ctx), _outputs=2)


def _drawn(ctx: LoweringContext, op_type: str, **attributes: float) -> ir.Value:
    """Draw float32 numbers of the result's shape."""
    like = ctx.op.Expand(ctx.constant(0.0, torch.float32), ctx.shape(ctx.out.shape))
    return getattr(ctx.op, op_type)(like, **attributes, seed=float(_seed(ctx)), dtype=ir.DataType.FLOAT)


def _rand(ctx: LoweringContext, *args: Any, **kwargs: Any) -> ir.Value:
    """rand(SymInt[] size, ...) -> Tensor, and rand_like"""
    return _as_result(ctx, _drawn(ctx, "RandomUniformLike", low=0.0, high=1.0))


def _randn(ctx: LoweringContext, *args: Any, **kwargs: Any) -> ir.Value:
    """randn(SymInt[] size, ...) -> Tensor, and randn_like"""
    return _as_result(ctx, _drawn(ctx, "RandomNormalLike", mean=0.0, scale=1.0))


def _uniform(ctx: LoweringContext, self: ir.Value, low: float = 0.0, high: float = 1.0, **_: Any) -> ir.Value:
    """uniform(Tensor self, float from=0, float to=1, *, Generator? generator=None) -> Tensor"""
    return _as_result(ctx, _drawn(ctx, "RandomUniformLike", low=float(low), high=float(high)))


def _bernoulli(ctx: LoweringContext, self: ir.Value, p: float = 0.5, **_: Any) -> ir.Value:
    """bernoulli.p(Tensor self, float p, *, Generator? generator=None) -> Tensor"""
    numbers = _drawn(ctx, "RandomUniformLike", low=0.0, high=1.0)
    return _as_result(ctx, ctx.op.Less(numbers, ctx.constant(float(p), torch.float32)))


def _as_result(ctx: LoweringContext, value: ir.Value) -> ir.Value:
    return ctx.op.Cast(value, to=onnx_dtype(ctx.out.dtype))


RANDOM_OPS: Mapping[OpOverload, Lowering] = {
    aten.native_dropout.default: _native_dropout,
    aten.rand.default: _rand,
    aten.rand_like.default: _rand,
    aten.randn.default: _randn,
    aten.randn_like.default: _randn,
    aten.uniform.default: _uniform,
    aten.bernoulli.p: _bernoulli,
}
"""Overload -> its lowering for targets that run random ops themselves."""
