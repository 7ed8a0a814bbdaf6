"""Writes Pad of integers where its kernels take none of their dtypes, as on CUDA."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx_ir as ir

from ort_dynamo.lowering.op_builder import OpBuilder
from ort_dynamo.targets.target import Target

__all__ = ["padding"]

_EXACT: Mapping[ir.DataType, ir.DataType] = {
    ir.DataType.INT8: ir.DataType.FLOAT,
    ir.DataType.UINT8: ir.DataType.FLOAT,
    ir.DataType.INT16: ir.DataType.FLOAT,
    ir.DataType.INT32: ir.DataType.DOUBLE,
    ir.DataType.INT64: ir.DataType.DOUBLE,
}
"""Integer dtype -> float dtype that holds all its values; for int64, each 32-bit half."""

_HALF = 1 << 32

Values = Sequence[ir.Value | None]


def padding(
    target: Target, op_type: str, domain: str, inputs: Values, attributes: Mapping[str, Any]
) -> Callable[[OpBuilder, Values], ir.Value] | None:
    """Give the nodes that replace a Pad of integers without a kernel; None if there is a kernel.

    A constant pad of int64 with constant widths becomes a concatenation along each axis. Other pads are computed on
    floats: an integer of up to 32 bits is one float, an int64 two.
    """
    if op_type != "Pad" or domain or inputs[0] is None:
        return None
    dtype = inputs[0].dtype
    if dtype is None or dtype not in _EXACT:
        return None
    if any(target.takes("Pad", "", {"T": one}) for one in (dtype, ir.DataType.INT64)):
        return None
    if dtype != ir.DataType.INT64:
        return functools.partial(_as_floats, attributes)
    is_plain = attributes.get("mode", "constant") == "constant" and len(inputs) < 4
    return _joined if is_plain and _integers(inputs[1]) is not None else functools.partial(_by_halves, attributes)


def _integers(value: ir.Value | None) -> list[int] | None:
    """Give the elements of a constant."""
    return None if value is None or value.const_value is None else [int(one) for one in value.const_value.numpy()]


def _joined(op: OpBuilder, inputs: Values) -> ir.Value:
    x, widths = inputs[0], _integers(inputs[1])
    assert x is not None
    assert widths is not None
    fill = _fill(op, inputs, ir.DataType.INT64)
    rank = len(widths) // 2
    for axis, (before, after) in enumerate(zip(widths[:rank], widths[rank:], strict=True)):
        if before < 0 or after < 0:
            x = op.Slice(x, [max(-before, 0)], [after if after < 0 else sys.maxsize], [axis])
        parts = [x]
        for place, width in ((0, before), (1, after)):
            if width > 0:
                block = op.Expand(fill, _with_size(op, x, axis, rank, width))
                parts.insert(0 if place == 0 else len(parts), block)
        x = op.Concat(*parts, axis=axis) if len(parts) > 1 else x
    return x if x is not inputs[0] else op.Identity(x)


def _with_size(op: OpBuilder, x: ir.Value, axis: int, rank: int, width: int) -> ir.Value:
    """Return the sizes of `x` with another one along an axis."""
    around = [op.Shape(x, end=axis)] if axis else []
    around += [op.builder.promote([width], ir.DataType.INT64)]
    around += [op.Shape(x, start=axis + 1)] if axis + 1 < rank else []
    return op.Concat(*around, axis=0) if len(around) > 1 else around[0]


def _as_floats(attributes: Mapping[str, Any], op: OpBuilder, inputs: Values) -> ir.Value:
    x, pads, _, *axes = (*inputs, None)[: max(len(inputs), 3)]
    assert x is not None
    assert x.dtype is not None
    wide = _EXACT[x.dtype]
    fill = op.Cast(_fill(op, inputs, x.dtype), to=wide)
    padded: ir.Value = op.Cast(op.Pad(op.Cast(x, to=wide), pads, fill, *axes, **attributes), to=x.dtype)
    return padded


def _by_halves(attributes: Mapping[str, Any], op: OpBuilder, inputs: Values) -> ir.Value:
    x, pads, _, *axes = (*inputs, None)[: max(len(inputs), 3)]
    halves = []
    for one in (x, _fill(op, inputs, ir.DataType.INT64)):
        high = op.Div(one, _HALF)
        halves.append([op.Cast(part, to=ir.DataType.DOUBLE) for part in (high, op.Sub(one, op.Mul(high, _HALF)))])
    padded = [op.Pad(part, pads, fill, *axes, **attributes) for part, fill in zip(*halves, strict=True)]
    high, low = (op.Cast(part, to=ir.DataType.INT64) for part in padded)
    result: ir.Value = op.Add(op.Mul(high, _HALF), low)
    return result


def _fill(op: OpBuilder, inputs: Values, dtype: ir.DataType) -> ir.Value:
    """Return the fill value of a constant pad; 0 by default."""
    given = inputs[2] if len(inputs) > 2 else None
    return op.builder.promote(0, dtype) if given is None else given
