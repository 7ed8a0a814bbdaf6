"""Sums over rows, for each column: the gradients of biases, and of the weights of normalizations."""

from __future__ import annotations

import onnx_ir as ir

from ort_dynamo.graph.fused_op import Size
from ort_dynamo.passes.onnx.analysis.constants import constant_of

__all__ = ["TILE_COLUMNS", "parts_of", "summed_axes"]

TILE_COLUMNS = 64
"""Columns of a program that need not hold whole rows."""

_PROGRAMS = 512
"""Programs that keep a device busy: four for each multiprocessor of an H100, with four loads in flight per thread."""

_FEW_PROGRAMS = 128
"""Programs where there are few rows: one for each multiprocessor."""

_LEAST, _MOST, _PARTS = 16, 128, 64
_LEAST_WHOLE = 4
_MOST_PARTS = 1024


def summed_axes(node: ir.Node) -> int | None:
    """Count the leading axes that a ReduceSum of float32 or float64 adds up; None if it sums other axes, or all."""
    if node.op_type != "ReduceSum" or node.domain or len(node.inputs) != 2:
        return None
    x, axes = node.inputs[0], constant_of(node.inputs[1])
    if x is None or x.shape is None or x.dtype not in (ir.DataType.FLOAT, ir.DataType.DOUBLE) or not axes:
        return None
    rank = len(x.shape)
    found = sorted(axis % rank for axis in axes) if rank else []
    return len(found) if found == list(range(len(found))) and len(found) < rank else None


def parts_of(rows: Size, columns: int, *, whole: bool) -> int:
    """Find the number of parts of the rows, each of which one program sums.

    It depends on these arguments alone, so results are the same on every device. A second kernel adds the partial sums.
    They are enough to keep a device busy, and few enough for one program to add. The parts are equal if there is a good
    divisor of the rows.

    Args:
        rows: the number of all rows.
        columns: the number of columns.
        whole: whether a program holds whole rows. Otherwise there are programs for each tile of columns, too.
    """
    tiles = 1 if whole else -(-columns // TILE_COLUMNS)
    enough = max(1, _PROGRAMS // tiles)
    if rows.symbols:
        return enough if whole else max(_PARTS, enough)
    count = rows.factor
    if count <= (_LEAST_WHOLE if whole else _MOST):
        return 1
    if whole:
        most = max(count // enough, min(2 * _LEAST_WHOLE, -(-count // _FEW_PROGRAMS)))
    else:
        most = max(2 * _LEAST, min(count // enough, max(_MOST, count // _PARTS)))
    least = min(most, _LEAST_WHOLE if whole else _LEAST)
    found = next((part for part in range(most, least - 1, -1) if count % part == 0), most)
    return -(-count // (found if count // found <= _MOST_PARTS else most))
