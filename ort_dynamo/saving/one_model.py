"""Joins the saved models of one compile, with or without the backward's, and torch's calls between sessions.

docs/how_to/see_the_graphs.md describes the model, for those who read it.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from onnx_ir.passes.common import RemoveUnusedNodesPass, RemoveUnusedOpsetsPass

from ort_dynamo.graph.dtypes import TORCH_TO_ONNX
from ort_dynamo.passes.onnx.analysis.value_names import UniqueNames
from ort_dynamo.targets.target import OPSET

__all__ = ["TORCH_DOMAIN", "join_models"]

TORCH_DOMAIN = "org.pytorch.aten"
"""The domain of nodes that torch runs, each an `ATen` with the operator's name, as ORTModule had them."""


def join_models(path: Path, stage: str, *, backward: bool = True) -> ir.Model:
    """Join the models of one compile into one model.

    Its inputs are those of the forward and the gradients of the forward's results; its outputs are the updated buffers,
    the results, and the gradients. torch's calls between sessions become ONNX nodes if they are views, copies or
    arithmetic on sizes, but for `as_strided` and views as another type. Otherwise they become an `ATen` node, for which
    no InferenceSession has a kernel.

    Args:
        path: the JSON file of the compile; its models are beside it.
        stage: "lowered", "rewritten" or "optimized".
        backward: also join the backward, if there is one.

    Raises:
        FileNotFoundError: a model is missing, or was not saved at this stage.
    """
    description = json.loads(path.read_text())
    join = _Join(path.parent, stage)
    for graph in description["graphs"]:
        if backward or graph["role"] != "backward":
            join.add(graph)
    return join.model(str(description["program"]))


