"""Spells torch's calls between sessions as ONNX nodes: views, copies and arithmetic on sizes."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from ort_dynamo.passes.onnx.analysis.value_names import UniqueNames
from ort_dynamo.targets.target import OPSET

__all__ = ["JoinedGraph", "spelled"]


class JoinedGraph:
    """An ONNX graph to which nodes are added.

    Attributes:
        graph: the graph.
        values: a name of the program's description -> its value.
        pieces: the name of a call that gives several views -> the functions that add each.
        names: the names of values.
        node_names: the names of nodes.
    """

    def __init__(self) -> None:
        self.graph: ir.Graph = ir.Graph([], [], nodes=[], opset_imports={"": OPSET})
        self.values: dict[str, ir.Value] = {}
        self.pieces: dict[str, Sequence[_Piece]] = {}
        self.names: UniqueNames = UniqueNames()
        self.node_names: UniqueNames = UniqueNames()

    def value(self, argument: Any) -> ir.Value | None:
        """Return the value that an argument of a call names, or None."""
        return self.values.get(argument.get("value", "")) if isinstance(argument, dict) else None

    def sizes(self, arguments: Sequence[Any], called: str) -> ir.Value:
        """Return a vector of sizes, given as integers and values."""
        if all(isinstance(one, int) for one in arguments):
            return self.constant(np.asarray(arguments, np.int64), f"{called}/sizes")
        parts = [self.size(one, called) for one in arguments]
        return self.node("Concat", parts, f"{called}/sizes", {"axis": 0})

    def size(self, argument: Any, called: str) -> ir.Value:
        """One size as a vector of one element."""
        value = self.value(argument)
        if value is None:
            return self.constant(np.asarray([argument], np.int64), f"{called}/size")
        return self.node("Reshape", [value, self.constant(np.asarray([1], np.int64), "one")], f"{called}/size")

    def node(
        self,
        op_type: str,
        inputs: Sequence[ir.Value],
        called: str,
        attributes: Mapping[str, Any] = {},
        *,
        domain: str = "",
        **typed: Any,
    ) -> ir.Value:
        """Append a node of one output, whose name is the node's, too."""
        self.graph.opset_imports.setdefault(domain, 1)
        result = ir.Value(name=self.names.fresh(called), **typed)
        name = self.node_names.fresh(called)
        self.graph.append(ir.node(op_type, inputs, dict(attributes), domain=domain, outputs=[result], name=name))
        return result

    def transposed(self, value: ir.Value, order: Sequence[int], called: str) -> ir.Value:
        """Return a value with its dimensions in another order."""
        shape = None if value.shape is None else ir.Shape([value.shape[axis] for axis in order])
        return self.node("Transpose", [value], called, {"perm": list(order)}, type=value.type, shape=shape)

    def rows(self, number: ir.Value, called: str) -> ir.Value:
        """Return an empty matrix with this number of rows."""
        one, nothing = (self.constant(np.asarray([size], np.int64), called) for size in (1, 0))
        rows = self.node("Reshape", [number, one], called)
        shape = self.node("Concat", [rows, nothing], called, {"axis": 0})
        value = ir.tensor(np.zeros(1, np.int64))
        return self.node("ConstantOfShape", [shape], called, {"value": value}, type=ir.TensorType(value.dtype))

    def constant(self, content: np.ndarray[Any, Any] | ir.TensorProtocol, called: str) -> ir.Value:
        """Add a constant."""
        tensor = ir.tensor(content)
        type_, shape = ir.TensorType(tensor.dtype), ir.Shape(tensor.numpy().shape)
        value = ir.Value(name=self.names.fresh(called), const_value=tensor, type=type_, shape=shape)
        self.graph.register_initializer(value)
        return value


_Spelled = Callable[[JoinedGraph, list[Any], str, dict[str, Any]], ir.Value | None]
_Piece = Callable[[str, dict[str, Any]], ir.Value]


def _source(joined: JoinedGraph, args: Sequence[Any]) -> ir.Value:
    value = joined.value(args[0])
    assert value is not None, f"{args[0]} is not a value"
    return value


