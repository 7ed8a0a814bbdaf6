"""Slices, splits and concatenations of pieces of a tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction

import onnx_ir as ir

from ort_dynamo.graph.fused_op import Size
from ort_dynamo.passes.onnx.analysis.constants import constant_of
from ort_dynamo.passes.onnx.fused_kernels.layouts import CannotFuseError

__all__ = ["MOST_PIECES", "entries_of", "equal_pieces", "part_of", "several_pieces", "share_of"]

ShapeOf = Callable[[ir.Value], Sequence[Size]]

MOST_PIECES = 8
"""Maximum number of equal pieces of which the unequal inputs of a Concat consist: a kernel has the steps of each."""


def entries_of(node: ir.Node, before: Sequence[Size], after: Sequence[Size]) -> tuple[int, int, int] | None:
    """Return the axis, the first entry and the step of the entries that a Slice with a step or a Gather reads.

    A Gather reads one entry, so its step is the size of the axis. None for other nodes, and for slices without a step.

    Raises:
        CannotFuseError: the entries are not known, or the axis does not consist of as many steps.
    """
    if node.op_type == "Gather":
        axis = node.attributes.get_int("axis", 0) % len(before)
        first, step, whole = _first(constant_of(node.inputs[1]), before[axis]), before[axis].factor, before[axis]
    elif node.op_type == "Slice" and (constant_of([*node.inputs, None, None][4]) or [1]) != [1]:
        starts, axes, steps = (constant_of(node.inputs[index]) for index in (1, 3, 4))
        axis, step = (axes or [0])[0] % len(before), (steps or [0])[0]
        first = _first(starts, before[axis]) if axes and len(axes) == 1 else None
        whole = Size(step) * after[axis]
    else:
        return None
    if first is None or not 0 <= first < step or whole != before[axis] or (node.op_type == "Gather" and whole.symbols):
        raise CannotFuseError("a Slice with a step or a Gather reads no entry of each of several equal pieces")
    return axis, first, step


def _first(starts: Sequence[int] | None, size: Size) -> int | None:
    """Return the one number of a constant, counted from the front; None if that is not known."""
    if starts is None or len(starts) != 1 or (starts[0] < 0 and size.symbols):
        return None
    return starts[0] + size.factor if starts[0] < 0 else starts[0]


def part_of(node: ir.Node, value: ir.Value, before: Sequence[Size], after: Sequence[Size]) -> tuple[int, int] | None:
    """Return the axis and the first element of the part that a Slice, without a step, or a Split reads; else None.

    Raises:
        CannotFuseError: the part is not known.
    """
    if node.op_type == "Split":
        axis = node.attributes.get_int("axis", 0) % len(before)
        sizes = [1 if one.shape is None else one.shape[axis] for one in node.outputs]
        number = node.outputs.index(value)
        if len(set(sizes)) > 1 or before[axis] != Size(len(sizes)) * after[axis] or after[axis].symbols:
            raise CannotFuseError("a Split has pieces of unequal or symbolic sizes")
        return axis, number * after[axis].factor
    if node.op_type != "Slice":
        return None
    starts, ends, axes = (constant_of(one) for one in [*node.inputs[1:], None][:3])
    if not starts or not ends or len(starts) != 1 or (len(node.inputs) > 3 and not axes):
        raise CannotFuseError("a Slice has several axes, or bounds that are not constants")
    axis = (axes or [0])[0] % len(before)
    size, found = before[axis], after[axis]
    if size.symbols or found.symbols or not found.factor:
        raise CannotFuseError("a Slice has a symbolic size, or no elements")
    start = _first(starts, size)
    assert start is not None
    return axis, min(max(start, 0), size.factor)


def equal_pieces(concat: ir.Node, shape_of: ShapeOf) -> tuple[int, Size, list[tuple[ir.Value, int]]]:
    """Return the axis of a Concat, the size of equal pieces of its inputs, and how many each input has.

    Raises:
        CannotFuseError: inputs of different sizes are symbolic or empty, or have more than MOST_PIECES.
    """
    inputs = [value for value in concat.inputs if value is not None]
    axis = concat.attributes.get_int("axis", 0) % len(shape_of(inputs[0]))
    sizes = [shape_of(value)[axis] for value in inputs]
    if len(set(sizes)) == 1:
        return axis, sizes[0], [(value, 1) for value in inputs]
    if any(size.symbols or not size.factor for size in sizes):
        raise CannotFuseError("the inputs of a Concat differ in size, and one is symbolic or empty")
    size = math.gcd(*(one.factor for one in sizes))
    counts = [one.factor // size for one in sizes]
    if sum(counts) > MOST_PIECES:
        raise CannotFuseError("the inputs of a Concat have no large equal pieces")
    return axis, Size(size), list(zip(inputs, counts, strict=True))


def share_of(concat: ir.Node, value: ir.Value, shape_of: ShapeOf) -> Fraction:
    """Return how much of the result of a Concat an input is; 0 if it has no equal pieces."""
    try:
        _, _, counts = equal_pieces(concat, shape_of)
    except CannotFuseError:
        return Fraction(0)
    return Fraction(next(count for one, count in counts if one is value), sum(count for _, count in counts))


def several_pieces(count: Size, start: int, before: int, after: int) -> int:
    """Return the size of the pieces where `after` elements, from `start` on, are `count` of the pieces of an axis.

    Args:
        count: how many equal pieces the part consists of.
        start: the first element of the part.
        before: the size of the axis.
        after: the size of the part.

    Raises:
        CannotFuseError: the axis or what is before the part does not consist of such pieces.
    """
    width = 0 if count.symbols or after % count.factor else after // count.factor
    if not width or before % width or start % width:
        raise CannotFuseError("a Slice is not one of several equal pieces, nor several of them")
    return width
