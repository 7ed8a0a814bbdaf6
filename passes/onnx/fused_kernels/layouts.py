"""Layouts: the loops of a kernel that run along each axis of a tensor, at one point of a group of nodes.

A layout lists the loops of each axis, outermost first. A broadcast axis and an axis of size 1 have none. Loops are
numbered from the outermost.
"""

from __future__ import annotations

from collections.abc import Sequence

from ort_dynamo.graph.fused_op import Size
from ort_dynamo.passes.onnx.fused_kernels.kernel import product

__all__ = [
    "CannotFuseError",
    "Layout",
    "SplitLoop",
    "broadcast_operand",
    "is_in_runs",
    "regrouped",
    "strides_of",
    "total",
]

Layout = tuple[tuple[int, ...], ...]

_ONE = Size()

_LEAST_RUN = 8
"""Minimum number of neighbouring elements that neighbouring points read: 16 bytes of a half type."""

_MOST_APART = 2
"""Maximum distance of two elements that neighbouring points read: at most twice the bytes are then read."""


class CannotFuseError(Exception):
    """The nodes cannot become one kernel; the message has the reason."""


class SplitLoop(Exception):  # noqa: N818 - it asks for another try
    """A loop has to be split in two, since an axis ends within it.

    Attributes:
        loop: the index of the loop.
        outer, inner: the trip counts of the two.
    """

    def __init__(self, loop: int, outer: Size, inner: Size) -> None:
        super().__init__(loop, outer, inner)
        self.loop: int = loop
        self.outer: Size = outer
        self.inner: Size = inner


def regrouped(loops: Sequence[Size], sequence: Sequence[int], shape: Sequence[Size]) -> Layout:
    """Return the layout of a contiguous tensor that these loops traverse in order.

    Args:
        loops: the trip count of each loop of the kernel.
        sequence: the loops that traverse the tensor, outermost first.
        shape: the shape of the tensor.

    Raises:
        SplitLoop: two axes share a loop.
        CannotFuseError: loops and axes have no common factors.
    """
    left, layout = list(sequence), []
    for size in shape:
        axis: list[int] = []
        while size != _ONE:
            if not left:
                raise CannotFuseError("the tensor has more elements than the loops visit")
            loop = left[0]
            if (rest := _quotient(size, loops[loop])) is not None:
                axis.append(left.pop(0))
                size = rest
            elif (inner := _quotient(loops[loop], size)) is not None:
                raise SplitLoop(loop, size, inner)
            else:
                raise CannotFuseError("the loops' trip counts do not divide the tensor's axes")
        layout.append(tuple(axis))
    if any(loops[loop] != _ONE for loop in left):
        raise CannotFuseError("the loops visit more points than the tensor has elements")
    return tuple(layout)


def _quotient(size: Size, by: Size) -> Size | None:
    """Divide one size by another; None if that is no size."""
    symbols = list(size.symbols)
    for symbol in by.symbols:
        if symbol not in symbols:
            return None
        symbols.remove(symbol)
    if not by.factor or size.factor % by.factor:
        return None
    return Size(size.factor // by.factor, tuple(symbols))


def broadcast_operand(layout: Layout, shape: Sequence[Size], operand: Sequence[Size]) -> Layout:
    """Return the layout of an operand of shape `operand` that broadcasts to a result of `shape` and `layout`.

    Raises:
        CannotFuseError: it may not broadcast.
    """
    missing = len(shape) - len(operand)
    found = []
    for axis, size in enumerate(operand):
        if size not in (_ONE, shape[missing + axis]):
            raise CannotFuseError("the size of an operand may differ from the size of the result")
        found.append(() if size == _ONE else layout[missing + axis])
    return tuple(found)


def strides_of(loops: Sequence[Size], layout: Layout, shape: Sequence[Size]) -> tuple[Size, ...]:
    """Return the stride of each loop in a contiguous tensor."""
    found = [Size(0)] * len(loops)
    for axis, along in enumerate(layout):
        inner = product(shape[axis + 1 :])
        for position, loop in enumerate(along):
            found[loop] = product([loops[later] for later in along[position + 1 :]]) * inner
    return tuple(found)


def total(first: Size, second: Size) -> Size:
    """Return the sum of two sizes of the same symbols."""
    if not first.factor:
        return second
    if first.symbols != second.symbols:
        raise CannotFuseError("an offset depends on several symbols")
    return Size(first.factor + second.factor, first.symbols)


def is_in_runs(loops: Sequence[Size], strides: Sequence[Size]) -> bool:
    """Check whether the innermost loops repeat one element, or walk along elements that are near in memory."""
    if not strides or not strides[-1].factor:
        return True
    apart = strides[-1] if not strides[-1].symbols and strides[-1].factor <= _MOST_APART else _ONE
    run = apart
    for count, stride in zip(reversed(loops), reversed(strides), strict=True):
        if stride != run:
            return run.factor >= _LEAST_RUN * apart.factor or bool(run.symbols)
        run *= count
    return True
