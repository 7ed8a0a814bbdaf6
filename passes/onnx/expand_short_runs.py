"""Expand an operand before a broadcast that would go through runs of a few elements."""

from __future__ import annotations

import math
from dataclasses import dataclass

import onnx_ir as ir

from ort_dynamo.passes.onnx.analysis.new_nodes import NewNodes
from ort_dynamo.passes.onnx.analysis.new_values import NewValues
from ort_dynamo.passes.onnx.analysis.opsets import is_older
from ort_dynamo.passes.onnx.analysis.refusals import refuse
from ort_dynamo.passes.onnx.analysis.replacing import insert_nodes
from ort_dynamo.passes.onnx.analysis.shapes import are_same_sizes, is_same_size, likely_count, words_of
from ort_dynamo.passes.ordering import Condition, ordering

__all__ = ["ExpandShortRuns"]

_OPSET = 9
"""The first opset with all operators that the pass writes: a Constant may be the shape of an Expand."""

_OPERATORS = frozenset({
    "Add", "And", "Div", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Max", "Min", "Mul", "Or", "Sub",
    "Where", "Xor",
})  # fmt: skip
"""Operators whose kernels give an element the same bits whether an operand is repeated or a tensor. Pow is none.

Max and Min of two zeros choose a sign by the element's place in a run, also in tensors of one shape. The kernel of
Where makes two selections. By their shapes, it loses the sign of zeros of the one or the other, so they keep them.
"""

_DTYPES = frozenset({ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.INT32, ir.DataType.INT64, ir.DataType.BOOL})

_LARGE = 1 << 18
"""Maximum number of elements of a result for which a constant is expanded."""

_Dims = tuple[int | ir.SymbolicDim, ...]


@dataclass(frozen=True)
class _Plan:
    """The dimensions that an operand is expanded over.

    Attributes:
        inner: the sizes of the innermost dimensions, if the operand repeats over all of them.
        outer: the sizes of the dimensions from an outer one on, where those that are not expanded are 1.
    """

    inner: tuple[int, ...]
    outer: tuple[int, ...]


