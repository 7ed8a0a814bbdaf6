"""Tests of gradients where a function of torch's and a formula differ: at zeros, bounds, and of expanded tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from exported_models import run_onnxruntime
from onnx import helper
from small_graphs import graph_of, model_of, value

from ort_dynamo.onnx_module import OnnxModule
from ort_dynamo.testing import assert_close


@pytest.mark.parametrize(
    ("opset", "attributes", "data"),
    [
        (13, {"axes": [1]}, {}),
        (13, {}, {}),
        (18, {"keepdims": 0}, {"axes": np.array([-1])}),
        (18, {"keepdims": 0}, {"axes": np.array([], np.int64)}),
        (18, {"noop_with_empty_axes": 1}, {"axes": np.array([], np.int64)}),
    ],
)
def test_the_norm_of_zeros_has_a_gradient_of_zeros(
    opset: int, attributes: dict[str, Any], data: dict[str, Any]
) -> None:
    node = helper.make_node("ReduceL2", ["x", *data], ["y"], **attributes)
    proto = model_of(graph_of([node], [value("x", (3, 4))], [value("y", None)], data), opset)
    module = OnnxModule(proto)
    x = torch.tensor([[0.0] * 4, [1.0, -2, 3, 0], [0.5, 0, 0, 0]])
    for one in (x, torch.zeros(3, 4)):
        given = one.clone().requires_grad_()
        (found,) = module(given)
        if not attributes.get("noop_with_empty_axes"):  # there ONNX Runtime copies x
            assert_close(found.detach(), torch.from_numpy(run_onnxruntime(proto, (one,))[0]), "y")
        found.sum().backward()
        assert given.grad is not None
        assert bool(given.grad.isfinite().all())
    assert not given.grad.any()


def test_the_gradient_of_selu_at_zero_is_that_of_torch() -> None:
    node = helper.make_node("Selu", ["x"], ["y"])
    module = OnnxModule(model_of(graph_of([node], [value("x", ("n",))], [value("y", ("n",))])))
    found = []
    for function in (lambda x: module(x)[0], torch.selu):
        x = torch.tensor([-1.0, -0.0, 0.0, 1.0], requires_grad=True)
        y = function(x)
        y.sum().backward()
        found.append((y.detach(), x.grad))
    for mine, theirs in zip(*found, strict=True):
        assert_close(mine, theirs, "Selu")


@pytest.mark.parametrize("training_mode", [0, 1])
def test_a_batch_norm_of_expanded_statistics_has_the_gradient_of_whole_ones(training_mode: int) -> None:
    names = {"s": 2.0, "b": 0.5, "m": 0.25, "v": 4.0}
    nodes = [helper.make_node("Expand", [name, "shape"], [name * 2]) for name in names]
    outputs = ["y", "mean", "var"] if training_mode else ["y"]
    inputs = ["x", *(name * 2 for name in names)]
    nodes.append(helper.make_node("BatchNormalization", inputs, outputs, training_mode=training_mode))
    data: dict[str, Any] = {name: np.float32(number) for name, number in names.items()}
    results = [value(name, None) for name in outputs]
    graph = graph_of(nodes, [value("x", (5, 4))], results, {**data, "shape": np.array([4])})
    module = OnnxModule(model_of(graph), scalars=["s", "b"])
    x = torch.randn(5, 4, requires_grad=True)
    weight = torch.randn(5, 4)
    (module(x)[0] * weight).sum().backward()
    mine = x.grad
    x.grad = None
    s, b, m, v = (torch.full((4,), number) for number in names.values())
    found = torch.nn.functional.batch_norm(x, m, v, s, b, bool(training_mode), 0.1, 1e-5)
    (found * weight).sum().backward()
    assert_close(mine, x.grad, "the gradient of x")
    assert float(module.b.grad) == pytest.approx(float(weight.sum()), rel=1e-4)
