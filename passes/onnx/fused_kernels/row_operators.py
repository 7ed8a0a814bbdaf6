"""ONNX operators that reduce rows, as steps of a kernel. They compute in float32 or wider."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import onnx_ir as ir

from ort_dynamo.passes.onnx.analysis.constants import constant_of
from ort_dynamo.passes.onnx.fused_kernels.arithmetic import Steps
from ort_dynamo.passes.onnx.fused_kernels.column_sums import summed_axes
from ort_dynamo.passes.onnx.fused_kernels.kernel import WIDE, Reduce

__all__ = ["lowered_rows", "reduced_axes", "widest"]


def reduced_axes(node: ir.Node) -> range | None:
    """Return the trailing axes of its first input that an operator of this page reduces; None of any other node."""
    x = node.inputs[0] if node.inputs else None
    if node.domain or node.op_type not in _FORMULAS or x is None or x.shape is None or x.dtype not in _TYPES:
        return None
    rank = len(x.shape)
    if node.op_type.startswith("Reduce"):
        return _of_reduction(node, rank)
    first = node.attributes.get_int("axis", -1) % rank if rank else 0
    if node.op_type == "LayerNormalization":
        return range(first, rank) if node.inputs[1] is not None else None
    return range(first, rank) if first == rank - 1 else None  # Softmax normalizes one axis


def _of_reduction(node: ir.Node, rank: int) -> range | None:
    if len(node.inputs) < 2 or node.inputs[1] is None or (axes := constant_of(node.inputs[1])) is None or not axes:
        return None
    found = sorted(axis % rank for axis in axes) if rank else []
    return range(found[0], rank) if found == list(range(found[0], rank)) else None


_TYPES = frozenset({ir.DataType.BFLOAT16, ir.DataType.DOUBLE, ir.DataType.FLOAT, ir.DataType.FLOAT16})

Rows = Callable[[Steps, ir.Node, Sequence[int], int], Sequence[int]]
"""(steps, node, the step of each input, columns) -> the step of each output."""


def _sum(steps: Steps, x: int) -> int:
    return steps.add(Reduce(steps.steps[x].dtype, "sum", x))


def _mean(steps: Steps, x: int, columns: int) -> int:
    return steps.apply("mul", _sum(steps, x), steps.constant(1 / columns, steps.steps[x].dtype))


def _max(steps: Steps, x: int) -> int:
    return steps.add(Reduce(steps.steps[x].dtype, "max", x))


def _layer_norm(steps: Steps, node: ir.Node, inputs: Sequence[int], columns: int) -> Sequence[int]:
    """(x - mean) / sqrt(variance + epsilon) * scale + bias; the mean; and 1 / sqrt(variance + epsilon)."""
    x, scale, *bias = inputs
    mean = _mean(steps, x, columns)
    centred = steps.apply("sub", x, mean)
    variance = _mean(steps, steps.apply("mul", centred, centred), columns)
    epsilon = steps.constant(node.attributes.get_float("epsilon", 1e-5), steps.steps[x].dtype)
    one = steps.constant(1.0, steps.steps[x].dtype)
    inverse = steps.apply("div", one, steps.apply("sqrt", steps.apply("add", variance, epsilon)))
    result = steps.apply("mul", steps.apply("mul", centred, inverse), scale)
    return (steps.apply("add", result, bias[0]) if bias else result), mean, inverse


def _shifted(steps: Steps, x: int) -> tuple[int, int]:
    """Return a row less its maximum, and the exponentials of that."""
    shifted = steps.apply("sub", x, _max(steps, x))
    return shifted, steps.apply("exp", shifted)


def _softmax(steps: Steps, node: ir.Node, inputs: Sequence[int], columns: int) -> Sequence[int]:
    _, exponentials = _shifted(steps, inputs[0])
    return (steps.apply("div", exponentials, _sum(steps, exponentials)),)


def _log_softmax(steps: Steps, node: ir.Node, inputs: Sequence[int], columns: int) -> Sequence[int]:
    shifted, exponentials = _shifted(steps, inputs[0])
    return (steps.apply("sub", shifted, steps.apply("log", _sum(steps, exponentials))),)


_FORMULAS: Mapping[str, Rows] = {
    "LayerNormalization": _layer_norm,
    "LogSoftmax": _log_softmax,
    "ReduceMax": lambda steps, _, given, columns: (_max(steps, given[0]),),
    "ReduceMean": lambda steps, _, given, columns: (_mean(steps, given[0], columns),),
    "ReduceSum": lambda steps, _, given, columns: (_sum(steps, given[0]),),
    "Softmax": _softmax,
}


def lowered_rows(steps: Steps, node: ir.Node, arguments: Sequence[int], columns: int) -> Iterator[tuple[ir.Value, int]]:
    """Add the steps of a node that `reduced_axes` takes.

    Args:
        steps: the list that gets the steps.
        node: the node.
        arguments: the step of each input that holds data; axes are no data.
        columns: the number of elements of a row.

    Yields:
        Each output that the node has, with its step. One without a name is left out of the node.
    """
    wide = [steps.convert(one, WIDE.get(steps.steps[one].dtype, steps.steps[one].dtype)) for one in arguments]
    found = _FORMULAS[node.op_type](steps, node, wide, columns)
    for step, output in zip(found, node.outputs, strict=False):
        if output.name and output.dtype is not None:
            yield output, steps.convert(step, output.dtype)


def widest(node: ir.Node) -> ir.Value:
    """Return the first input of a reduction, and the output of any other node."""
    is_reduction = reduced_axes(node) is not None or summed_axes(node) is not None
    value = node.inputs[0] if is_reduction else node.outputs[0]
    assert value is not None
    return value
