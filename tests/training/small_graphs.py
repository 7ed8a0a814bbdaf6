"""Small ONNX graphs for the tests of OnnxModule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

__all__ = ["BOOL", "FLOAT", "INT64", "graph_of", "model_of", "perceptron", "value"]

FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL


def value(name: str, shape: Sequence[Any] | None = ("n", 4), dtype: int = FLOAT) -> onnx.ValueInfoProto:
    """An input or output."""
    return helper.make_tensor_value_info(name, dtype, shape)


def graph_of(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    initializers: Mapping[str, Any] | None = None,
) -> onnx.GraphProto:
    """A graph; its initializers are arrays by name, float32 if of floats."""
    tensors = []
    for name, data in (initializers or {}).items():
        array = np.asarray(data)
        tensors.append(numpy_helper.from_array(array.astype(np.float32) if array.dtype == np.float64 else array, name))
    return helper.make_graph(nodes, "graph", inputs, outputs, tensors)


def model_of(graph: onnx.GraphProto, opset: int = 17, **options: Any) -> onnx.ModelProto:
    """A model with ONNX's operators, and ONNX Runtime's."""
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=[*imports, *options.pop("imports", [])], ir_version=10, **options)


def perceptron() -> onnx.ModelProto:
    """Gemm, Relu, Gemm of (n, 4), with weights of dotted names, of raw data and of typed data."""
    random = np.random.default_rng(0)
    nodes = [
        helper.make_node("Gemm", ["x", "first.weight", "first.bias"], ["hidden"], transB=1, name="first"),
        helper.make_node("Relu", ["hidden"], ["positive"], name="relu"),
        helper.make_node("Gemm", ["positive", "second.0.weight"], ["y"], name="second"),
    ]
    weights = {
        "first.weight": random.normal(size=(5, 4)),
        "first.bias": random.normal(size=5),
        "second.0.weight": random.normal(size=(5, 3)),
    }
    graph = graph_of(nodes, [value("x")], [value("y", ("n", 3))], weights)
    bias = graph.initializer[1]
    typed = helper.make_tensor(bias.name, FLOAT, bias.dims, numpy_helper.to_array(bias).tolist())
    bias.CopyFrom(typed)
    return model_of(graph)
