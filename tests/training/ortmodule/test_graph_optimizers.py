"""Section 1.7 of ORTModule's reference: registered graph optimizers."""

from __future__ import annotations

import copy

import onnx
import torch
from small_models import Dense
from torch import nn

from ort_dynamo import ORTModule
from ort_dynamo.training.ortmodule import register_graph_optimizer


def relu_to_tanh(graph: onnx.GraphProto) -> None:
    for node in graph.node:
        if node.op_type == "Relu":
            node.op_type = "Tanh"


def test_a_graph_optimizer_changes_the_model_of_its_modules_and_is_keyed() -> None:
    x = torch.randn(3, 8)
    model = Dense()
    plain, changed = model.fc2(torch.relu(model.fc1(x))), model.fc2(torch.tanh(model.fc1(x)))
    with torch.no_grad():
        torch.testing.assert_close(ORTModule(copy.deepcopy(model)).eval()(x), plain)
        register_graph_optimizer(target_modules="Other|Dense", devices="cpu|cuda")(relu_to_tanh)
        torch.testing.assert_close(ORTModule(copy.deepcopy(model)).eval()(x), changed)
        other = nn.Sequential(model)
        torch.testing.assert_close(ORTModule(other).eval()(x), plain)


def test_graph_optimizers_run_by_priority_and_device() -> None:
    seen: list[str] = []
    register_graph_optimizer(priority=1)(lambda graph: seen.append("one"))
    register_graph_optimizer(priority=5)(lambda graph: seen.append("five"))
    register_graph_optimizer(devices="cuda")(lambda graph: seen.append("cuda"))
    ORTModule(Dense())(torch.randn(3, 8))
    assert seen == ["five", "one"] * 2  # forward and backward


def test_a_graph_optimizer_sees_the_forward_and_the_backward() -> None:
    graphs: list[int] = []

    @register_graph_optimizer()
    def count(graph: onnx.GraphProto) -> None:
        graphs.append(len(graph.node))

    ORTModule(Dense())(torch.randn(3, 8))
    assert len(graphs) == 2
    assert all(graphs)
