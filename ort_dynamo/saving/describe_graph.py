"""Describe how the saved models of one compile connect: order, inputs, outputs, and torch's calls in between.

docs/internals/saved_formats.md describes the files, for those who read them.
"""

from __future__ import annotations

import hashlib
import math
import operator
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.fx import Node

from ort_dynamo.graph.boundary import ValueSpec
from ort_dynamo.graph.marks import READABLE, WRITTEN_FOR
from ort_dynamo.graph.model_files import write_bytes
from ort_dynamo.passes.onnx.analysis.value_names import UniqueNames
from ort_dynamo.runtime.boxed import Island
from ort_dynamo.saving.island import names_in_file, paths
from ort_dynamo.segment.segment import Segmented
from ort_dynamo.torch_internals.kernels.dispatcher import real_kernels
from ort_dynamo.torch_internals.kernels.operators import OpOverload

__all__ = ["describe_graph"]

_INLINE = 64
"""Maximum number of elements of a constant that is written as text; larger ones are binary files.

So are those with elements that JSON has no number for: NaN, infinities and complex numbers.
"""


def describe_graph(
    segmented: Segmented, role: str, folder: Path, seen: slice, names: Sequence[str | None]
) -> dict[str, Any]:
    """Describe a compiled graph by plain values: its inputs, its steps in order, its outputs.

    Args:
        segmented: the graph with compiled islands. Its nodes have READABLE in their meta, its islands WRITTEN_FOR.
        role: "forward", "backward" or "inference".
        folder: the folder of its saved models.
        seen: the outputs that the program sees; earlier ones are written back to inputs, later ones are saved tensors.
        names: the program's names for the outputs.
    """
    return _Description(segmented, folder).describe(role, seen, names)


class _Description:
    def __init__(self, segmented: Segmented, folder: Path) -> None:
        self._outer = outer = segmented.gm
        self._islands = segmented.islands
        self._folder = folder
        (self._output,) = outer.graph.find_nodes(op="output")
        unique = UniqueNames()
        # Name the outputs first: a value and its copy may have one name, and a forward's outputs have to be found.
        order = dict.fromkeys((*self._output.all_input_nodes, *outer.graph.nodes))
        self._names = {node: unique.fresh(str(node.meta.get(READABLE, node.name))) for node in order}

    def describe(self, role: str, seen: slice, names: Sequence[str | None]) -> dict[str, Any]:
        outputs = [self._returned(*pair) for pair in zip(self._output.args[0], names, strict=True)]
        return {
            "role": role,
            "inputs": [
                {"value": self._names[node], **_type(node.meta.get("val"))}
                for node in self._outer.graph.find_nodes(op="placeholder")
            ],
            "steps": [step for node in self._outer.graph.nodes if (step := self._step(node))],
            "outputs": outputs,
            "returned": len(outputs) if role != "forward" else len(outputs[: seen.stop]),
        }

    def _returned(self, value: Any, name: str | None) -> Any:
        spelled = self._spelled(value)
        has_another = isinstance(value, Node) and name not in (None, self._names[value])
        return {**spelled, "name": name} if has_another else spelled

    def _step(self, node: Node) -> dict[str, Any] | None:
        if node.op == "call_module":
            return self._island(node)
        if node.op == "get_attr":
            return self._constant(node)
        if node.op != "call_function" or _is_result(node):
            return None
        return {
            "call": _target(node.target),
            "args": self._spelled(node.args),
            "kwargs": {key: self._spelled(value) for key, value in node.kwargs.items()},
            "value": self._names[node],
            **_types(node.meta.get("val")),
        }

    def _constant(self, node: Node) -> dict[str, Any]:
        constant = operator.attrgetter(str(node.target))(self._outer)
        said = {"constant": str(node.target), "value": self._names[node]}
        if not isinstance(constant, torch.Tensor):
            return said  # the graph of a higher-order operator, which torch runs
        said |= _type(constant)
        with real_kernels():  # AOTAutograd's fake mode is on
            if constant.numel() <= _INLINE and all(map(_is_json, constant.flatten().tolist())):
                return {**said, "data": constant.tolist()}
            raw = constant.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        path = f"constants/{hashlib.sha256(raw).hexdigest()[:16]}.bin"
        write_bytes(raw, self._folder / path)
        return {**said, "file": path}

    def _island(self, call: Node) -> dict[str, Any]:
        name = str(call.target)
        island = self._outer.get_submodule(name)
        assert isinstance(island, Island)
        built, own = island.compiled.built, self._islands[name].meta[WRITTEN_FOR]
        read = [(argument, spec) for argument, spec in zip(call.args, built.inputs, strict=True) if spec.is_read]
        results = {user.args[1]: self._names[user] for user in call.users if user.target is operator.getitem}
        names = names_in_file(self._folder, built.name)
        shared = {"shared_with": names.written_for} if names is not None and names.written_for != own else {}
        return {
            "island": name,
            "files": {stage: path for stage, path in paths(built.name).items() if (self._folder / path).exists()},
            **shared,
            "inputs": [
                {**self._read(argument), **_crossing(spec, getattr(names, "inputs", None), index)}
                for index, (argument, spec) in enumerate(read)
            ],
            "outputs": [
                {"value": results.get(index), **_crossing(spec, getattr(names, "outputs", None), index)}
                for index, spec in enumerate(built.outputs)
            ],
        }

    def _read(self, argument: Any) -> dict[str, Any]:
        spelled = self._spelled(argument)
        return spelled if isinstance(spelled, dict) else {"given": spelled}

    def _spelled(self, argument: Any) -> Any:
        if isinstance(argument, Node):
            return {"value": self._names[argument]}
        if isinstance(argument, (list, tuple)):
            return [self._spelled(one) for one in argument]
        return argument if argument is None or _is_json(argument) else {"python": str(argument)}


def _is_json(value: Any) -> bool:
    """Check whether JSON has a form for a text or a number."""
    return isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value))


def _is_result(node: Node) -> bool:
    """Check whether a node takes a result out of an island."""
    source = node.args[0] if node.target is operator.getitem else None
    return isinstance(source, Node) and source.op == "call_module"


def _crossing(spec: ValueSpec, names: Sequence[str] | None, index: int) -> dict[str, Any]:
    """Describe a value that enters or leaves a session: its name, dtype, and any reordering, strides or conversion."""
    said: dict[str, Any] = {"name": names[index] if names else None, "dtype": _dtype(spec.dtype)}
    if spec.order:
        said["order"] = list(spec.order)
    if spec.strides:
        said["strides"] = list(spec.strides)
    if spec.is_number:
        said["number"] = "rows" if spec.as_rows else True
    return said


def _type(fake: Any) -> dict[str, Any]:
    if isinstance(fake, torch.Tensor):
        return {"dtype": _dtype(fake.dtype), "shape": [n if isinstance(n, int) else str(n) for n in fake.shape]}
    return {"number": True, "dtype": next((name for kind, name in _NUMBERS if isinstance(fake, kind)), None)}


_NUMBERS = (((bool, torch.SymBool), "bool"), ((int, torch.SymInt), "int64"), ((float, torch.SymFloat), "float64"))


def _types(fake: Any) -> dict[str, Any]:
    """Return the type of a call's result; of a tuple, whose parts are taken by calls of getitem, nothing."""
    return {} if fake is None or isinstance(fake, (tuple, list)) else _type(fake)


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _target(target: Any) -> str:
    module = getattr(target, "__module__", "")
    return str(target) if isinstance(target, OpOverload) else f"{module}.{target.__name__}"
