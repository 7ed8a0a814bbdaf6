"""Max, Min, Clip and Sign of int64, by comparisons.

Stock CPU kernels are wrong if the upper 32 bits of two int64 are equal (defect int64_order). Less, ReduceMax and ArgMax
are right.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import onnx_ir as ir

from ort_dynamo.lowering.op_builder import OpBuilder
from ort_dynamo.targets.target import Target

__all__ = ["Ordering", "ordering"]

Ordering = Callable[[OpBuilder, Sequence[ir.Value | None]], ir.Value]
"""ordering(op, inputs): the result of an ONNX operator for its inputs, without that operator."""


def ordering(target: Target, op_type: str, domain: str, inputs: Sequence[ir.Value | None]) -> Ordering | None:
    """Find the replacement of an operator whose kernel does not order int64 correctly; None where the kernel serves."""
    if not target.has_defect("int64_order") or domain or not inputs:
        return None
    first = inputs[0]
    return _ORDERINGS.get(op_type) if first is not None and first.dtype == ir.DataType.INT64 else None


def _greatest(op: OpBuilder, inputs: Sequence[ir.Value | None]) -> ir.Value:
    result, *rest = (value for value in inputs if value is not None)
    for value in rest:
        result = op.Where(op.Less(result, value), value, result)
    return op.Identity(result) if not rest else result


def _least(op: OpBuilder, inputs: Sequence[ir.Value | None]) -> ir.Value:
    result, *rest = (value for value in inputs if value is not None)
    for value in rest:
        result = op.Where(op.Less(value, result), value, result)
    return op.Identity(result) if not rest else result


def _clipped(op: OpBuilder, inputs: Sequence[ir.Value | None]) -> ir.Value:
    x, low, high = (*inputs, None, None)[:3]
    if _is_exact(low) and _is_exact(high):
        # Beyond 2^53 float64 is not exact, but monotonic, and values there become a bound.
        wide = [op.Cast(value, to=ir.DataType.DOUBLE) for value in (x, low, high)]
        result: ir.Value = op.Cast(op.Clip(*wide), to=ir.DataType.INT64)
        return result
    return _least(op, [_greatest(op, [x, low]), high])


def _is_exact(bound: ir.Value | None) -> bool:
    """Check whether a bound is a constant that float64 holds."""
    number = None if bound is None or bound.const_value is None else bound.const_value.numpy()
    return number is not None and bool(abs(int(number)) <= 1 << 53)


def _sign(op: OpBuilder, inputs: Sequence[ir.Value | None]) -> ir.Value:
    (x,) = inputs
    assert x is not None
    above, below = (op.Cast(found, to=ir.DataType.INT64) for found in (op.Less(0, x), op.Less(x, 0)))
    result: ir.Value = op.Sub(above, below)
    return result


_ORDERINGS: Mapping[str, Ordering] = {"Max": _greatest, "Min": _least, "Clip": _clipped, "Sign": _sign}