def _same(joined: JoinedGraph, args: list[Any], called: str, typed: dict[str, Any]) -> ir.Value:
    return joined.node("Identity", [_source(joined, args)], called, **typed)


def _reshaped(joined: JoinedGraph, args: list[Any], called: str, typed: dict[str, Any]) -> ir.Value:
    return joined.node(
        "Reshape", [_source(joined, args), joined.sizes(args[1], called)], called, {"allowzero": 1}, **typed
    )


def _expanded(joined: JoinedGraph, args: list[Any], called: str, typed: dict[str, Any]) -> ir.Value:
    sizes = joined.sizes([1 if size == -1 else size for size in args[1]], called)
    return joined.node("Expand", [_source(joined, args), sizes], called, **typed)


def _unsqueezed(joined: JoinedGraph, args: list[Any], called: str, typed: dict[str, Any]) -> ir.Value:
    return joined.node("Unsqueeze", [_source(joined, args), joined.sizes([args[1]], called)], called, **typed)


def _squeezed(joined: JoinedGraph, args: list[Any], called: str, typed: dict[str, Any]) -> ir.Value | None:
    source = _source(joined, args)
    if source.shape is None:
        return None
    rank = len(source.shape)
    given = args[1] if args[1:] else list(range(rank))
    axes = {axis % rank for axis in (given if isinstance(given, list) else [given])} if rank else set()
    ones = [axis for axis in sorted(axes) if source.shape[axis] == 1]
    if not ones:  # without axes, Squeeze would remove each dimension of one
        return joined.node("Identity", [source], called, **typed)
    return joined.node("Squeeze", [source, joined.sizes(ones, called)], called, **typed)


def _swapped(joined: JoinedGraph, args: list[Any], called: str, typed: dict[str, Any]) -> ir.Value:
    source = _source(joined, args)
    rank = len(typed["shape"])
    order = list(range(rank))
    if rank > 1:
        first, second = args[1:] or (0, 1)
        order[first], order[second] = order[second], order[first]
    return joined.transposed(source, order, called)


def _permuted(joined: JoinedGraph, args: list[Any], called: str, typed: dict[str, Any]) -> ir.Value:
    return joined.transposed(_source(joined, args), [axis % len(args[1]) for axis in args[1]], called)


def _sliced(joined: JoinedGraph, args: list[Any], called: str, typed: dict[str, Any]) -> ir.Value:
    given: list[Any] = [*args[1:], *(0, None, None, 1)[len(args) - 1 :]]
    axis, start, end, step = given
    return _slice(joined, _source(joined, args), axis, (0 if start is None else start, end, step), called, typed)


def _slice(
    joined: JoinedGraph, source: ir.Value, axis: int, bounds: tuple[Any, Any, Any], called: str, typed: dict[str, Any]
) -> ir.Value:
    start, end, step = bounds
    ends = sys.maxsize if end is None else end
    parts = (start, ends, axis, step)
    return joined.node("Slice", [source, *(joined.size(one, called) for one in parts)], called, **typed)


def _selected(joined: JoinedGraph, args: list[Any], called: str, typed: dict[str, Any]) -> ir.Value:
    return _entry(joined, _source(joined, args), args[1], args[2], called, typed)


def _entry(
    joined: JoinedGraph, source: ir.Value, axis: int, index: Any, called: str, typed: dict[str, Any]
) -> ir.Value:
    place = joined.value(index) or joined.constant(np.asarray(index, np.int64), f"{called}/index")
    return joined.node("Gather", [source, place], called, {"axis": axis}, **typed)


def _unbound(joined: JoinedGraph, args: list[Any], called: str, typed: dict[str, Any]) -> ir.Value | None:
    source, axis = _source(joined, args), args[1] if args[1:] else 0
    count = None if source.shape is None else source.shape[axis]
    if not isinstance(count, int):
        return None
    joined.pieces[called] = [partial(_entry, joined, source, axis, index) for index in range(count)]
    return source


