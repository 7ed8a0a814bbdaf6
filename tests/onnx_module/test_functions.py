"""Tests of functions of the model, and of those that onnx gives for operators."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
import torch
from exported_models import run_onnxruntime
from onnx import helper, parser
from small_graphs import graph_of, model_of, value

from ort_dynamo.onnx_module import OnnxModule
from ort_dynamo.testing import assert_close

CALL = """
<ir_version: 8, opset_import: ["" : 17, "local" : 1]>
agraph (float[N, M] x) => (float[A, B] y) { y = local.outer<SCALE>(x) }
<domain: "local", opset_import: ["" : 17, "local" : 1]>
outer <factor> (a) => (r) { r = local.scaled<by: KIND = @factor>(a) }
<domain: "local", opset_import: ["" : 17]>
scaled <by> (a) => (r) { c = Constant<ATTRIBUTE: KIND = @by>()  d = Cast<to = 1>(c)  r = Mul(a, d) }
"""


@pytest.mark.parametrize(
    ("kind", "attribute", "scale"),
    [
        ("float", "value_float", "2.5"),
        ("floats", "value_floats", "[2.5, 1.5, 0.5]"),
        ("int", "value_int", "3"),
        ("ints", "value_ints", "[3, 2, 1]"),
    ],
)
def test_a_constant_has_the_value_of_an_attribute_of_its_function(kind: str, attribute: str, scale: str) -> None:
    text = CALL.replace("KIND", kind).replace("ATTRIBUTE", attribute).replace("SCALE", f"factor = {scale}")
    model = parser.parse_model(text)
    x = torch.randn(2, 3)
    (expected,) = run_onnxruntime(model, (x,))
    assert_close(OnnxModule(model)(x)[0], torch.from_numpy(expected), "y")


def model(name: str, inputs: list[str], data: dict[str, Any], **attributes: Any) -> onnx.ModelProto:
    """A model that adds x and the result of an operator."""
    nodes = [helper.make_node(name, inputs, ["z"], **attributes), helper.make_node("Add", ["x", "z"], ["y"])]
    return model_of(graph_of(nodes, [value("x", (2, 3, 4, 4))], [value("y", None)], data), 20)


@pytest.mark.parametrize("name", ["HannWindow", "HammingWindow", "BlackmanWindow"])
@pytest.mark.parametrize("periodic", [0, 1])
def test_a_window_is_that_of_onnxruntime(name: str, periodic: int) -> None:
    proto = model(name, ["size"], {"size": np.int64(4)}, periodic=periodic)
    x = torch.randn(2, 3, 4, 4)
    (expected,) = run_onnxruntime(proto, (x,))
    assert_close(OnnxModule(proto)(x)[0], torch.from_numpy(expected), name)


def test_a_normalization_by_mean_and_variance_is_that_of_onnxruntime() -> None:
    proto = model("MeanVarianceNormalization", ["x"], {}, axes=[0, 2, 3])
    x = torch.randn(2, 3, 4, 4)
    (expected,) = run_onnxruntime(proto, (x,))
    assert_close(OnnxModule(proto)(x)[0], torch.from_numpy(expected), "y")


@pytest.mark.parametrize("corners", [0, 1])
def test_an_affine_grid_is_that_of_torch(corners: int) -> None:
    node = helper.make_node("AffineGrid", ["theta", "size"], ["y"], align_corners=corners)
    inputs = [value("theta", (2, 2, 3))]
    graph = graph_of([node], inputs, [value("y", None)], {"size": np.array([2, 1, 4, 5])})
    theta = torch.randn(2, 2, 3)
    expected = torch.nn.functional.affine_grid(theta, [2, 1, 4, 5], align_corners=bool(corners))
    assert_close(OnnxModule(model_of(graph, 20))(theta)[0], expected, "the grid", strides=False)
