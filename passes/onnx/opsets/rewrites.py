"""Rewrite, with more operators, nodes that an older schema cannot express; each form computes exactly the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import onnx_ir as ir

from ort_dynamo.passes.onnx.analysis.constants import constant_of
from ort_dynamo.passes.onnx.opsets.building import Builder, InexpressibleError

__all__ = ["rewritten"]

_INT64 = ir.DataType.INT64
_END = 2**63 - 1


def rewritten(node: ir.Node, since: int, version: int, make: Builder) -> Sequence[ir.Value] | None:
    """Give the replacements of a node's outputs in an older opset; None if the general rule applies.

    Args:
        node: a node of ai.onnx.
        since: the opset of its schema.
        version: the older opset.
        make: the builder of the nodes.

    Raises:
        InexpressibleError: the older opset cannot express it.
    """
    changed, rewrite = _REWRITES.get(node.op_type, (0, None))
    return rewrite(node, version, make) if rewrite is not None and version < changed <= since else None


def _shape(node: ir.Node, version: int, make: Builder) -> Sequence[ir.Value] | None:
    """Rewrite a part of a shape as a slice of the whole."""
    start, end = node.attributes.get_int("start", 0), node.attributes.get_int("end", _END)
    if (start, end) == (0, _END):
        return None
    whole = make.op("Shape", node.inputs[0], dtype=_INT64)
    return (make.op("Slice", whole, make.ints([start]), make.ints([end]), dtype=_INT64),)


def _split(node: ir.Node, version: int, make: Builder) -> Sequence[ir.Value] | None:
    """Parts of one size, of which the last may be smaller, have sizes; without any, all had to be equal."""
    count, axis, data = len(node.outputs), node.attributes.get_int("axis", 0), node.inputs[0]
    if "num_outputs" not in node.attributes:
        return None
    assert data is not None
    size = data.shape[axis] if data.shape is not None else None
    if isinstance(size, int):
        part = -(-size // count)
        parts = [part] * (count - 1) + [size - part * (count - 1)]
        if version < 13:
            return _outputs(make.op("Split", data, dtype=data.dtype, outputs=count, axis=axis, split=parts))
        sizes = make.ints(parts)
    elif version < 13:
        raise InexpressibleError("before opset 13 the sizes of its parts were an attribute, and they are not constant")
    else:
        whole = make.op("Gather", make.op("Shape", data, dtype=_INT64), make.ints([axis]), axis=0, dtype=_INT64)
        rounded = make.op("Add", whole, make.ints([count - 1]), dtype=_INT64)
        equal = make.op("Div", rounded, make.ints([count]), dtype=_INT64)
        others = make.op("Mul", equal, make.ints([count - 1]), dtype=_INT64)
        last = make.op("Sub", whole, others, dtype=_INT64)
        sizes = make.op("Concat", *[equal] * (count - 1), last, axis=0, dtype=_INT64)
    return _outputs(make.op("Split", data, sizes, dtype=data.dtype, outputs=count, axis=axis))


def _outputs(first: ir.Value) -> Sequence[ir.Value]:
    node = first.producer()
    assert node is not None
    return node.outputs


def _pad(node: ir.Node, version: int, make: Builder) -> Sequence[ir.Value] | None:
    """Rewrite pads of some axes as pads of all, zero elsewhere."""
    if len(node.inputs) < 4 or node.inputs[3] is None:
        return None
    data, pads, fill, _ = node.inputs[:4]
    axes = constant_of(node.inputs[3])
    assert data is not None
    if axes is None or data.shape is None:
        raise InexpressibleError("before opset 18 its pads were of all axes, and which these are is not known")
    rank = len(data.shape)
    positions = [axis % rank for axis in axes] + [rank + axis % rank for axis in axes]
    given = constant_of(pads)
    if given is not None:
        every = [0] * (2 * rank)
        for position, number in zip(positions, given, strict=True):
            every[position] = number
        whole = make.ints(every)
    else:
        zeros = make.ints([0] * (2 * rank))
        whole = make.op("ScatterElements", zeros, make.ints(positions), pads, axis=0, dtype=_INT64)
    mode = node.attributes.get_string("mode", "constant")
    if mode == "wrap":
        raise InexpressibleError("its mode 'wrap' is of opset 19")
    inputs = [data, whole] if fill is None else [data, whole, fill]
    return (make.op("Pad", *inputs, mode=mode, dtype=data.dtype),)


def _grid_sample(node: ir.Node, version: int, make: Builder) -> Sequence[ir.Value] | None:
    """Return the modes of images had names of their own."""
    data, grid = node.inputs
    if data is None or data.shape is None or len(data.shape) != 4:
        raise InexpressibleError("before opset 20 its input had four dimensions")
    mode = node.attributes.get_string("mode", "linear")
    others = {name: attribute.value for name, attribute in node.attributes.items() if name != "mode"}
    older = {"linear": "bilinear", "cubic": "bicubic"}.get(mode, mode)
    return (make.op("GridSample", data, grid, dtype=data.dtype, mode=older, **others),)


def _reduction(node: ir.Node, version: int, make: Builder) -> Sequence[ir.Value] | None:
    """No axes are all axes or none, and which is no longer an attribute's business where it is known."""
    axes = node.inputs[1] if len(node.inputs) > 1 else None
    data, noop = node.inputs[0], node.attributes.get_int("noop_with_empty_axes", 0)
    numbers = constant_of(axes)
    assert data is not None
    if axes is not None and numbers is None:
        return None
    keepdims = node.attributes.get_int("keepdims", 1)
    if numbers:
        return (make.op(node.op_type, data, axes=numbers, keepdims=keepdims, dtype=data.dtype),)
    if not noop:
        return (make.op(node.op_type, data, keepdims=keepdims, dtype=data.dtype),)
    if node.op_type in ("ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum"):
        return (make.op("Identity", data, dtype=data.dtype),)
    return None


