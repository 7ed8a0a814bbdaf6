"""Runs saved graphs with plain InferenceSessions and NumPy, as the file that joins them describes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime

__all__ = ["run_graph"]

Values = dict[str, Any]


def view(x: npt.NDArray[Any], shape: Sequence[int]) -> npt.NDArray[Any]:
    return x.reshape(shape)


def transpose(x: npt.NDArray[Any], first: int, second: int) -> npt.NDArray[Any]:
    return x.swapaxes(first, second)


def split(x: npt.NDArray[Any], size: int, axis: int = 0) -> list[npt.NDArray[Any]]:
    return np.split(x, range(size, x.shape[axis], size), axis)


CALLS: Mapping[str, Callable[..., Any]] = {
    "_operator.getitem": lambda values, index: values[index],
    "aten._unsafe_view.default": view,
    "aten.alias.default": lambda x: x,
    "aten.detach.default": lambda x: x,
    "aten.expand.default": lambda x, shape: np.broadcast_to(
        x, [b if a == -1 else a for a, b in zip(shape, x.shape, strict=True)]
    ),
    "aten.permute.default": lambda x, axes: x.transpose(axes),
    "aten.split.Tensor": split,
    "aten.t.default": lambda x: x.T,
    "aten.transpose.int": transpose,
    "aten.unsqueeze.default": np.expand_dims,
    "aten.view.default": view,
    "ort_dynamo.passes.fx.copy_small_results.owned": lambda x: x,
}


def run_graph(graph: Mapping[str, Any], values: Mapping[str, Any], folder: Path, stage: str = "rewritten") -> Values:
    """Run one graph of the file on the values of its inputs, and give those of all that it makes, by name."""
    known: Values = {one["value"]: values[one["value"]] for one in graph["inputs"]}
    for step in graph["steps"]:
        if "island" in step:
            known.update(run_island(step, known, folder / step["files"][stage]))
        elif "constant" in step:
            data = np.fromfile(folder / step["file"], step["dtype"]) if "file" in step else step["data"]
            known[step["value"]] = np.asarray(data, step["dtype"]).reshape(step["shape"])
        else:
            known[step["value"]] = CALLS[step["call"]](*read(step["args"], known), **read(step["kwargs"], known))
    return known


def run_island(step: Mapping[str, Any], known: Values, model: Path) -> Values:
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    feeds = {}
    for one in step["inputs"]:
        value = np.asarray(known[one["value"]] if "value" in one else one["given"], one["dtype"])
        feeds[one["name"]] = np.ascontiguousarray(value.transpose(one["order"]) if "order" in one else value)
    results = session.run([one["name"] for one in step["outputs"]], feeds)
    made = {}
    for one, result in zip(step["outputs"], results, strict=True):
        made[one["value"]] = result.transpose(np.argsort(one["order"])) if "order" in one else result
    return made


def read(argument: Any, known: Values) -> Any:
    if isinstance(argument, dict) and "value" in argument:
        return known[argument["value"]]
    if isinstance(argument, dict) and "python" not in argument:
        return {key: read(value, known) for key, value in argument.items()}
    if isinstance(argument, list):
        return [read(one, known) for one in argument]
    return math.inf if argument == {"python": "inf"} else argument
