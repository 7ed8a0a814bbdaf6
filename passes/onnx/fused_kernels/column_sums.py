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

_FEW_ROWS = 512
"""Rows of an image that one program adds: its bytes take as long as another launch."""

_LEAST, _MOST, _PARTS = 16, 128, 64
_LEAST_WHOLE = 4
_MOST_PARTS = 1024

_USUAL_BATCH = 8
"""Images that a batch of symbolic size is taken to have. With fewer, some multiprocessors are idle."""

_ONE = Size()


def summed_axes(node: ir.Node) -> range | None:
    """Return the axes that a ReduceSum of float32 or float64 adds up, one after another; None if the last is one.

    The axes behind are the columns. If there are axes before, such as that of the images of a batch, each of their
    indices has a sum of its own.
    """
    if node.op_type != "ReduceSum" or node.domain or len(node.inputs) != 2:
        return None
    x, axes = node.inputs[0], constant_of(node.inputs[1])
    if x is None or x.shape is None or x.dtype not in (ir.DataType.FLOAT, ir.DataType.DOUBLE) or not axes:
        return None
    rank = len(x.shape)
    found = sorted(axis % rank for axis in axes) if rank else []
    along = range(found[0], found[-1] + 1) if found else range(0)
    return along if found == list(along) and 0 < along.stop < rank else None


def parts_of(rows: Size, columns: int, *, whole: bool, batch: Size = _ONE) -> Size:
    """Find the number of parts of the rows, each of which one program sums.

    It depends on these arguments alone, so results are the same on every device. A second kernel adds the partial sums.
    They are enough to keep a device busy, and few enough for one program to add. The parts are equal if there is a good
    divisor of the rows.

    Args:
        rows: the number of all rows.
        columns: the number of columns.
        whole: whether a program holds whole rows. Otherwise there are programs for each tile of columns, too.
        batch: how many equal groups of rows have sums of their own; a part is of one of them. Its symbols are those of
            the rows.
    """
    tiles = 1 if whole else -(-columns // TILE_COLUMNS)
    enough = max(1, _PROGRAMS // tiles)
    count = rows.factor
    if batch != _ONE:
        least, few = (_LEAST_WHOLE, _LEAST) if whole else (_LEAST, _FEW_ROWS)
        groups = batch.factor * (_USUAL_BATCH if batch.symbols else 1)
        return batch * Size(_equal_parts(count // batch.factor, max(1, enough // groups), least, few))
    if rows.symbols:
        return Size(enough if whole else max(_PARTS, enough))
    if count <= (_LEAST_WHOLE if whole else _MOST):
        return _ONE
    if whole:
        most = max(count // enough, min(2 * _LEAST_WHOLE, -(-count // _FEW_PROGRAMS)))
    else:
        most = max(2 * _LEAST, min(count // enough, max(_MOST, count // _PARTS)))
    least = min(most, _LEAST_WHOLE if whole else _LEAST)
    found = next((part for part in range(most, least - 1, -1) if count % part == 0), most)
    return Size(-(-count // (found if count // found <= _MOST_PARTS else most)))


def _equal_parts(rows: int, enough: int, least: int, few: int) -> int:
    """Return into how many equal parts to cut rows: the nearest number to `enough` that divides them.

    Args:
        rows: the number of rows.
        enough: the number of parts that keeps a device busy.
        least: rows of a part, at least, if there is such a divisor.
        few: rows that are one part.
    """
    if rows <= few:
        return 1
    most = max(2 * least, rows // enough)
    below, above = range(min(rows, most), least - 1, -1), range(most + 1, rows + 1)
    found = next((part for part in (*below, *above) if rows % part == 0), rows)
    return rows // found
