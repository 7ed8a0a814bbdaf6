"""Operators that mean something else in an older opset, though a node may fit the older schema.

From ONNX's changelog of its operators: opsets 12 to 23, where the difference is more than the types and attributes that
a schema tells. Corrected wordings of one meaning (Cast 13, Mod 13, Clip 13, reductions over nothing 13) are not in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import onnx_ir as ir

from ort_dynamo.passes.onnx.opsets.building import InexpressibleError

__all__ = ["NEWEST", "OLDEST", "check_meaning"]

OLDEST = 12
"""Changes before this opset are not in the table below."""

NEWEST = 23
"""Changes after this opset are not in it either."""


def check_meaning(node: ir.Node, since: int, version: int) -> None:
    """Raise InexpressibleError where a node that fits opset `version` would do something else there.

    Args:
        node: a node of ai.onnx.
        since: the opset that its schema is of.
        version: the older opset.
    """
    for changed, check in _CHANGES.get(node.op_type, {}).items():
        if version < changed <= since:
            check(node)


def _rank(value: ir.Value | None) -> int | None:
    return None if value is None or value.shape is None else len(value.shape)


def _needs_last_axis(node: ir.Node) -> None:
    axis, rank = node.attributes.get_int("axis", -1), _rank(node.inputs[0])
    if axis != -1 and (rank is None or axis != rank - 1):
        raise InexpressibleError(f"before opset 13 its axis {axis} stood for all axes from there on")


def _needs_scalar_scale(node: ir.Node) -> None:
    if _rank(node.inputs[1]) != 0:
        raise InexpressibleError("before opset 13 its scale was a scalar")


def _needs_wide_statistics(node: ir.Node) -> None:
    value = node.inputs[0]
    wide = value is not None and value.dtype in (ir.DataType.FLOAT, ir.DataType.DOUBLE)
    if node.attributes.get_int("training_mode", 0) and not wide:
        raise InexpressibleError("before opset 15 its statistics were not computed in float")


def _needs_whole_windows(node: ir.Node) -> None:
    if node.attributes.get_int("ceil_mode", 0):
        raise InexpressibleError("its windows beyond the padding (ceil_mode) were others")


def _needs_output_half_pixel(node: ir.Node) -> None:
    if node.attributes.get_string("coordinate_transformation_mode", "half_pixel") != "output_half_pixel":
        raise InexpressibleError("before opset 16 its coordinates were not shifted by half a pixel")


def _never(reason: str) -> Callable[[ir.Node], None]:
    def check(_: ir.Node) -> None:
        raise InexpressibleError(reason)

    return check


_CHANGES: Mapping[str, Mapping[int, Callable[[ir.Node], None]]] = {
    "AveragePool": {19: _needs_whole_windows, 22: _needs_whole_windows},
    "BatchNormalization": {15: _needs_wide_statistics},
    "DFT": {20: _never("before opset 20 its axis was counted otherwise where none was given")},
    "DequantizeLinear": {13: _needs_scalar_scale},
    "GroupNormalization": {21: _never("before opset 21 its scale and bias were per group")},
    "Hardmax": {13: _needs_last_axis},
    "LogSoftmax": {13: _needs_last_axis},
    "LpPool": {22: _needs_whole_windows},
    "MaxPool": {22: _needs_whole_windows},
    "QuantizeLinear": {13: _needs_scalar_scale},
    "RoiAlign": {16: _needs_output_half_pixel},
    "Softmax": {13: _needs_last_axis},
}
"""Operator -> opset that changed its meaning -> a check that raises if the change affects the node."""
