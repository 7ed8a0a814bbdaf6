"""Tests of sizes that a model computes from sizes and scales: float32, as ONNX Runtime computes them."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
import torch
from exported_models import run_onnxruntime
from onnx import helper
from small_graphs import FLOAT, INT64, graph_of, model_of, value

from ort_dynamo.onnx_module import OnnxModule
from ort_dynamo.testing import assert_close

SCALES = [1.4, 0.7, 7 / 3, 2 / 3, 1.1, 0.1, 1.9, 3.3333, 0.29, 2.0, 1.0, 4 / 3]


def resize(name: str, opset: int, scale: float, attributes: dict[str, Any]) -> onnx.ModelProto:
    """A model that resizes the last axis of (1, 1, 2, n) by a scale."""
    data = {"scales": [1.0, 1.0, 1.0, scale]}
    if opset == 7:
        node = helper.make_node(name, ["x"], ["y"], scales=data.pop("scales"), **attributes)
    else:
        inputs = ["x", "scales"] if opset < 11 else ["x", "", "scales"]
        node = helper.make_node(name, inputs, ["y"], **attributes)
    return model_of(graph_of([node], [value("x", (1, 1, 2, "n"))], [value("y", None)], data), opset)


@pytest.mark.parametrize(
    ("name", "opset", "attributes"),
    [
        ("Upsample", 7, {}),
        ("Upsample", 9, {}),
        ("Resize", 10, {"mode": "linear"}),
        ("Resize", 13, {"mode": "linear"}),
        ("Resize", 18, {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}),
    ],
)
def test_a_resized_axis_has_the_length_that_onnxruntime_gives_it(
    name: str, opset: int, attributes: dict[str, Any]
) -> None:
    for scale in SCALES:
        if name == "Upsample" and scale < 1:
            continue
        model = resize(name, opset, scale, attributes)
        module = OnnxModule(model)
        for size in (1, 3, 5, 9, 10, 15, 30, 100):
            length = int(np.float32(scale) * np.float32(size))
            if length == 0 or (length == size and scale != 1):  # where no size changes, ONNX Runtime copies x
                continue
            x = torch.randn(1, 1, 2, size)
            (expected,) = run_onnxruntime(model, (x,))
            assert_close(module(x)[0], torch.from_numpy(expected), f"{scale} of {size}", strides=False)


def test_a_resized_axis_of_open_size_has_the_length_that_onnxruntime_gives_it() -> None:
    for scale in (1.4, 7 / 3, 2.0):
        model = resize("Resize", 13, scale, {"mode": "linear"})
        compiled = torch.compile(OnnxModule(model), backend="ort_train", fullgraph=True, dynamic=True)
        for size in (5, 3, 10, 15):
            x = torch.randn(1, 1, 2, size)
            (expected,) = run_onnxruntime(model, (x,))
            assert compiled(x)[0].shape == expected.shape, (scale, size)


def scaled_size(last: str) -> onnx.ModelProto:
    """A model that gives as many ones as 1.4 times the size of x, rounded."""
    nodes = [
        helper.make_node("Shape", ["x"], ["sizes"]),
        helper.make_node("Cast", ["sizes"], ["floats"], to=FLOAT),
        helper.make_node("Mul", ["floats", "scale"], ["product"]),
        helper.make_node("Identity" if last == "Cast" else last, ["product"], ["rounded"]),
        helper.make_node("Cast", ["rounded"], ["size"], to=INT64),
        helper.make_node("ConstantOfShape", ["size"], ["zeros"]),
        helper.make_node("Add", ["zeros", "one"], ["y"]),
    ]
    data = {"scale": np.float32(1.4), "one": np.float32(1)}
    return model_of(graph_of(nodes, [value("x", ("n",))], [value("y", ("m",))], data))


@pytest.mark.parametrize("last", ["Floor", "Ceil", "Cast"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_float_arithmetic_on_shapes_has_float32_digits_in_eager_and_compiled(last: str, dynamic: bool) -> None:
    model = scaled_size(last)
    module = OnnxModule(model)
    compiled = torch.compile(module, backend="ort_train", fullgraph=True, dynamic=dynamic)
    for size in (5, 10, 11):
        x = torch.ones(size)
        (expected,) = run_onnxruntime(model, (x,))
        assert module(x)[0].shape == compiled(x)[0].shape == expected.shape, size


def test_scales_of_two_axes_are_refused() -> None:
    model = resize("Resize", 13, 2.0, {})
    del model.graph.initializer[0].dims[:]
    model.graph.initializer[0].dims.extend([1, 4])
    with pytest.raises(ValueError, match="expected a vector or a scalar, not a tensor of 2 axes"):
        OnnxModule(model)(torch.ones(1, 1, 2, 3))