def _reshape(node: ir.Node, version: int, make: Builder) -> Sequence[ir.Value] | None:
    """Return a zero in a shape meant the input's size there, never a size of zero, before opset 14.

    The shape may stay where it has no zero, or has one only where the input has one. Where one size may be zero, it is
    found from the others. Otherwise the input gets as many dimensions as the output has, first: one element has size 1
    in each, and none has size 0 in each, as a zero in the shape then means.
    """
    data, shape = node.inputs
    (result,) = node.outputs
    if not node.attributes.get_int("allowzero", 0):
        return None
    assert data is not None
    assert shape is not None
    sizes = _sizes(constant_of(shape), result, shape)
    mine = list(data.shape) if data.shape is not None else []
    doubtful = [axis for axis, size in enumerate(sizes) if not isinstance(size, int) or size == 0]
    if all(axis < len(mine) and _same(mine[axis], sizes[axis]) for axis in doubtful):
        return (make.op("Reshape", data, shape, dtype=data.dtype),)
    if len(doubtful) == 1:
        wanted = [-1 if axis in doubtful else size for axis, size in enumerate(sizes)]
        return (make.op("Reshape", data, make.ints([int(size) for size in wanted]), dtype=data.dtype),)  # type: ignore[arg-type]
    rank = len(sizes)
    count = make.op("Size", data, dtype=_INT64)
    ends = make.op("Expand", count, make.ints([rank - 1]), dtype=_INT64)
    tall = make.op("Reshape", data, make.ints([-1] + [1] * (rank - 1)), dtype=data.dtype)
    every = make.op("Slice", tall, make.ints([0] * (rank - 1)), ends, make.ints(range(1, rank)), dtype=data.dtype)
    return (make.op("Reshape", every, shape, dtype=data.dtype),)


def _sizes(constant: list[int] | None, result: ir.Value, shape: ir.Value) -> list[int | ir.SymbolicDim | None]:
    """Give the known facts about the sizes that a reshape asks for. A -1 cannot become zero where zero is a size."""
    if constant is not None:
        return [*constant]
    if result.shape is not None:
        return list(result.shape)
    if shape.shape is not None and len(shape.shape) == 1 and isinstance(shape.shape[0], int):
        return [None] * shape.shape[0]
    raise InexpressibleError("before opset 14 a size of zero had no form, and how many sizes there are is not known")


def _same(mine: int | ir.SymbolicDim, wanted: int | ir.SymbolicDim | None) -> bool:
    if isinstance(mine, ir.SymbolicDim) and isinstance(wanted, ir.SymbolicDim):
        return mine.value is not None and mine.value == wanted.value
    return mine == 0 and wanted == 0


_Rewrite = Callable[[ir.Node, int, Builder], Sequence[ir.Value] | None]

_REDUCTIONS = ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "SumSquare")

_REWRITES: Mapping[str, tuple[int, _Rewrite]] = {
    "GridSample": (20, _grid_sample),
    "Pad": (18, _pad),
    **{f"Reduce{name}": (18, _reduction) for name in _REDUCTIONS},
    "ReduceSum": (13, _reduction),
    "Reshape": (14, _reshape),
    "Shape": (15, _shape),
    "Split": (18, _split),
}
"""Operator -> the opset that made the form needless, and the form."""
