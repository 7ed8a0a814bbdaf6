"""A kernel as a value: loops, and for each point of them the loads, computations and stores.

Nothing here knows torch, Triton or ONNX Runtime.

The loops are nested, the last one innermost. Every tensor is contiguous, and a point of the loops has one element in
each: its offset is the sum of the loops' counters by the strides of the access. A stride of 0 repeats an element.

With `columns`, the last loops are the columns of a row, and the others are rows. A `Reduce` gives one scalar per row,
which later steps read at all of its columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import onnx_ir as ir

from ort_dynamo.graph.fused_op import Size

__all__ = [
    "MOST_COLUMNS",
    "MOST_LONG",
    "WIDE",
    "Apply",
    "ColumnSum",
    "Constant",
    "Counter",
    "HostNumber",
    "Kernel",
    "Load",
    "Reduce",
    "Step",
    "Store",
    "Term",
    "Total",
    "product",
    "read_by",
    "terms",
]

WIDE = {ir.DataType.BFLOAT16: ir.DataType.FLOAT, ir.DataType.FLOAT16: ir.DataType.FLOAT}
"""Half type -> the type in which a kernel holds and computes it. Each result is rounded to the half type."""

_ZERO = Size(0)

MOST_COLUMNS = 16384
"""The longest row that one program holds in registers."""

MOST_LONG = 1 << 18
"""The longest row that one program reduces, block by block."""


@dataclass(frozen=True)
class Load:
    """An element of an input.

    Attributes:
        dtype: its element type.
        input: index of the input.
        strides: the stride of each loop, in elements.
        offset: the offset of the first element that is read.
        only: (loop, count): the element is read only if each of these loops is at its count. Else it is not used.
        places: (step, stride, count): an earlier step that is an index, and the stride of one index in elements. The
            element is read if each index is at least 0 and below its count; else it is 0.
    """

    dtype: ir.DataType
    input: int
    strides: tuple[Size, ...]
    offset: Size = _ZERO
    only: tuple[tuple[int, int], ...] = ()
    places: tuple[tuple[int, Size, Size], ...] = ()


@dataclass(frozen=True)
class Counter:
    """The index along an axis, which is the sum of the loops' counters by strides.

    Attributes:
        dtype: int64.
        strides: for each loop.
    """

    dtype: ir.DataType
    strides: tuple[Size, ...]


@dataclass(frozen=True)
class HostNumber:
    """A number that the session computes on the host, from sizes.

    Attributes:
        dtype: int64.
        value: the number.
    """

    dtype: ir.DataType
    value: Size


@dataclass(frozen=True)
class Constant:
    """A scalar."""

    dtype: ir.DataType
    value: float | int | bool


@dataclass(frozen=True)
class Apply:
    """A scalar function of earlier steps, rounded to its type.

    Attributes:
        dtype: the type of the result. "convert" gives its one argument that type; comparisons give bools; all others
            take arguments of this type, but for the condition of "where" and of "stop". The latter gives its second
            argument, and ends the kernel with an error where the first is true.
        function: a name that `triton_source.py` has a form of.
        arguments: indices of earlier steps.
    """

    dtype: ir.DataType
    function: str
    arguments: tuple[int, ...]


@dataclass(frozen=True)
class Reduce:
    """The sum or the maximum of a float32 or float64 step over the columns of each row; a maximum keeps NaN.

    Attributes:
        dtype: the type of the step and of the result.
        function: "sum" or "max".
        argument: index of an earlier step.
    """

    dtype: ir.DataType
    function: str
    argument: int


@dataclass(frozen=True)
class Total:
    """The sum of a float32 or float64 step over all rows, for each column, where one program adds up all rows.

    Steps that depend on it are computed once, after all rows are added. They have one value per column.

    Attributes:
        dtype: the type of the step and of the result.
        argument: index of an earlier step, which depends on no total.
    """

    dtype: ir.DataType
    argument: int


Step = Load | Counter | HostNumber | Constant | Apply | Reduce | Total


@dataclass(frozen=True)
class Store:
    """The contents of one output.

    Attributes:
        step: index of the step whose value it is.
        shape: its dimensions.
        strides: for each loop, in elements. Columns have strides of 0 where a row has one element.
    """

    step: int
    shape: tuple[Size, ...]
    strides: tuple[Size, ...]


@dataclass(frozen=True)
class ColumnSum:
    """An output that holds the sum of a step over the rows of each part of the rows, for each column.

    Attributes:
        step: index of a float32 or float64 step.
        shape: the groups of rows that have sums of their own, if any; the parts of each, if `in_parts`; the columns.
        in_parts: whether another kernel has to add the sums of parts.
    """

    step: int
    shape: tuple[Size, ...]
    in_parts: bool


@dataclass(frozen=True)
class Kernel:
    """Loops and the steps at each of their points.

    Attributes:
        loops: the trip count of each loop, outermost first.
        columns: the number of last loops that are the columns of a row; 0 if there are no rows.
        inputs: the element type of each input.
        steps: the steps in order; each refers to earlier ones.
        outputs: the element type of each output.
        stores: the store of each output.
        parts: the number of parts of the rows, for each of which a column sum has one result; 0 without such sums. Each
            part has ceil(rows / parts) consecutive rows, but the last ones, which have fewer, or none. A symbolic
            number of parts divides the number of rows.
        symbols: for each symbol, (index of an input, axis) with its size; with ITSELF for an axis, of a number.
    """

    loops: tuple[Size, ...]
    columns: int
    inputs: tuple[ir.DataType, ...]
    steps: tuple[Step, ...]
    outputs: tuple[ir.DataType, ...]
    stores: tuple[Store | ColumnSum, ...]
    parts: Size = _ZERO
    symbols: tuple[tuple[int, int], ...] = ()

    @property
    def count(self) -> Size:
        """Points of all loops."""
        return product(self.loops)

    @property
    def row_count(self) -> Size:
        """Points of the loops over rows."""
        return product(self.row_loops)

    @property
    def sums_rows(self) -> bool:
        """True if it computes sums over rows, for each column."""
        return bool(self.parts.factor)

    @property
    def part(self) -> int | None:
        """Rows of each part but the last ones; None if a symbol decides it, or there are no parts."""
        if not self.sums_rows or self.row_count.symbols != self.parts.symbols:
            return None
        return -(-self.row_count.factor // self.parts.factor)

    @property
    def has_even_parts(self) -> bool:
        """True if all parts are known to have equally many rows."""
        return self.part is not None and Size(self.part) * self.parts == self.row_count

    @property
    def has_row_numbers(self) -> bool:
        """True if rows are reduced, so that a program has to hold whole rows."""
        return any(isinstance(step, Reduce) for step in self.steps)

    @property
    def stops(self) -> bool:
        """True if some input values end the kernel with an error."""
        return any(isinstance(step, Apply) and step.function == "stop" for step in self.steps)

    @cached_property
    def late(self) -> tuple[bool, ...]:
        """For each step whether it is a total or depends on one."""
        found: list[bool] = []
        for step in self.steps:
            found.append(isinstance(step, Total) or any(found[number] for number in read_by(step)))
        return tuple(found)

    @property
    def is_long(self) -> bool:
        """True if its rows are reduced block by block."""
        return self.has_row_numbers and product(self.column_loops).factor > MOST_COLUMNS

    @property
    def row_loops(self) -> tuple[Size, ...]:
        """The loops over rows; with no columns, all."""
        return self.loops[: len(self.loops) - self.columns]

    @property
    def column_loops(self) -> tuple[Size, ...]:
        """The loops over the columns of a row."""
        return self.loops[len(self.loops) - self.columns :]


def read_by(step: Step) -> tuple[int, ...]:
    """Return the indices of the steps that a step reads."""
    match step:
        case Apply():
            return step.arguments
        case Reduce() | Total():
            return (step.argument,)
        case Load():
            return tuple(index for index, *_ in step.places)
    return ()


@dataclass(frozen=True)
class Term:
    """A part of an offset: (index // divisor) % modulus * stride, where `index` counts the points of nested loops.

    Attributes:
        divisor: points of the loops further in.
        modulus: points of these loops; None for the outermost, where nothing is left to take off.
        stride: elements between two of their points.
    """

    divisor: Size
    modulus: Size | None
    stride: Size


def product(sizes: Sequence[Size]) -> Size:
    """Return the product of sizes; 1 if there are none."""
    found = Size()
    for size in sizes:
        found *= size
    return found


def terms(loops: Sequence[Size], strides: Sequence[Size]) -> tuple[Term, ...]:
    """Spell the offset of an access in few terms; loops whose strides fit together are joined."""
    blocks: list[tuple[Size, Size]] = []  # points and stride of loops that lie like one, innermost first
    for count, stride in zip(reversed(loops), reversed(strides), strict=True):
        if count == Size():
            continue
        if blocks and stride == blocks[-1][0] * blocks[-1][1]:
            blocks[-1] = (blocks[-1][0] * count, blocks[-1][1])
        else:
            blocks.append((count, stride))
    found, divisor = [], Size()
    for number, (count, stride) in enumerate(blocks):
        if stride.factor:
            found.append(Term(divisor, None if number == len(blocks) - 1 else count, stride))
        divisor *= count
    return tuple(reversed(found))
