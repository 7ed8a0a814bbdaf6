"""Joins the saved models of one compile, with or without the backward's, and torch's calls between sessions.

docs/how_to/see_the_graphs.md describes the model, for those who read it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import numpy as np
import onnx_ir as ir
import torch
from onnx_ir.passes.common import RemoveUnusedNodesPass, RemoveUnusedOpsetsPass

from ort_dynamo.errors import InvalidArgumentError
from ort_dynamo.graph.build import Stage
from ort_dynamo.graph.dtypes import TORCH_TO_ONNX
from ort_dynamo.saving.torch_calls import JoinedGraph, spelled

__all__ = ["TORCH_DOMAIN", "join_models"]

TORCH_DOMAIN = "org.pytorch.aten"
"""The domain of nodes that torch runs, each an `ATen` with the operator's name, as ORTModule had them."""


_STAGES: tuple[str, ...] = get_args(Stage)


def join_models(path: str | Path, stage: str, *, backward: bool = True) -> ir.Model:
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
        InvalidArgumentError: there is no such stage, or `path` is a folder or another file.
    """
    path = Path(path)
    if stage not in _STAGES:
        expected = " or ".join([", ".join(map(repr, _STAGES[:-1])), repr(_STAGES[-1])])
        raise InvalidArgumentError(function="join_models", name="stage", value=stage, expected=expected)
    description = _described(path)
    join = _Join(path.parent, stage)
    for graph in description["graphs"]:
        if backward or graph["role"] != "backward":
            join.add(graph)
    return join.model(str(description["program"]))


def _described(path: Path) -> Mapping[str, Any]:
    """Read the JSON file of a compile; raise InvalidArgumentError for a folder and for any other file."""
    expected = "the .json file of a compile"
    if path.is_dir():
        found = ", ".join(one.name for one in sorted(path.glob("*.json"))) or "none"
        expected = f"{expected}; this folder has: {found}"
    else:
        try:
            description = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            description = None
        if isinstance(description, dict) and {"graphs", "program"} <= description.keys():
            return description
    raise InvalidArgumentError(function="join_models", name="path", value=str(path), expected=expected)


class _Join(JoinedGraph):
    """A model that is being joined.

    Args:
        folder: the folder of the models.
        stage: the stage of each island's model.
    """

    def __init__(self, folder: Path, stage: str) -> None:
        super().__init__()
        self._folder = folder
        self._stage = stage
        self._functions: list[ir.Function] = []
        self._returned: dict[tuple[str, ir.Value], None] = {}

    def add(self, graph: Mapping[str, Any]) -> None:
        """Add a graph; each value that it reads and no graph before gives is an input."""
        for one in graph["inputs"]:
            if one["value"] not in self.values:
                value = ir.Value(name=self.names.fresh(one["value"]), **_typed(one))
                self.graph.inputs.append(value)
                self.values[one["value"]] = value
        for step in graph["steps"]:
            if "island" in step:
                self._add_island(step)
            elif "call" in step:
                self.values[step["value"]] = self._call(step)
            elif "dtype" in step:  # otherwise the graph of a higher-order operator, which torch runs
                self.values[step["value"]] = self.constant(self._content(step), step["value"])
        for one in graph["outputs"][: graph["returned"]]:
            if one is not None:
                self._returned[one.get("name", one["value"]), self.values[one["value"]]] = None
        for one in graph["outputs"][graph["returned"] :]:
            if isinstance(one, dict) and "name" in one:  # equal values that are saved have a name each
                self.values.setdefault(one["name"], self.values[one["value"]])

    def model(self, name: str) -> ir.Model:
        """Finish the model."""
        taken = set(self.graph.inputs)
        for called, value in self._returned:
            if value in taken:  # it is an input or another output
                value = self.node("Identity", [value], called, type=value.type, shape=value.shape)
            taken.add(value)
            self.graph.outputs.append(value)
        self.graph.name = name
        model = ir.Model(self.graph, ir_version=10, producer_name="ort_dynamo", functions=self._functions)
        RemoveUnusedNodesPass()(model)  # such as values that only a backward reads that is left out
        RemoveUnusedOpsetsPass()(model)
        return model

    def _content(self, step: Mapping[str, Any]) -> ir.TensorProtocol:
        dtype = TORCH_TO_ONNX.get(getattr(torch, step["dtype"])) or ir.DataType.from_numpy(np.dtype(step["dtype"]))
        if "data" in step:
            content = np.asarray(step["data"], np.float64 if dtype.is_floating_point() else None)
            return ir.tensor(content.reshape(step["shape"]).astype(dtype.numpy()), dtype=dtype)
        raw = np.fromfile(self._folder / step["file"], dtype.numpy())
        return ir.tensor(raw.reshape(step["shape"]), dtype=dtype)

    def _call(self, step: Mapping[str, Any]) -> ir.Value:
        typed = _typed(step) if "dtype" in step else {}
        found = spelled(self, step, typed)
        if found is not None:
            return found
        read = list(dict.fromkeys(_names_in([step["args"], step["kwargs"]])))
        operator, _, overload = str(step["call"]).removeprefix("aten.").rpartition(".")
        attributes = {
            "operator": operator,
            "overload_name": overload,
            "arguments": json.dumps({"args": step["args"], "kwargs": step["kwargs"], "inputs": read}),
        }
        inputs = [self.values[name] for name in read if name in self.values]
        return self.node("ATen", inputs, step["value"], attributes, domain=TORCH_DOMAIN, **typed)

    def _add_island(self, step: Mapping[str, Any]) -> None:
        if self._stage not in step["files"]:
            raise FileNotFoundError(f"there is no model of {step['island']} at the stage {self._stage!r}")
        model = ir.load(self._folder / step["files"][self._stage])
        graph = model.graph
        self._functions += model.functions.values()
        for domain, version in graph.opset_imports.items():
            self.graph.opset_imports[domain] = max(version, self.graph.opset_imports.get(domain, 0))
        outputs = tuple(graph.outputs)
        graph.outputs.clear()
        for value in tuple(graph.initializers.values()):
            del graph.initializers[str(value.name)]
            value.name = self.names.fresh(str(value.name))
            self.graph.register_initializer(value)
        # A model that two islands share has names of one of them: the step maps them to its own.
        for node in graph.all_nodes():
            node.name = self.node_names.fresh(str(node.name))
            for value in node.outputs:
                if value.name and value not in outputs:
                    value.name = self.names.fresh(value.name)
        for value, one in zip(graph.inputs, step["inputs"], strict=True):
            ir.convenience.replace_all_uses_with(value, self._entering(one))
        nodes = tuple(graph)
        graph.remove(nodes)
        self.graph.extend(nodes)
        for value, one in zip(outputs, step["outputs"], strict=True):
            called = one["value"] or one["name"]
            if "order" not in one:
                value.name = self.names.fresh(called)
                self.values[called] = value
                continue
            value.name = self.names.fresh(f"{called}/ordered")
            back = np.argsort(one["order"]).tolist()
            self.values[called] = self.transposed(value, back, called)

    def _entering(self, one: Mapping[str, Any]) -> ir.Value:
        """Give the value that an island's input reads: a value or a constant, in the form that its session takes."""
        value = (
            self.values[one["value"]]
            if "value" in one
            else self.constant(np.asarray(one["given"], one["dtype"]), f"{one['name']}/given")
        )
        if one.get("number") == "rows":
            return self.rows(value, f"{value.name}/rows")
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