class _Join:
    """A model that is being joined.

    Args:
        folder: the folder of the models.
        stage: the stage of each island's model.
    """

    def __init__(self, folder: Path, stage: str) -> None:
        self._folder = folder
        self._stage = stage
        self._graph = ir.Graph([], [], nodes=[], opset_imports={"": OPSET})
        self._functions: list[ir.Function] = []
        self._values: dict[str, ir.Value] = {}
        self._returned: dict[str, ir.Value] = {}
        self.pieces: dict[str, Sequence[_Piece]] = {}
        self._names = UniqueNames()
        self._node_names = UniqueNames()

    def add(self, graph: Mapping[str, Any]) -> None:
        """Add a graph; each value that it reads and no graph before gives is an input."""
        for one in graph["inputs"]:
            if one["value"] not in self._values:
                value = ir.Value(name=self._names.fresh(one["value"]), **_typed(one))
                self._graph.inputs.append(value)
                self._values[one["value"]] = value
        for step in graph["steps"]:
            if "island" in step:
                self._add_island(step)
            elif "call" in step:
                self._values[step["value"]] = self._call(step)
            elif "dtype" in step:  # otherwise the graph of a higher-order operator, which torch runs
                self._values[step["value"]] = self.constant(self._content(step), step["value"])
        for one in graph["outputs"][: graph["returned"]]:
            if one is not None:
                self._returned.setdefault(one["value"], self._values[one["value"]])

    def model(self, name: str) -> ir.Model:
        """Finish the model."""
        taken = set(self._graph.inputs)
        for called, value in self._returned.items():
            if value in taken:  # it is an input or another output
                value = self.node("Identity", [value], called, type=value.type, shape=value.shape)
            taken.add(value)
            self._graph.outputs.append(value)
        self._graph.name = name
        model = ir.Model(self._graph, ir_version=10, producer_name="ort_dynamo", functions=self._functions)
        RemoveUnusedNodesPass()(model)  # such as values that only a backward reads that is left out
        RemoveUnusedOpsetsPass()(model)
        return model

    def value(self, argument: Any) -> ir.Value | None:
        """Return the value that an argument of a call names, or None."""
        return self._values.get(argument.get("value", "")) if isinstance(argument, dict) else None

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
        self, op_type: str, inputs: Sequence[ir.Value], called: str, attributes: Mapping[str, Any] = {}, **typed: Any
    ) -> ir.Value:
        """Append a node of one output, whose name is the node's, too."""
        domain = TORCH_DOMAIN if op_type == "ATen" else ""
        self._graph.opset_imports.setdefault(domain, 1)
        result = ir.Value(name=self._names.fresh(called), **typed)
        name = self._node_names.fresh(called)
        self._graph.append(ir.node(op_type, inputs, dict(attributes), domain=domain, outputs=[result], name=name))
        return result

    def transposed(self, value: ir.Value, order: Sequence[int], called: str) -> ir.Value:
        """Return a value with its dimensions in another order."""
        shape = None if value.shape is None else ir.Shape([value.shape[axis] for axis in order])
        return self.node("Transpose", [value], called, {"perm": list(order)}, type=value.type, shape=shape)

    def constant(self, content: np.ndarray[Any, Any] | ir.TensorProtocol, called: str) -> ir.Value:
        """Add a constant."""
        tensor = ir.tensor(content)
        type_, shape = ir.TensorType(tensor.dtype), ir.Shape(tensor.numpy().shape)
        value = ir.Value(name=self._names.fresh(called), const_value=tensor, type=type_, shape=shape)
        self._graph.register_initializer(value)
        return value

    def _content(self, step: Mapping[str, Any]) -> ir.TensorProtocol:
        dtype = TORCH_TO_ONNX[getattr(torch, step["dtype"])]
        if "data" in step:
            content = np.asarray(step["data"], np.float64 if dtype.is_floating_point() else None)
            return ir.tensor(content.reshape(step["shape"]).astype(dtype.numpy()), dtype=dtype)
        raw = np.fromfile(self._folder / step["file"], dtype.numpy())
        return ir.tensor(raw.reshape(step["shape"]), dtype=dtype)

    def _call(self, step: Mapping[str, Any]) -> ir.Value:
        typed = _typed(step) if "dtype" in step else {}
        spelled = _ONNX.get(step["call"])
        found = None if spelled is None else spelled(self, step["args"], step["value"], typed)
        if found is not None:
            return found
        read = list(dict.fromkeys(_names_in([step["args"], step["kwargs"]])))
        operator, _, overload = str(step["call"]).removeprefix("aten.").rpartition(".")
        attributes = {
            "operator": operator,
            "overload_name": overload,
            "arguments": json.dumps({"args": step["args"], "kwargs": step["kwargs"], "inputs": read}),
        }
        inputs = [self._values[name] for name in read if name in self._values]
        return self.node("ATen", inputs, step["value"], attributes, **typed)

    def _add_island(self, step: Mapping[str, Any]) -> None:
        if self._stage not in step["files"]:
            raise FileNotFoundError(f"there is no model of {step['island']} at the stage {self._stage!r}")
        model = ir.load(self._folder / step["files"][self._stage])
        graph = model.graph
        self._functions += model.functions.values()
        for domain, version in graph.opset_imports.items():
            self._graph.opset_imports[domain] = max(version, self._graph.opset_imports.get(domain, 0))
        outputs = tuple(graph.outputs)
        graph.outputs.clear()
        for value in tuple(graph.initializers.values()):
            del graph.initializers[str(value.name)]
            value.name = self._names.fresh(str(value.name))
            self._graph.register_initializer(value)
        # A model that two islands share has names of one of them: the step maps them to its own.
        for node in graph.all_nodes():
            node.name = self._node_names.fresh(str(node.name))
            for value in node.outputs:
                if value.name and value not in outputs:
                    value.name = self._names.fresh(value.name)
        for value, one in zip(graph.inputs, step["inputs"], strict=True):
            ir.convenience.replace_all_uses_with(value, self._entering(one))
        nodes = tuple(graph)
        graph.remove(nodes)
        self._graph.extend(nodes)
        for value, one in zip(outputs, step["outputs"], strict=True):
            called = one["value"] or one["name"]
            if "order" not in one:
                value.name = self._names.fresh(called)
                self._values[called] = value
                continue
            value.name = self._names.fresh(f"{called}/ordered")
            back = np.argsort(one["order"]).tolist()
            self._values[called] = self.transposed(value, back, called)

    def _entering(self, one: Mapping[str, Any]) -> ir.Value:
        """Give the value that an island's input reads: a value, permuted if its session sees it so, or a constant."""
        if "value" not in one:
            return self.constant(np.asarray(one["given"], one["dtype"]), f"{one['name']}/given")
        value = self._values[one["value"]]
        return self.transposed(value, one["order"], f"{value.name}/ordered") if "order" in one else value


