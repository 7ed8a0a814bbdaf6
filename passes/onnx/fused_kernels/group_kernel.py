"""Makes the kernel of a group of nodes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cached_property

import onnx_ir as ir

from ort_dynamo.graph.fused_op import Size
from ort_dynamo.passes.onnx.analysis.constants import number_of
from ort_dynamo.passes.onnx.analysis.host_values import is_host_number
from ort_dynamo.passes.onnx.fused_kernels.arithmetic import Steps, lowered, needs_kernel
from ort_dynamo.passes.onnx.fused_kernels.column_sums import parts_of, summed_axes
from ort_dynamo.passes.onnx.fused_kernels.group import MOVES, Group
from ort_dynamo.passes.onnx.fused_kernels.kernel import (
    ColumnSum,
    Counter,
    HostNumber,
    Kernel,
    Load,
    Store,
    Total,
    product,
)
from ort_dynamo.passes.onnx.fused_kernels.layouts import (
    CannotFuseError,
    Layout,
    SplitLoop,
    broadcast_operand,
    is_in_runs,
    regrouped,
    strides_of,
    total,
)
from ort_dynamo.passes.onnx.fused_kernels.own_symbols import symbol_of_input, with_own_symbols
from ort_dynamo.passes.onnx.fused_kernels.pieces import entries_of, equal_pieces, part_of, several_pieces
from ort_dynamo.passes.onnx.fused_kernels.row_operators import lowered_rows, reduced_axes, widest
from ort_dynamo.passes.onnx.fused_kernels.totals import check_totals

__all__ = ["kernel_of"]

Shapes = Callable[[ir.Value], tuple[Size, ...]]
"""The sizes of a value."""

Only = tuple[tuple[int, int], ...]
"""(loop, count): a value is read only at these counts of these loops."""


def kernel_of(group: Group, shapes: Shapes, *, in_parts: bool = True) -> Kernel:
    """Make the kernel that computes a group's outputs. One that is a sum of columns may become the sums of parts.

    Args:
        group: the group of nodes that it computes.
        shapes: the sizes of each value.
        in_parts: whether many rows are summed in parts.

    Raises:
        CannotFuseError: no kernel of this kind does.
    """
    shown = [shapes(widest(node)) for node in group.nodes]
    largest = max(map(_order, shown))
    spaces = dict.fromkeys(tuple(s for s in shape if s != Size()) for shape in shown if _order(shape) == largest)
    along = tuple(size for size in group.columns if size != Size())
    refused = CannotFuseError("the columns are not the last axes of the group's largest tensor")
    for space in spaces:  # with a permutation inside there are several, and some do not have the outputs in order
        if space[len(space) - len(along) :] == along and bool(along) == bool(group.columns):
            try:
                return with_own_symbols(_in_space(group, shapes, space, len(along), in_parts), group.inputs, shapes)
            except CannotFuseError as error:
                refused = error
    raise refused


def _in_space(group: Group, shapes: Shapes, space: Sequence[Size], columns: int, in_parts: bool) -> Kernel:
    """Return the kernel whose loops are those of a shape; the last ones are columns."""
    loops = list(space)
    while True:
        try:
            return _Lowering(group, shapes, loops, columns, in_parts).kernel()
        except SplitLoop as split:
            columns += split.loop >= len(loops) - columns
            loops[split.loop : split.loop + 1] = [split.outer, split.inner]


def _order(shape: Sequence[Size]) -> tuple[int, int]:
    """Give the sort key of a size: symbols are larger than any integer."""
    count = product(shape)
    return len(count.symbols), count.factor


class _Lowering:
    """Follows each output back to the loads, with the loops that run along its axes."""

    def __init__(self, group: Group, shapes: Shapes, loops: Sequence[Size], columns: int, in_parts: bool) -> None:
        self._parts, self._in_parts = Size(0), in_parts
        self._group, self._shapes, self._loops, self._columns = group, shapes, tuple(loops), columns
        self._inside: Collection[ir.Node] = frozenset(group.nodes)
        self._places = {value: index for index, value in enumerate(group.inputs)}
        self._known: dict[tuple[ir.Value, Layout, Only], int] = {}
        self._fixed: list[tuple[int, bool, Size]] = []
        self._steps = Steps()

    def kernel(self) -> Kernel:
        stores: list[Store | ColumnSum] = []
        for output in self._group.outputs:
            if (node := output.producer()) is not None and summed_axes(node) is not None:
                stores.append(self._summed(node))
                continue
            layout = self._stored(output)
            strides = strides_of(self._loops, layout, self._shapes(output))
            stores.append(Store(self._step(output, layout), self._shapes(output), strides))
        inputs, outputs = (tuple(map(_dtype, values)) for values in (self._group.inputs, self._group.outputs))
        steps = tuple(self._steps.steps)
        kernel = Kernel(self._loops, self._columns, inputs, steps, outputs, tuple(stores), self._parts)
        if kernel.sums_rows and kernel.is_long:
            raise CannotFuseError("the rows are too long to be summed in parts")
        if kernel.stops and (kernel.columns or any(isinstance(s, Load) and (s.only or s.places) for s in steps)):
            raise CannotFuseError("a kernel with a stop reduces rows, or loads conditionally or by an index")
        check_totals(kernel)
        return kernel

    def _summed(self, node: ir.Node) -> ColumnSum:
        """Return the sum over the rows of a node's input."""
        step, parts = self._summand(node)
        before, batch = self._before(node), self._batch
        if parts == product(before):
            return ColumnSum(step, self._shapes(node.outputs[0]), in_parts=False)
        if not self._in_parts:
            raise CannotFuseError("a sum over rows has more parts than results")
        is_of_batch = batch != Size() and product(before) == batch
        shape = (*before, Size(parts.factor // batch.factor)) if is_of_batch else (parts,)
        return ColumnSum(step, (*shape, product(self._loops[-self._columns :])), in_parts=True)

    def _summand(self, node: ir.Node) -> tuple[int, Size]:
        """Return the step that a node sums over rows, and in how many parts."""
        x = node.inputs[0]
        assert x is not None
        rows, columns = product(self._loops[: -self._columns]), product(self._loops[-self._columns :])
        if product(self._shapes(x)) != product(self._loops) or columns.symbols:
            raise CannotFuseError("the rows of a sum are not the rows of the kernel, or its columns are symbolic")
        every = range(len(self._loops))
        layout = regrouped(self._loops, every, self._shapes(x))
        axes = summed_axes(node)
        assert axes is not None
        if [loop for axis in layout[axes.stop :] for loop in axis] != list(every[-self._columns :]):
            raise CannotFuseError("the columns of a sum are not the columns of the kernel")
        whole, batch = any(reduced_axes(one) is not None for one in self._group.nodes), self._batch
        if batch != Size() and rows.symbols != batch.symbols:
            raise CannotFuseError("a sum for each of several groups of rows has a symbolic number of rows")
        self._parts = parts_of(rows, columns.factor, whole=whole, batch=batch) if self._in_parts else batch
        return self._step(x, layout), self._parts

    @cached_property
    def _batch(self) -> Size:
        """The number of groups of rows that have sums of their own."""
        sums = [node for node in self._group.nodes if summed_axes(node) is not None]
        counts = {product(self._before(node)) for node in sums} - {Size()}
        if len(counts) > 1 or any(len(one.symbols) > 1 for one in counts):
            raise CannotFuseError("two sums over rows are not of the same groups of rows, or these have two symbols")
        return next(iter(counts), Size())

    def _before(self, node: ir.Node) -> tuple[Size, ...]:
        """Return the sizes of the axes before the rows that a node sums; each index there has a sum of its own."""
        x, axes = node.inputs[0], summed_axes(node)
        assert x is not None
        assert axes is not None
        return tuple(self._shapes(x)[: axes.start])

    def _total(self, node: ir.Node, layout: Layout, only: Only) -> int:
        """Return the step of a sum over rows that other nodes of the group read."""
        columns = list(range(len(self._loops) - self._columns, len(self._loops)))
        if only or [loop for axis in layout for loop in axis] != columns:
            raise CannotFuseError("a sum over rows is read in another order than the order of the columns")
        step, parts = self._summand(node)
        if parts != Size():
            raise CannotFuseError("a sum over rows is read before its parts are added")
        return self._steps.add(Total(_dtype(node.outputs[0]), step))

    def _stored(self, output: ir.Value) -> Layout:
        """Return the layout of an output: its elements in order, of all points or one of each row."""
        shape, every = self._shapes(output), range(len(self._loops))
        if product(shape) == product(self._loops):
            return regrouped(self._loops, every, shape)
        if self._columns:
            loops = every[-self._columns :] if self._is_of_sums(output) else every[: -self._columns]
            if product(shape) == product([self._loops[loop] for loop in loops]):
                return regrouped(self._loops, loops, shape)
        raise CannotFuseError("an output has neither the size of the kernel nor the size of its rows or columns")

    def _is_of_sums(self, value: ir.Value) -> bool:
        """Check whether a value depends on a sum over rows that the group makes."""
        left, seen = [value], set[ir.Node]()
        while left:
            node = left.pop().producer()
            if node is not None and node in self._inside and node not in seen:
                if summed_axes(node) is not None:
                    return True
                seen.add(node)
                left += [one for one in node.inputs if one is not None]
        return False

    def _step(self, value: ir.Value, layout: Layout, only: Only = ()) -> int:
        """Return the step that computes the element of a value at these loops."""
        key = (value, layout, only)
        if key not in self._known:
            node = value.producer()
            if (number := number_of(value)) is not None:
                self._known[key] = self._steps.constant(number, _dtype(value))
            elif node is None or node not in self._inside:
                self._known[key] = self._load(value, layout, only)
            elif summed_axes(node) is not None:
                self._known[key] = self._total(node, layout, only)
            elif node.op_type == "Concat":
                self._known[key] = self._joined(node, layout, only)
            elif node.op_type == "GatherElements":
                self._known[key] = self._picked(node, layout, only)
            elif node.op_type == "ScatterElements":
                self._known[key] = self._scattered(node, layout, only)
            elif node.op_type in MOVES:
                source = node.inputs[0]
                assert source is not None
                self._known[key] = self._step(source, self._moved(node, value, source, layout), only)
            elif reduced_axes(node) is not None:
                self._reduce(node, value, layout, only)
            else:
                shape = self._shapes(value)
                operands = [one for one in node.inputs if one is not None]
                found = [self._step(one, broadcast_operand(layout, shape, self._shapes(one)), only) for one in operands]
                self._known[key] = lowered(self._steps, node, found)
        return self._known[key]

    def _load(self, value: ir.Value, layout: Layout, only: Only) -> int:
        if is_host_number(value):
            return self._steps.add(HostNumber(ir.DataType.INT64, Size(1, (symbol_of_input(self._places[value]),))))
        strides = strides_of(self._counts, layout, self._shapes(value))
        mine, fixed = strides[: len(self._loops)], strides[len(self._loops) :]
        offset, places = Size(0), []
        for (number, is_step, count), stride in zip(self._fixed, fixed, strict=True):
            if is_step and stride.factor:
                places.append((number, stride, count))
            elif number and stride.factor:
                offset = total(offset, Size(number) * stride)
        if not places and not is_in_runs(self._loops, mine) and not self._has_no_other:
            raise CannotFuseError("neighbouring points load elements that are far apart in memory")
        return self._steps.add(Load(_dtype(value), self._places[value], mine, offset, only, tuple(places)))

    @property
    def _has_no_other(self) -> bool:
        """True if the group is one node that only a fused kernel can compute, however slow its reads are."""
        return len(self._group.nodes) == 1 and needs_kernel(self._group.nodes[0])

    @property
    def _counts(self) -> tuple[Size, ...]:
        """The trip count of each loop, then the numbers of pieces and of indices, of which one is read."""
        return (*self._loops, *(count for *_, count in self._fixed))

    def _regrouped(self, sequence: Sequence[int], shape: Sequence[Size]) -> Layout:
        try:
            return regrouped(self._counts, sequence, shape)
        except SplitLoop as split:
            if split.loop >= len(self._loops):
                raise CannotFuseError("a reshape splits the axis of a piece") from split
            raise

    def _moved(self, node: ir.Node, value: ir.Value, source: ir.Value, layout: Layout) -> Layout:
        """Return the layout of the input of a node of MOVES."""
        before, after = self._shapes(source), self._shapes(value)
        if node.op_type == "Transpose":
            order = list(node.attributes.get_ints("perm", tuple(reversed(range(len(before))))))
            found = dict(zip(order, layout, strict=True))
            return tuple(found[axis] for axis in range(len(before)))
        if node.op_type == "Expand":
            return broadcast_operand(layout, after, before)
        if (entries := entries_of(node, before, after)) is not None:
            axis, first, step = entries
            along, rest = ((), layout[axis:]) if node.op_type == "Gather" else (layout[axis], layout[axis + 1 :])
            return (*layout[:axis], (*along, self._at(layout, first, Size(step))), *rest)
        if (piece := part_of(node, value, before, after)) is not None:
            axis, start = piece
            return self._part(layout, axis, start, before[axis].factor, after[axis].factor)
        if product(before) != product(after):
            raise CannotFuseError("the input and the output of a reshape may differ in size")
        return self._regrouped([loop for axis in layout for loop in axis], before)

    def _part(self, layout: Layout, axis: int, start: int, before: int, after: int) -> Layout:
        """Return the layout of a tensor of which `after` elements of an axis, from `start` on, have a layout."""
        along = layout[axis]
        if before % after or start % after:  # several equal pieces, of which the layout reads one
            if not along or along[0] < len(self._loops):
                raise CannotFuseError("a Slice is not one of several equal pieces")
            number, is_step, count = self._fixed[along[0] - len(self._loops)]
            if is_step:
                raise CannotFuseError("an index selects from a Slice of several pieces")
            width, along = several_pieces(count, start, before, after), along[1:]
            start, after = start + number * width, width
        piece = self._at(layout, start // after, Size(before // after))
        return (*layout[:axis], (piece, *along), *layout[axis + 1 :])

    def _at(self, layout: Layout, number: int, count: Size, *, is_step: bool = False) -> int:
        """Return a loop that is read at one count only, an integer or the value of a step, and is not in a layout."""
        fixed, used = (number, is_step, count), {loop for axis in layout for loop in axis}
        loops = (len(self._loops) + index for index, one in enumerate(self._fixed) if one == fixed)
        if (known := next((loop for loop in loops if loop not in used), None)) is not None:
            return known
        self._fixed.append(fixed)
        return len(self._loops) + len(self._fixed) - 1

    def _index(self, indices: ir.Value, layout: Layout, count: Size, only: Only) -> int:
        """Return the step of an index, from 0 up; a negative one counts from the end."""
        if count.symbols:
            raise CannotFuseError("an index selects from an axis of symbolic size")
        index = self._steps.convert(self._step(indices, layout, only), ir.DataType.INT64)
        zero, size = (self._steps.constant(number, ir.DataType.INT64) for number in (0, count.factor))
        return self._steps.where(self._steps.compare("lt", index, zero), self._steps.apply("add", index, size), index)

    def _picked(self, node: ir.Node, layout: Layout, only: Only) -> int:
        """Return the step of GatherElements with one index for each row of an axis."""
        data, indices = node.inputs
        assert data is not None
        assert indices is not None
        axis = node.attributes.get_int("axis", 0) % len(layout)
        count = self._shapes(data)[axis]
        place = self._at(layout, self._index(indices, layout, count, only), count, is_step=True)
        return self._step(data, (*layout[:axis], (place,), *layout[axis + 1 :]), only)

    def _scattered(self, node: ir.Node, layout: Layout, only: Only) -> int:
        """Return the step of ScatterElements with one index for each row of an axis."""
        data, indices, updates = node.inputs
        assert data is not None
        assert indices is not None
        assert updates is not None
        axis = node.attributes.get_int("axis", 0) % len(layout)
        if any(loop >= len(self._loops) for loop in layout[axis]):
            raise CannotFuseError("no loop traverses the axis of a ScatterElements")
        count = self._shapes(data)[axis]
        of_row = (*layout[:axis], (), *layout[axis + 1 :])
        index = self._index(indices, of_row, count, only)
        strides = strides_of(self._counts, (layout[axis],), (count,))[: len(self._loops)]
        hit = self._steps.compare("eq", self._steps.add(Counter(ir.DataType.INT64, strides)), index)
        before, update = self._step(data, layout, only), self._step(updates, of_row, only)
        if node.attributes.get_string("reduction", "none") == "add":
            update = self._steps.apply("add", before, update)
        return self._steps.where(hit, update, before)

    def _joined(self, node: ir.Node, layout: Layout, only: Only) -> int:
        """Return the step of a concatenation: one of several equal pieces, by a loop that counts them.

        An input may be several pieces; one of them is then read at a time.
        """
        axis, size, counts = equal_pieces(node, self._shapes)
        pieces = [(one, number, count) for one, count in counts for number in range(count)]
        outer, inner = self._regrouped(layout[axis], (Size(len(pieces)), size))
        if len(outer) != 1 or outer[0] >= len(self._loops):
            raise CannotFuseError("no loop traverses the inputs of a Concat")
        (loop,) = outer
        counter = Counter(ir.DataType.INT64, tuple(Size(int(other == loop)) for other in range(len(self._loops))))
        found = []
        for place, (one, number, count) in enumerate(pieces):
            along = inner if count == 1 else (self._at(layout, number, Size(count)), *inner)
            found.append(self._step(one, (*layout[:axis], along, *layout[axis + 1 :]), (*only, (loop, place))))
        result = found.pop()
        for place, piece in reversed([*enumerate(found)]):
            this = self._steps.constant(place, ir.DataType.INT64)
            result = self._steps.where(self._steps.compare("eq", self._steps.add(counter), this), piece, result)
        return result

    def _reduce(self, node: ir.Node, value: ir.Value, layout: Layout, only: Only) -> None:
        """Add the steps of a reduction and of all of its outputs."""
        x, axes = node.inputs[0], reduced_axes(node)
        assert x is not None
        assert axes is not None
        every = range(len(self._loops) - self._columns, len(self._loops))
        shape = self._shapes(x)
        along = self._regrouped(every, shape[axes.start :])
        rows = layout[: axes.start]
        if any(loop in every for axis in rows for loop in axis) or any(loop in every for loop, _ in only):
            raise CannotFuseError("the rows of a reduction run along the columns of the kernel")
        full = (*rows, *along)
        if value is node.outputs[0] and not node.op_type.startswith("Reduce") and layout != full:
            raise CannotFuseError("a result per row is read in another order than it is computed")
        read = [one for one in node.inputs if one is not None]
        read = read[:1] if node.op_type.startswith("Reduce") else read
        found = [self._step(one, broadcast_operand(full, shape, self._shapes(one)), only) for one in read]
        columns = product(shape[axes.start :])
        if columns.symbols:
            raise CannotFuseError("the reduced axes have a symbolic size")
        kept = (*rows, *((),) * len(axes))
        for output, step in lowered_rows(self._steps, node, found, columns.factor):
            of_row = rows if len(self._shapes(output)) == len(rows) else kept
            is_full = output is node.outputs[0] and not node.op_type.startswith("Reduce")
            self._known[output, full if is_full else of_row, only] = step
        if (value, layout, only) not in self._known:
            raise CannotFuseError("a result per row is read with another layout")


def _dtype(value: ir.Value) -> ir.DataType:
    if value.dtype is None:
        raise CannotFuseError("a value has no dtype")
    return value.dtype
