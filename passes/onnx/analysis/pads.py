"""Finds Pad nodes that put zeros before and behind a tensor along one axis."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ort_dynamo.passes.onnx.analysis.constants import constant_of, number_of

__all__ = ["Piece", "padded_axis", "piece_of"]


@dataclass(frozen=True)
class Piece:
    """The place of a padded tensor along the axis that is padded.

    Attributes:
        axis: the axis.
        start: the number of zeros before it.
        size: its own size.
        value: the tensor.
        shape: the shape of the padded tensor.
        reshape: the Reshape that the sum reads the padded tensor through; None if it reads the Pad.
    """

    axis: int
    start: int
    size: int
    value: ir.Value
    shape: tuple[int | ir.SymbolicDim, ...]
    reshape: ir.Node | None = None

    @property
    def total(self) -> int:
        """Its size with the zeros."""
        total = self.shape[self.axis]
        assert isinstance(total, int)
        return total


def padded_axis(pad: ir.Node) -> int | None:
    """Return the one axis along which a node pads with zeros, by a constant; None for other nodes."""
    if pad.domain or pad.attributes.get_string("mode", "constant") != "constant":
        return None
    _, pads, fill, axes = [*pad.inputs, None, None][:4]
    amounts = constant_of(pads)
    if amounts is None or axes is not None or min(amounts, default=0) < 0 or not (fill is None or _is_zero(fill)):
        return None
    rank = len(amounts) // 2
    padded = [axis for axis in range(rank) if amounts[axis] or amounts[axis + rank]]
    return padded[0] if len(padded) == 1 else None


def piece_of(pad: ir.Node) -> Piece | None:
    """Return the place of a tensor that is padded with zeros along one axis; None for other pads."""
    axis, value, amounts = padded_axis(pad), pad.inputs[0], constant_of(pad.inputs[1])
    if axis is None or amounts is None or value is None or value.shape is None:
        return None
    shape = tuple(value.shape)
    size = shape[axis]
    if not isinstance(size, int):
        return None
    total = amounts[axis] + size + amounts[axis + len(shape)]
    return Piece(axis, amounts[axis], size, value, (*shape[:axis], total, *shape[axis + 1 :]))


def _is_zero(value: ir.Value) -> bool:
    number = number_of(value)  # a complex one has no sign
    return isinstance(number, float | int) and number == 0 and not np.signbit(number)