def _split(joined: JoinedGraph, args: list[Any], called: str, typed: dict[str, Any]) -> ir.Value | None:
    source, axis = _source(joined, args), args[2] if args[2:] else 0
    count = None if source.shape is None else source.shape[axis]
    sizes = args[1]
    if isinstance(sizes, int) and isinstance(count, int):
        sizes = [sizes] * -(-count // max(sizes, 1))
    if not (isinstance(sizes, list) and all(isinstance(one, int) for one in sizes)):
        return None
    ends = list(accumulate(sizes))
    bounds = [(end - size, end, 1) for end, size in zip(ends, sizes, strict=True)]
    joined.pieces[called] = [partial(_slice, joined, source, axis, one) for one in bounds]
    return source


def _piece(joined: JoinedGraph, args: list[Any], called: str, typed: dict[str, Any]) -> ir.Value | None:
    pieces = joined.pieces.get(args[0].get("value", "")) if isinstance(args[0], dict) else None
    return None if pieces is None else pieces[args[1]](called, typed)


def _gathered(view: Callable[..., torch.Tensor]) -> _Spelled:
    """Spell a view of a tensor of known sizes as a lookup of its elements."""

    def spelled(joined: JoinedGraph, args: list[Any], called: str, typed: dict[str, Any]) -> ir.Value | None:
        source = _source(joined, args)
        if source.shape is None or not source.shape.is_static():
            return None
        sizes = source.shape.numpy()
        places = view(torch.arange(math.prod(sizes)).view(sizes), *args[1:]).numpy()
        flat = joined.node("Reshape", [source, joined.sizes([-1], called)], f"{called}/flat")
        return joined.node("Gather", [flat, joined.constant(places, f"{called}/places")], called, **typed)

    return spelled


def _size(joined: JoinedGraph, args: list[Any], called: str, typed: dict[str, Any]) -> ir.Value:
    axis = args[1]
    bounds = {"start": axis, "end": axis + 1} if axis != -1 else {"start": -1}
    vector = joined.node("Shape", [_source(joined, args)], f"{called}/vector", bounds)
    return joined.node("Squeeze", [vector], called, **typed)


def _arithmetic(op_type: str, *, of_floats: bool = False) -> _Spelled:
    """Spell arithmetic on numbers: of int64, or of float64 where one of them is a float, or always."""

    def spelled(joined: JoinedGraph, args: list[Any], called: str, typed: dict[str, Any]) -> ir.Value:
        dtype = _FLOAT if of_floats or _has_float(joined, args) else ir.DataType.INT64
        return joined.node(op_type, [_number(joined, one, dtype, called) for one in args], called, **_of(dtype))

    return spelled


def _rounded(op_type: str | None) -> _Spelled:
    """Spell a conversion to an integer, which rounds as an operator does, or else towards zero."""

    def spelled(joined: JoinedGraph, args: list[Any], called: str, typed: dict[str, Any]) -> ir.Value | None:
        if args[1:] not in ([], [None]):  # to a number of decimals
            return None
        number = _number(joined, args[0], _FLOAT, called)
        if op_type is not None:
            number = joined.node(op_type, [number], f"{called}/{op_type.lower()}", **_of(_FLOAT))
        return joined.node("Cast", [number], called, {"to": ir.DataType.INT64}, **_of(ir.DataType.INT64))

    return spelled


def _floor_divided(joined: JoinedGraph, args: list[Any], called: str, typed: dict[str, Any]) -> ir.Value | None:
    if _has_float(joined, args):
        return None
    integers = _of(ir.DataType.INT64)
    number, divisor = (_number(joined, one, ir.DataType.INT64, called) for one in args)
    rest = joined.node("Mod", [number, divisor], f"{called}/rest", **integers)  # it has the divisor's sign
    whole = joined.node("Sub", [number, rest], f"{called}/whole", **integers)
    return joined.node("Div", [whole, divisor], called, **integers)


def _remainder(joined: JoinedGraph, args: list[Any], called: str, typed: dict[str, Any]) -> ir.Value | None:
    return None if _has_float(joined, args) else _arithmetic("Mod")(joined, args, called, typed)


def _power(joined: JoinedGraph, args: list[Any], called: str, typed: dict[str, Any]) -> ir.Value | None:
    exponent = args[1]
    if _has_float(joined, args) or (type(exponent) is int and exponent >= 0):
        return _arithmetic("Pow")(joined, args, called, typed)
    return None


_FLOAT = ir.DataType.DOUBLE
"""The type of Python's floats."""


def _of(dtype: ir.DataType) -> dict[str, Any]:
    return {"type": ir.TensorType(dtype), "shape": ir.Shape([])}


def _has_float(joined: JoinedGraph, arguments: Sequence[Any]) -> bool:
    """Check whether one of some numbers is a float: a constant, or a value of the graph."""
    dtypes = [value.dtype for one in arguments if (value := joined.value(one)) is not None]
    is_float = any(dtype is not None and dtype.is_floating_point() for dtype in dtypes)
    return is_float or any(isinstance(one, float) for one in arguments)


def _number(joined: JoinedGraph, argument: Any, dtype: ir.DataType, called: str) -> ir.Value:
    """Return a number as a scalar of this type."""
    value = joined.value(argument)
    if value is None:
        return joined.constant(np.asarray(argument, dtype.numpy()), f"{called}/number")
    if value.shape is None or len(value.shape):
        value = joined.node("Reshape", [value, joined.constant(np.zeros(0, np.int64), "none")], f"{called}/scalar")
    if value.dtype == dtype:
        return value
    return joined.node("Cast", [value], f"{called}/cast", {"to": dtype}, **_of(dtype))


_ONNX: Mapping[str, _Spelled] = {
    "_operator.add": _arithmetic("Add"),
    "_operator.floordiv": _floor_divided,
    "_operator.getitem": _piece,
    "_operator.mod": _remainder,
    "_operator.mul": _arithmetic("Mul"),
    "_operator.neg": _arithmetic("Neg"),
    "_operator.pow": _power,
    "_operator.sub": _arithmetic("Sub"),
    "_operator.truediv": _arithmetic("Div", of_floats=True),
    "aten._reshape_alias.default": _reshaped,
    "aten._unsafe_view.default": _reshaped,
    "aten.alias.default": _same,
    "aten.detach.default": _same,
    "aten.diagonal.default": _gathered(torch.diagonal),
    "aten.expand.default": _expanded,
    "aten.permute.default": _permuted,
    "aten.select.int": _selected,
    "aten.slice.Tensor": _sliced,
    "aten.split.Tensor": _split,
    "aten.split_with_sizes.default": _split,
    "aten.squeeze.default": _squeezed,
    "aten.squeeze.dim": _squeezed,
    "aten.squeeze.dims": _squeezed,
    "aten.sym_size.int": _size,
    "aten.t.default": _swapped,
    "aten.transpose.int": _swapped,
    "aten.unbind.int": _unbound,
    "aten.unfold.default": _gathered(torch.Tensor.unfold),
    "aten.unsqueeze.default": _unsqueezed,
    "aten.view.default": _reshaped,
    "builtins.round": _rounded("Round"),
    "math.ceil": _rounded("Ceil"),
    "math.floor": _rounded("Floor"),
    "math.trunc": _rounded(None),
    "torch.sym_float": _arithmetic("Identity", of_floats=True),
    "torch.sym_max": _arithmetic("Max"),
    "torch.sym_min": _arithmetic("Min"),
    "ort_dynamo.passes.fx.copy_small_results.owned": _same,
}


def spelled(joined: JoinedGraph, step: Mapping[str, Any], typed: dict[str, Any]) -> ir.Value | None:
    """Add the nodes of a call; None if there is no form for it.

    Args:
        joined: the graph.
        step: the call, as the program's description has it.
        typed: the type and shape of its result.
    """
    spell = _ONNX.get(step["call"])
    return None if spell is None else spell(joined, step["args"], step["value"], typed)
