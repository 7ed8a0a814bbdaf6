"""Adds rows into a table at indices that may repeat."""

from __future__ import annotations

import onnx_ir as ir
import torch

from ort_dynamo.lowering.context import LoweringContext, Size

__all__ = ["add_rows", "row_places"]


def add_rows(ctx: LoweringContext, table: ir.Value, rows: ir.Value, values: ir.Value, width: Size) -> ir.Value:
    """Add each row of `values` to `table` at its index; the result is flat.

    ScatterElements adds the entries in order, so sums are deterministic. ScatterND(reduction="add") is three
    times as fast and a data race (defect scatter_nd_race); a matmul with the one-hot matrix is faster only for tables
    of a few hundred rows. One dimension instead of two takes 0.4 to 0.9 of the time.

    Args:
        table: rows of `width` entries, any shape.
        rows: int64 row indices, any shape; negative ones count from the end.
        values: a row for each index, any shape.
        width: the number of entries of a row.
    """
    op = ctx.op
    places = row_places(ctx, rows, width)
    return op.ScatterElements(op.Reshape(table, [-1]), places, op.Reshape(values, [-1]), axis=0, reduction="add")


def row_places(ctx: LoweringContext, rows: ir.Value, width: Size) -> ir.Value:
    """Give the indices of the elements of rows of `width` in a flat table, 1-D, int64; `rows` as above."""
    op = ctx.op
    zero, one = ctx.constant(0, torch.int64), ctx.constant(1, torch.int64)
    entries = ctx.scalar(width, torch.int64)
    starts = op.Mul(op.Reshape(rows, [-1, 1]), entries)
    return op.Reshape(op.Add(starts, op.Range(zero, entries, one)), [-1])