@ordering(ends=[Condition.NO_DEAD_NODES])
@dataclass(frozen=True)
class ExpandShortRuns(ir.passes.InPlacePass):
    """Expand an operand of an elementwise operator whose broadcast goes through runs of a few elements.

    ONNX Runtime's CPU kernels go through a broadcast in runs, in which each operand is a scalar or a vector. They take
    10 ns for each run and 0.2 ns for each element. Runs are short where the innermost dimensions are: coordinates of
    points, corners of boxes, basis functions of a spline.

    An operand with runs of at most `longest` elements is expanded until they have more. Of elements of eight bytes,
    half as many count:

    1. If it repeats over the innermost dimensions, these come first in an Expand, which then copies the whole operand,
       and a Transpose moves them back. An Expand of single elements takes 3 to 9 ns for each.
    2. Over dimensions further out, an Expand copies runs.

    A scalar of a lower rank gets the rank of a result whose last dimension is 1. Otherwise each run has one element.

    The conditions are:

    1. the shapes are known, and so are the sizes of the dimensions to expand;
    2. there are at least `least` runs, where a dimension of unknown size counts as 16;
    3. an operand is no constant beside more than 2^18 elements, since ONNX Runtime would keep its expanded form.

    A model of opset 8 or older does not change.
    """

    longest: int = 12
    least: int = 2048

    @classmethod
    def of(cls, threads: int) -> ExpandShortRuns:
        """Give the pass for a session of `threads` threads, which share the runs of a broadcast but no Transpose."""
        return cls(longest=min(cls.longest, 24 // threads))

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite every match in the main graph."""
        found = [node for node in model.graph if node.op_type in _OPERATORS and not node.domain]
        if is_older(model, _OPSET) or not found:
            return ir.passes.PassResult(model, False)
        new, modified = NewValues(model, self), False
        made: dict[tuple[ir.Value, _Dims], ir.Value | None] = {}
        for node in found:
            if node.outputs[0].shape is None:
                refuse(self, node, "the shape of its result is not known")
                continue
            dims = tuple(node.outputs[0].shape)
            for index, operand in enumerate(node.inputs):
                if operand is None or operand.shape is None or operand.dtype not in _DTYPES:
                    continue
                if not _is_free(node, index):
                    continue
                key = operand, dims
                if key not in made:
                    made[key] = self._in_longer_runs(new, node, operand, dims)
                if (longer := made[key]) is not None:
                    node.replace_input_with(index, longer)
                    modified = True
        return ir.passes.PassResult(model, modified)

    def _in_longer_runs(self, new: NewValues, node: ir.Node, operand: ir.Value, dims: _Dims) -> ir.Value | None:
        """Make an operand in longer runs before a node; None if its runs are long, or stay short."""
        assert operand.shape is not None
        count, missing = likely_count(dims), len(dims) - len(operand.shape)
        padded: _Dims = (*[1] * missing, *operand.shape)
        if _is_scalar(operand):
            if not missing or count < self.least or any(dim != 1 for dim in dims[min(missing, len(dims) - 1) :]):
                return None
            return self._of_rank(new, node, operand, len(dims))
        run = _run(padded, dims)
        longest = self.longest // words_of(operand)
        if not run or run > longest or count < self.least * run:
            return None
        if ir.convenience.get_const_tensor(operand) is not None and count > _LARGE:
            refuse(self, node, f"{operand.name} is a constant, which ONNX Runtime would keep with {count} elements")
            return None
        plan = _plan(padded, dims, longest)
        if plan is None:
            refuse(self, node, f"{operand.name} repeats over a dimension of unknown size")
            return None
        return self._expanded(new, node, operand, plan)

    def _of_rank(self, new: NewValues, node: ir.Node, operand: ir.Value, rank: int) -> ir.Value:
        """Return a scalar with `rank` dimensions."""
        constant = ir.convenience.get_const_tensor(operand)
        if constant is not None and not operand.is_graph_input():
            return new.shared_constant(f"{operand.name}_of_rank_{rank}", constant.numpy().reshape([1] * rank))
        nodes = NewNodes(new, operand)
        value = nodes.reshape(operand, [1] * rank, [1] * rank)
        insert_nodes(node, nodes.tape, self)
        return value

    def _expanded(self, new: NewValues, node: ir.Node, operand: ir.Value, plan: _Plan) -> ir.Value:
        """Return an operand of a node, expanded."""
        assert operand.shape is not None
        nodes, value, shape = NewNodes(new, operand), operand, tuple(operand.shape)
        if plan.inner:
            kept, times = shape[: len(shape) - len(plan.inner)], math.prod(plan.inner)
            zeros = [0] * len(kept)  # a Reshape keeps these dimensions
            value = nodes.reshape(value, zeros, kept)
            value = nodes.expand(value, [times, *[1] * len(kept)], (times, *kept))
            value = nodes.transpose(value, [*range(1, len(kept) + 1), 0])
            shape = (*kept, *plan.inner)
            value = nodes.reshape(value, [*zeros, *plan.inner], shape)
        if plan.outer:
            padded = (*[1] * (len(plan.outer) - len(shape)), *shape)
            same = len(padded) - len(plan.outer)
            sizes = [size if dim == 1 else dim for dim, size in zip(padded[same:], plan.outer, strict=True)]
            value = nodes.expand(value, plan.outer, (*padded[:same], *sizes))
        insert_nodes(node, nodes.tape, self)
        return value


def _is_free(node: ir.Node, index: int) -> bool:
    """Check whether an operand may change its shape: of Where, if its kernel's two selections keep theirs."""
    if node.op_type != "Where":
        return True
    result, (condition, *values) = node.outputs[0], node.inputs
    if index:
        return _is_scalar(values[index - 1]) and _is_like(condition, result)
    return all(_is_like(value, result) for value in values)


def _is_like(value: ir.Value | None, result: ir.Value) -> bool:
    """Check whether a value is known to have the shape of a result."""
    if value is None or value.shape is None or result.shape is None:
        return False
    return are_same_sizes(tuple(value.shape), tuple(result.shape))


def _is_scalar(value: ir.Value | None) -> bool:
    return value is not None and value.shape is not None and all(dim == 1 for dim in value.shape)


def _plan(padded: _Dims, dims: _Dims, longest: int) -> _Plan | None:
    """Give the dimensions over which an operand gets runs above `longest`; None if the size of one is unknown."""
    first = 1 + max(axis for axis, dim in enumerate(padded) if dim != 1)
    inner = tuple(size for size in dims[first:] if isinstance(size, int))  # a run of them is short, so all
    if math.prod(inner) == 1:
        first, inner = len(dims), ()
    outer, length = list[int](), math.prod(inner)
    for dim, size in zip(reversed(padded[:first]), reversed(dims[:first]), strict=True):
        if length > longest:
            break
        if isinstance(size, int):
            outer.insert(0, size if dim == 1 else 1)
            length *= size
        elif dim != 1:
            break
        else:
            return None
    return _Plan(inner, (*outer, *[1] * len(inner)) if any(size != 1 for size in outer) else ())


def _run(padded: _Dims, dims: _Dims) -> int | None:
    """Return how many elements a run of an operand has; None if they are not known, or if it is one run."""
    run, repeats = 1, None
    for dim, size in zip(reversed(padded), reversed(dims), strict=True):
        if size == 1:
            continue
        if dim != 1 and not is_same_size(dim, size):
            return None
        if repeats not in (None, dim == 1):
            return run
        if not isinstance(size, int):
            return None
        repeats = dim == 1
        run *= size
    return None
