"""A Dynamo graph as one ATen graph, for files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Interpreter

from ort_dynamo.capture.whole_graphs import capture_gradients, capture_whole


def captured(
    capture: Callable[[GraphModule, Sequence[Any]], GraphModule | None], function: Callable[..., Any], *inputs: Any
) -> GraphModule | None:
    """Capture the one graph of a function."""
    found: list[GraphModule | None] = []

    def backend(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        found.append(capture(gm, example_inputs))
        return gm.forward

    torch.compile(function, backend=backend, fullgraph=True)(*inputs)
    return found[0]


def operators(gm: GraphModule | None) -> list[str]:
    assert gm is not None
    return [str(node.target) for node in gm.graph.nodes if node.op == "call_function"]


def test_a_whole_graph_has_no_gradients_of_its_own() -> None:
    gm = captured(capture_whole, nn.Linear(3, 2), torch.randn(4, 3))
    assert gm is not None
    assert any("addmm" in one for one in operators(gm))
    assert len(gm.graph.find_nodes(op="output")[0].args[0]) == 1


def test_a_module_around_a_graph_may_compute_gradients_inside() -> None:
    class Around(nn.Module):
        def __init__(self, graph: GraphModule) -> None:
            super().__init__()
            self.graph_module = graph

        def forward(self, *inputs: Any) -> Any:
            *own, scale = inputs
            with torch.enable_grad():
                leaves = [one.detach().requires_grad_() for one in own]
                (loss,) = self.graph_module(*leaves)
                return torch.autograd.grad(loss * scale, leaves)

    weight = torch.randn(3, requires_grad=True)
    gm = captured(
        lambda gm, inputs: capture_whole(gm, inputs, Around, [torch.tensor(2.0)]), lambda w: (w * w).sum(), weight
    )
    assert gm is not None
    (found,) = gm(weight.detach(), torch.tensor(2.0))
    torch.testing.assert_close(found, 4 * weight.detach())


def test_the_gradient_of_the_loss_is_one_and_no_input() -> None:
    weight = torch.randn(3, requires_grad=True)
    gm = captured(capture_gradients, lambda w: (w.exp().detach(), (w * w).sum()), weight)
    assert gm is not None
    assert len(gm.graph.find_nodes(op="placeholder")) == 1
    *_, gradient = Interpreter(gm).run(weight.detach(), enable_io_processing=False)
    torch.testing.assert_close(gradient, 2 * weight.detach())


def test_without_a_gradient_there_is_no_joint_graph() -> None:
    assert captured(capture_gradients, lambda x: x * 2, torch.randn(3)) is None