def _typed(one: Mapping[str, Any]) -> dict[str, Any]:
    """Give the type and shape of a value; a scalar has no shape."""
    dtype = TORCH_TO_ONNX.get(getattr(torch, str(one.get("dtype")), torch.complex64))
    if dtype is None:
        return {}
    return {"type": ir.TensorType(dtype), "shape": ir.Shape(one.get("shape", []))}


def _names_in(argument: Any) -> Iterator[str]:
    if isinstance(argument, dict):
        if "value" in argument:
            yield argument["value"]
        else:
            yield from _names_in(list(argument.values()))
    elif isinstance(argument, list):
        for one in argument:
            yield from _names_in(one)


_Spelled = Callable[[_Join, list[Any], str, dict[str, Any]], ir.Value | None]
_Piece = Callable[[str, dict[str, Any]], ir.Value]


def _source(join: _Join, args: Sequence[Any]) -> ir.Value:
    value = join.value(args[0])
    assert value is not None, f"{args[0]} is not a value"
    return value


def _same(join: _Join, args: list[Any], called: str, typed: dict[str, Any]) -> ir.Value:
    return join.node("Identity", [_source(join, args)], called, **typed)


def _reshaped(join: _Join, args: list[Any], called: str, typed: dict[str, Any]) -> ir.Value:
    return join.node("Reshape", [_source(join, args), join.sizes(args[1], called)], called, {"allowzero": 1}, **typed)


def _expanded(join: _Join, args: list[Any], called: str, typed: dict[str, Any]) -> ir.Value:
    sizes = join.sizes([1 if size == -1 else size for size in args[1]], called)
    return join.node("Expand", [_source(join, args), sizes], called, **typed)


def _unsqueezed(join: _Join, args: list[Any], called: str, typed: dict[str, Any]) -> ir.Value:
    return join.node("Unsqueeze", [_source(join, args), join.sizes([args[1]], called)], called, **typed)


def _squeezed(join: _Join, args: list[Any], called: str, typed: dict[str, Any]) -> ir.Value | None:
    source = _source(join, args)
    if source.shape is None:
        return None
    rank = len(source.shape)
    given = args[1] if args[1:] else list(range(rank))
    axes = {axis % rank for axis in (given if isinstance(given, list) else [given])} if rank else set()
    ones = [axis for axis in sorted(axes) if source.shape[axis] == 1]
    return join.node("Squeeze", [source, join.sizes(ones, called)] if ones else [source], called, **typed)


def _swapped(join: _Join, args: list[Any], called: str, typed: dict[str, Any]) -> ir.Value:
    source = _source(join, args)
    rank = len(typed["shape"])
    order = list(range(rank))
    if rank > 1:
        first, second = args[1:] or (0, 1)
        order[first], order[second] = order[second], order[first]
    return join.transposed(source, order, called)


def _permuted(join: _Join, args: list[Any], called: str, typed: dict[str, Any]) -> ir.Value:
    return join.transposed(_source(join, args), [axis % len(args[1]) for axis in args[1]], called)


def _sliced(join: _Join, args: list[Any], called: str, typed: dict[str, Any]) -> ir.Value:
    given: list[Any] = [*args[1:], *(0, None, None, 1)[len(args) - 1 :]]
    axis, start, end, step = given
    return _slice(join, _source(join, args), axis, (0 if start is None else start, end, step), called, typed)


