"""Tests of If, Loop and Scan, their gradients, and the sizes that they leave open."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
import torch
from exported_models import run_onnxruntime
from onnx import helper
from small_graphs import BOOL, INT64, graph_of, model_of, value
from torch import Tensor
from torch._dynamo.utils import counters

from ort_dynamo.onnx_module import OnnxModule
from ort_dynamo.testing import assert_close

make = helper.make_node
WEIGHT = np.random.default_rng(0).normal(size=(4, 4)) / 2


def branches(before: list[onnx.NodeProto], **data: Any) -> onnx.ModelProto:
    then_branch = graph_of([make("MatMul", ["x", "w"], ["t"])], [], [value("t")])
    else_branch = graph_of([make("Mul", ["x", "two"], ["e"])], [], [value("e")], {"two": np.float32(2)})
    node = make("If", ["condition"], ["y"], then_branch=then_branch, else_branch=else_branch)
    return model_of(graph_of([*before, node], [value("x")], [value("y")], {"w": WEIGHT, **data}))


def loop(trips: int | None, until: float | None = None) -> onnx.ModelProto:
    nodes = [
        make("MatMul", ["s", "w"], ["m"]),
        make("Tanh", ["m"], ["next"]),
        make("ReduceSum", ["next"], ["row"], keepdims=0),
        make("Identity", ["go"], ["goes"]) if until is None else make("Less", ["row", "until"], ["goes"]),
    ]
    body = graph_of(
        nodes,
        [value("i", (), INT64), value("go", (), BOOL), value("s")],
        [value("goes", (), BOOL), value("next"), value("row", ())],
    )
    outer = make("Loop", ["trips" if trips is not None else "", "", "x"], ["y", "rows"], body=body)
    data = {"w": WEIGHT, "until": np.float32(until or 0), **({} if trips is None else {"trips": np.int64(trips)})}
    return model_of(graph_of([outer], [value("x")], [value("y"), value("rows", ("k",))], data))


def loop_in_torch(x: Tensor, w: Tensor, trips: int) -> tuple[Tensor, Tensor]:
    rows = []
    for _ in range(trips):
        x = torch.tanh(x @ w)
        rows.append(x.sum())
    return x, torch.stack(rows)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("compiled", [True, False])
def test_an_if_on_data_runs_one_branch_and_has_its_gradient(sign: float, compiled: bool) -> None:
    total = [make("ReduceSum", ["x"], ["total"], keepdims=0), make("Greater", ["total", "zero"], ["condition"])]
    model = branches(total, zero=np.float32(0))
    module = OnnxModule(model)
    x = torch.full((2, 4), sign, requires_grad=True)
    (y,) = (torch.compile(module, backend="ort_train") if compiled else module)(x)
    (expected,) = run_onnxruntime(model, (x.detach(),))
    assert_close(y.detach(), torch.from_numpy(expected), "y", strides=False)
    y.sum().backward()
    wanted = module.w.detach().sum(1).expand(2, 4) if sign > 0 else torch.full((2, 4), 2.0)
    assert_close(x.grad, wanted, "the gradient", strides=False)
    assert (module.w.grad is not None) == (sign > 0)


@pytest.mark.parametrize("chosen", [True, False])
def test_an_if_on_a_constant_leaves_one_branch_and_no_break(chosen: bool) -> None:
    module = OnnxModule(branches([], condition=np.array(chosen)))
    assert not any(type(one).__name__ == "IfNode" for one in module.modules())
    x = torch.randn(2, 4)
    (y,) = torch.compile(module, backend="eager", fullgraph=True)(x)
    assert_close(y.detach(), x @ module.w.detach() if chosen else 2 * x, "y")


def test_an_if_on_a_size_breaks_no_graph() -> None:
    nodes = [
        make("Shape", ["x"], ["shape"]),
        make("Gather", ["shape", "first"], ["n"]),
        make("Greater", ["n", "first"], ["condition"]),
    ]
    module = OnnxModule(branches(nodes, first=np.int64(0)))
    x = torch.randn(2, 4)
    (y,) = torch.compile(module, backend="eager", fullgraph=True, dynamic=True)(x)
    assert_close(y.detach(), x @ module.w.detach(), "y")


@pytest.mark.parametrize("compiled", [True, False])
def test_a_loop_of_known_length_has_its_gradient_and_is_one_graph(compiled: bool) -> None:
    model = loop(3)
    module = OnnxModule(model)
    x = torch.randn(2, 4)
    y, rows = (torch.compile(module, backend="ort_train", fullgraph=True) if compiled else module)(x)
    for found, expected in zip((y, rows), run_onnxruntime(model, (x,)), strict=True):
        assert_close(found.detach(), torch.from_numpy(expected), "an output", strides=False)
    (y.sum() + rows.square().sum()).backward()
    w = module.w.detach().clone().requires_grad_()
    mine, sums = loop_in_torch(x, w, 3)
    (mine.sum() + sums.square().sum()).backward()
    assert_close(module.w.grad, w.grad, "the gradient", strides=False)


def test_a_loop_that_data_ends_runs_on_as_long_as_onnxruntime_does() -> None:
    model = loop(9, until=0.5)
    module = OnnxModule(model)
    for scale in (-1.0, 0.1, 3.0):
        x = torch.full((2, 4), scale)
        expected = run_onnxruntime(model, (x,))
        for found in (module(x), torch.compile(module, backend="ort_train")(x)):
            assert_close(found[0].detach(), torch.from_numpy(expected[0]), "y", strides=False)
            assert_close(found[1].detach(), torch.from_numpy(expected[1]), "rows", strides=False)


def test_a_loop_of_no_iterations_stacks_nothing() -> None:
    y, rows = OnnxModule(loop(0))(torch.ones(2, 4))
    assert_close(y, torch.ones(2, 4), "y")
    assert rows.shape == (0,)


def test_a_loop_carries_sizes_as_numbers() -> None:
    body = graph_of(
        [make("Identity", ["go"], ["goes"]), make("Add", ["n", "n"], ["twice"])],
        [value("i", (), INT64), value("go", (), BOOL), value("n", (1,), INT64)],
        [value("goes", (), BOOL), value("twice", (1,), INT64)],
    )
    nodes = [
        make("Shape", ["x"], ["n"], end=1),
        make("Loop", ["trips", "", "n"], ["size"], body=body),
        make("Expand", ["one", "size"], ["y"]),
    ]
    data = {"trips": np.int64(2), "one": np.float32(1)}
    module = OnnxModule(model_of(graph_of(nodes, [value("x")], [value("y", ("m",))], data)))
    compiled = torch.compile(module, backend="eager", fullgraph=True, dynamic=True)
    assert [compiled(torch.ones(n, 4))[0].shape[0] for n in (2, 3)] == [8, 12]
    assert counters["stats"]["unique_graphs"] == 1


def test_a_scan_has_its_gradient() -> None:
    body = graph_of(
        [make("Mul", ["s", "e"], ["p"]), make("Add", ["p", "b"], ["t"]), make("Identity", ["t"], ["row"])],
        [value("s", (3,)), value("e", (3,))],
        [value("t", (3,)), value("row", (3,))],
    )
    axes = {"num_scan_inputs": 1, "scan_input_axes": [1], "scan_output_directions": [1]}
    node = make("Scan", ["s0", "x"], ["s1", "rows"], body=body, **axes)
    inputs, outputs = [value("s0", (3,)), value("x", (3, 4))], [value("s1", (3,)), value("rows", (4, 3))]
    model = model_of(graph_of([node], inputs, outputs, {"b": [1.0, 2, 3]}))
    module = OnnxModule(model)
    s, x = torch.randn(3), torch.randn(3, 4, requires_grad=True)
    last, rows = module(s, x)
    for found, expected in zip((last, rows), run_onnxruntime(model, (s, x.detach())), strict=True):
        assert_close(found.detach(), torch.from_numpy(expected), "an output", strides=False)
    rows.sum().backward()
    assert x.grad is not None
    assert module.b.grad is not None
    eps = 1e-2
    with torch.no_grad():
        module.b += eps
        numeric = (module(s, x)[1].sum() - rows.sum()) / eps
    assert float(module.b.grad.sum()) == pytest.approx(float(numeric), rel=5e-2)


def test_a_function_of_the_model_is_written_where_it_is_called() -> None:
    scaled = helper.make_function(
        "own",
        "Scaled",
        ["a", "b"],
        ["c"],
        [
            helper.make_node("MatMul", ["a", "b"], ["m"]),
            helper.make_node("LeakyRelu", ["m"], ["c"]),
        ],
        [helper.make_opsetid("", 17)],
        ["alpha"],
    )
    reference = scaled.node[1].attribute.add()
    reference.name, reference.ref_attr_name, reference.type = "alpha", "alpha", onnx.AttributeProto.FLOAT
    nodes = [
        make("Scaled", ["x", "w"], ["h"], domain="own", alpha=0.5),
        make("Scaled", ["h", "w"], ["y"], domain="own"),
    ]
    graph = graph_of(nodes, [value("x")], [value("y")], {"w": WEIGHT})
    model = model_of(graph, functions=[scaled], imports=[helper.make_opsetid("own", 1)])
    module = OnnxModule(model)
    x = torch.randn(2, 4)
    (expected,) = run_onnxruntime(model, (x,))
    assert_close(module(x)[0].detach(), torch.from_numpy(expected), "y", strides=False)
