"""Tests of operators at the edges of their domain, against ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from exported_models import run_onnxruntime
from onnx import TensorProto, helper
from small_graphs import FLOAT, graph_of, model_of, value

from ort_dynamo.onnx_module import OnnxModule
from ort_dynamo.testing import assert_close

CASES: list[tuple[str, int, tuple[int, ...], dict[str, Any], dict[str, Any]]] = [
    ("Pad", 19, (4, 3), {"mode": "wrap"}, {"pads": np.array([-1, 0, 2, 0])}),
    ("Pad", 19, (4, 3), {"mode": "wrap"}, {"pads": np.array([2, 1, -1, -1])}),
    ("Pad", 19, (4, 3), {"mode": "edge"}, {"pads": np.array([2, 1, -1, -1])}),
    ("Pad", 19, (5, 3), {"mode": "reflect"}, {"pads": np.array([2, 1, -1, -1])}),
    ("Pad", 19, (4, 3), {"mode": "edge"}, {"pads": np.array([-1, 0, -1, 0])}),
]
CASES += [
    (
        "Slice",
        17,
        (5, 3),
        {},
        {"start": np.array([start]), "end": np.array([end]), "axes": np.array([0]), "steps": step},
    )
    for start, end in [(-100, -1000), (-100, 2), (-5, -1000), (-6, -6), (100, 2), (0, -1000), (2, 100), (-2, 5), (9, 5)]
    for step in (np.array([-1]), np.array([-2]))
]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_an_edge_is_that_of_onnxruntime(case: int) -> None:
    name, opset, shape, attributes, data = CASES[case]
    node = helper.make_node(name, ["x", *data], ["y"], **attributes)
    proto = model_of(graph_of([node], [value("x", shape)], [value("y", None)], data), opset)
    x = torch.randn(shape)
    (expected,) = run_onnxruntime(proto, (x,))
    assert_close(OnnxModule(proto)(x)[0].detach(), torch.from_numpy(expected), str(CASES[case]), strides=False)


def test_a_slice_of_known_numbers_begins_at_the_first_one_if_it_starts_before_it() -> None:
    for start, end in [(-100, -1000), (-100, 2), (-3, -1000), (1, -1000), (100, 0)]:
        nodes = [
            helper.make_node("Shape", ["x"], ["shape"]),
            helper.make_node("Slice", ["shape", "start", "end", "axes", "steps"], ["some"]),
            helper.make_node("ReduceProd", ["some"], ["product"], keepdims=0),
            helper.make_node("Cast", ["product"], ["float"], to=FLOAT),
            helper.make_node("Add", ["x", "float"], ["y"]),
        ]
        data = {"start": np.array([start]), "end": np.array([end]), "axes": np.array([0]), "steps": np.array([-1])}
        proto = model_of(graph_of(nodes, [value("x", (2, 3, 5))], [value("y", None)], data))
        x = torch.zeros(2, 3, 5)
        (expected,) = run_onnxruntime(proto, (x,))
        assert_close(OnnxModule(proto)(x)[0], torch.from_numpy(expected), f"{start}, {end}")


@pytest.mark.parametrize(
    "numbers", [(5, 0, 2), (0, 5, -1), (3, 3, 1), (5, 0, -2), (5.0, 0.0, 2.0), (0.0, 1.0, 0.25), (1, 6, 2)]
)
def test_a_range_past_its_limit_is_empty(numbers: tuple[float, float, float]) -> None:
    kind = np.int64 if isinstance(numbers[0], int) else np.float32
    data: dict[str, Any] = {name: kind(number) for name, number in zip("abc", numbers, strict=True)}
    nodes = [
        helper.make_node("Range", ["a", "b", "c"], ["numbers"]),
        helper.make_node("Cast", ["numbers"], ["floats"], to=FLOAT),
        helper.make_node("Concat", ["x", "floats"], ["y"], axis=0),
    ]
    proto = model_of(graph_of(nodes, [value("x", ("n",))], [value("y", None)], data))
    x = torch.randn(3)
    (expected,) = run_onnxruntime(proto, (x,))
    assert_close(OnnxModule(proto)(x)[0], torch.from_numpy(expected), str(numbers))


@pytest.mark.parametrize("name", ["ReduceLogSum", "ReduceLogSumExp"])
def test_a_logarithm_of_integers_is_an_integer(name: str) -> None:
    node = helper.make_node(name, ["x"], ["y"])
    inputs, outputs = [value("x", (2, 4), TensorProto.INT32)], [value("y", None, TensorProto.INT32)]
    proto = model_of(graph_of([node], inputs, outputs), 18)
    x = torch.tensor([[1, 2, 3, 40], [5, 5, 6, 7]], dtype=torch.int32)
    (expected,) = run_onnxruntime(proto, (x,))
    assert_close(OnnxModule(proto)(x)[0], torch.from_numpy(expected), name)


@pytest.mark.parametrize("is_constant", [False, True])
@pytest.mark.parametrize(
    ("bases", "exponent"),
    [
        ([2, -2, 1, -1], np.int64(-1)),
        ([2, -2, 1, -1], np.int32([-2])),
        ([9, 7, -9], np.float16(4)),
        ([123456789], np.float32(1)),
        ([123456789], np.float32(0.5)),
    ],
)
def test_a_power_of_an_integer_has_the_digits_of_float64(bases: list[int], exponent: Any, is_constant: bool) -> None:
    inputs, kind = [value("x", ("n",), TensorProto.INT64)], helper.np_dtype_to_tensor_dtype(exponent.dtype)
    data = {"b": exponent} if is_constant else {}
    inputs += [] if is_constant else [value("b", exponent.shape, kind)]
    proto = model_of(
        graph_of([helper.make_node("Pow", ["x", "b"], ["y"])], inputs, [value("y", None, TensorProto.INT64)], data)
    )
    given = (torch.tensor(bases), *([] if is_constant else [torch.from_numpy(np.array(exponent))]))
    (expected,) = run_onnxruntime(proto, given)
    assert_close(OnnxModule(proto)(*given)[0], torch.from_numpy(expected), f"{bases} to {exponent}")


@pytest.mark.parametrize("compiled", [False, True])
def test_a_batch_norm_trains_on_one_value_per_channel(compiled: bool) -> None:
    node = helper.make_node("BatchNormalization", ["x", "s", "b", "m", "v"], ["y", "mean", "var"], training_mode=1)
    data = {"s": [1.0, 2.0, 3.0], "b": [0.5, 0.0, -1.0], "m": [0.0, 1.0, 2.0], "v": [1.0, 2.0, 3.0]}
    outputs = [value(name, None) for name in ("y", "mean", "var")]
    proto = model_of(graph_of([node], [value("x", (1, 3))], outputs, data))
    x = torch.randn(1, 3)
    expected = run_onnxruntime(proto, (x,))
    module = OnnxModule(proto)
    found = torch.compile(module, backend="ort_train", fullgraph=True)(x) if compiled else module(x)
    for mine, theirs in zip(found, expected, strict=True):
        assert_close(mine.detach(), torch.from_numpy(theirs), "y, mean or variance")
    found[0].sum().backward()
    assert_close(module.b.grad, torch.ones(3), "the gradient of the bias")


@pytest.mark.parametrize("compiled", [False, True])
def test_an_instance_norm_of_one_element_is_its_bias(compiled: bool) -> None:
    node = helper.make_node("InstanceNormalization", ["x", "s", "b"], ["y"], epsilon=1.0)
    data = {"s": [1.0, 2.0, 3.0], "b": [0.5, 0.0, -1.0]}
    module = OnnxModule(model_of(graph_of([node], [value("x", (2, 3, 1, 1))], [value("y", None)], data)))
    x = torch.randn(2, 3, 1, 1)
    found = torch.compile(module, backend="ort_train", fullgraph=True)(x) if compiled else module(x)
    bias = torch.tensor(data["b"]).reshape(1, 3, 1, 1).expand(2, 3, 1, 1)
    assert_close(found[0].detach(), bias, "y", strides=False)


def test_the_statistics_of_a_layer_norm_of_float64_are_float32() -> None:
    node = helper.make_node("LayerNormalization", ["x", "s"], ["y", "mean", "inverse"])
    double = TensorProto.DOUBLE
    outputs = [value("y", None, double), value("mean", None), value("inverse", None)]
    graph = graph_of([node], [value("x", (2, 4), double)], outputs, {})
    graph.initializer.append(helper.make_tensor("s", double, [4], [1.0, 2.0, 3.0, 4.0]))
    proto = model_of(graph)
    x = torch.randn(2, 4, dtype=torch.float64)
    for mine, theirs in zip(OnnxModule(proto)(x), run_onnxruntime(proto, (x,)), strict=True):
        assert_close(mine.detach(), torch.from_numpy(theirs), "a result", strides=False)