def _slice(
    join: _Join, source: ir.Value, axis: int, bounds: tuple[Any, Any, Any], called: str, typed: dict[str, Any]
) -> ir.Value:
    start, end, step = bounds
    ends = sys.maxsize if end is None else end
    parts = (start, ends, axis, step)
    return join.node("Slice", [source, *(join.size(one, called) for one in parts)], called, **typed)


def _selected(join: _Join, args: list[Any], called: str, typed: dict[str, Any]) -> ir.Value:
    return _entry(join, _source(join, args), args[1], args[2], called, typed)


def _entry(join: _Join, source: ir.Value, axis: int, index: Any, called: str, typed: dict[str, Any]) -> ir.Value:
    place = join.value(index) or join.constant(np.asarray(index, np.int64), f"{called}/index")
    return join.node("Gather", [source, place], called, {"axis": axis}, **typed)


def _unbound(join: _Join, args: list[Any], called: str, typed: dict[str, Any]) -> ir.Value | None:
    source, axis = _source(join, args), args[1] if args[1:] else 0
    count = None if source.shape is None else source.shape[axis]
    if not isinstance(count, int):
        return None
    join.pieces[called] = [partial(_entry, join, source, axis, index) for index in range(count)]
    return source


def _split(join: _Join, args: list[Any], called: str, typed: dict[str, Any]) -> ir.Value | None:
    source, axis = _source(join, args), args[2] if args[2:] else 0
    count = None if source.shape is None else source.shape[axis]
    sizes = args[1]
    if isinstance(sizes, int) and isinstance(count, int):
        sizes = [sizes] * -(-count // max(sizes, 1))
    if not (isinstance(sizes, list) and all(isinstance(one, int) for one in sizes)):
        return None
    ends = list(accumulate(sizes))
    bounds = [(end - size, end, 1) for end, size in zip(ends, sizes, strict=True)]
    join.pieces[called] = [partial(_slice, join, source, axis, one) for one in bounds]
    return source


def _piece(join: _Join, args: list[Any], called: str, typed: dict[str, Any]) -> ir.Value | None:
    pieces = join.pieces.get(args[0].get("value", "")) if isinstance(args[0], dict) else None
    return None if pieces is None else pieces[args[1]](called, typed)


def _gathered(view: Callable[..., torch.Tensor]) -> _Spelled:
    """Spell a view of a tensor of known sizes as a lookup of its elements."""

    def spelled(join: _Join, args: list[Any], called: str, typed: dict[str, Any]) -> ir.Value | None:
        source = _source(join, args)
        if source.shape is None or not source.shape.is_static():
            return None
        sizes = source.shape.numpy()
        places = view(torch.arange(math.prod(sizes)).view(sizes), *args[1:]).numpy()
        flat = join.node("Reshape", [source, join.sizes([-1], called)], f"{called}/flat")
        return join.node("Gather", [flat, join.constant(places, f"{called}/places")], called, **typed)

    return spelled


def _size(join: _Join, args: list[Any], called: str, typed: dict[str, Any]) -> ir.Value:
    axis = args[1]
    bounds = {"start": axis, "end": axis + 1} if axis != -1 else {"start": -1}
    vector = join.node("Shape", [_source(join, args)], f"{called}/vector", bounds)
    return join.node("Squeeze", [vector], called, **typed)


def _arithmetic(op_type: str) -> _Spelled:
    def spelled(join: _Join, args: list[Any], called: str, typed: dict[str, Any]) -> ir.Value:
        parts = [join.size(one, called) for one in args]
        return join.node("Squeeze", [join.node(op_type, parts, f"{called}/vector")], called, **typed)

    return spelled


_ONNX: Mapping[str, _Spelled] = {
    "_operator.add": _arithmetic("Add"),
    "_operator.floordiv": _arithmetic("Div"),
    "_operator.getitem": _piece,
    "_operator.mul": _arithmetic("Mul"),
    "_operator.sub": _arithmetic("Sub"),
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
    "ort_dynamo.passes.fx.copy_small_results.owned": _same,
}
"""ONNX's spellings of operators that torch runs between sessions; all else is an ATen node."""
