"""Make the values inside a built graph its results, so that somebody can look at them."""

from __future__ import annotations

import dataclasses

import onnx
import torch

from ort_dynamo.graph.boundary import ValueSpec
from ort_dynamo.graph.build import BuiltGraph
from ort_dynamo.graph.dtypes import ONNX_TO_TORCH
from ort_dynamo.runtime.session import optimize
from ort_dynamo.targets.target import Target

__all__ = ["show_values"]


def show_values(built: BuiltGraph, target: Target, device: torch.device) -> tuple[BuiltGraph, tuple[int, ...]]:
    """Give a graph of the same nodes, whose results are the values inside that FX nodes give.

    The nodes are those that run: ONNX Runtime's optimizers come first, and then are off. A value inside a node that
    they, or a pass, have fused is no value of the model.

    Args:
        built: the graph.
        target: the target that it was lowered for.
        device: the device of its tensors.

    Returns:
        The graph, and for each of its results the index of the FX node in the island. Results of `built` are not among
        these.
    """
    is_final = built.session.graph_optimization == "disable"
    model = onnx.ModelProto.FromString(built.model if is_final else optimize(built, target, device))
    results = {value.name for value in model.graph.output}
    inside = {name for node in model.graph.node for name in node.output} - results
    known = {
        value.name: value
        for value in model.graph.value_info
        if value.name in inside and value.type.tensor_type.elem_type in ONNX_TO_TORCH
    }
    found: dict[int, onnx.ValueInfoProto] = {}
    for name, index in built.values.items():
        if name in known:
            found.setdefault(index, known[name])
    shown = sorted(found.items())
    del model.graph.output[:]
    model.graph.output.extend(value for _, value in shown)
    graph = dataclasses.replace(
        built,
        name=f"{built.name}-shown",
        model=model.SerializeToString(),
        outputs=tuple(ValueSpec(ONNX_TO_TORCH[value.type.tensor_type.elem_type]) for _, value in shown),
        session=dataclasses.replace(built.session, graph_optimization="disable"),
        reference=b"",
    )
    return graph, tuple(index for index, _ in shown)
